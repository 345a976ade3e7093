"""Real handwritten digits for the demo: scikit-learn's bundled set, or MNIST's idx files."""

from __future__ import annotations

import gzip
import lzma
import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from snack_cupy._check import fail

DIGITS_TEST = 600
OPENERS: dict[str, Callable[..., Any]] = {"": open, ".gz": gzip.open, ".xz": lzma.open}
UNSIGNED_BYTE = 8


class DemoError(ValueError):
    """The demo cannot run as asked; the message says why and what to do."""


class Dataset(NamedTuple):
    """Images as rows of float32 in [0, 1], labels as int64 from 0."""

    name: str
    train_images: NDArray[np.float32]
    train_labels: NDArray[np.int64]
    test_images: NDArray[np.float32]
    test_labels: NDArray[np.int64]

    @property
    def features(self) -> int:
        """Pixels of an image."""
        return int(self.train_images.shape[1])

    @property
    def classes(self) -> int:
        """Number of labels."""
        return int(max(self.train_labels.max(), self.test_labels.max())) + 1


def load_digits() -> Dataset:
    """The 1797 digits of 8 x 8 pixels in scikit-learn; 600, always the same, are the test set."""
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images = (images[order] / 16).astype(np.float32)
    labels = labels[order].astype(np.int64)
    test, train = slice(DIGITS_TEST), slice(DIGITS_TEST, None)
    return Dataset(
        "scikit-learn's handwritten digits",
        images[train],
        labels[train],
        images[test],
        labels[test],
    )


def load_mnist(folder: Path) -> Dataset:
    """MNIST, or a set in its form, from four idx files: plain, ``.gz`` or ``.xz``.

    Parameters
    ----------
    folder : Path
        Holds ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte`` and the same with ``t10k``;
        ``train-images.idx3-ubyte`` is understood as well.

    Raises
    ------
    DemoError
        A file is missing, damaged, or does not fit the others.
    """
    if not folder.is_dir():
        fail("demo", "--data", "name a folder", folder, DemoError)
    arrays = {}
    for part in ("train", "t10k"):
        images = _find(folder, f"{part}-images", 3)
        labels = _find(folder, f"{part}-labels", 1)
        arrays[part] = _read_pair(images, labels)
    (train_images, train_labels), (test_images, test_labels) = arrays["train"], arrays["t10k"]
    if train_images.shape[1] != test_images.shape[1]:
        rule = f"have images of {train_images.shape[1]} pixels, as the training set has"
        fail("demo", f"the test set in {folder}", rule, test_images.shape[1], DemoError)
    return Dataset(f"idx files in {folder}", train_images, train_labels, test_images, test_labels)


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """The array in an idx file of unsigned bytes.

    The file is two zero bytes, the type code 8, the number of dimensions, each size as a 32-bit
    big-endian integer, then the elements, the last dimension fastest.

    Parameters
    ----------
    path : Path
        Plain, or compressed where it ends in ``.gz`` or ``.xz``.
    dimensions : int
        How many the array must have.

    Raises
    ------
    DemoError
        The file cannot be read, or is not such a file.
    """
    opener = OPENERS.get(path.suffix, open)
    try:
        with opener(path, "rb") as file:
            data = file.read()
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        fail("demo", str(path), "be readable", f"{type(error).__name__}: {error}", DemoError)
    header = 4 + 4 * dimensions
    magic = bytes((0, 0, UNSIGNED_BYTE, dimensions))
    if data[:4] != magic:
        rule = f"start with the bytes {magic.hex()} (idx, {dimensions} dimensions of bytes)"
        fail("demo", str(path), rule, data[:4].hex() or "an empty file", DemoError)
    if len(data) < header:
        fail("demo", str(path), f"have a header of {header} bytes", len(data), DemoError)
    shape = tuple(int(size) for size in np.frombuffer(data, ">u4", dimensions, 4))
    if len(data) - header != math.prod(shape):
        rule = f"hold {math.prod(shape)} elements for its shape {shape}"
        fail("demo", str(path), rule, len(data) - header, DemoError)
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


def _find(folder: Path, stem: str, dimensions: int) -> Path:
    """The file of that stem, plain before compressed."""
    names = [
        f"{stem}{joint}idx{dimensions}-ubyte{suffix}" for suffix in OPENERS for joint in ("-", ".")
    ]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    fail("demo", str(folder), f"hold {names[0]} (plain, .gz or .xz)", "no such file", DemoError)


def _read_pair(images: Path, labels: Path) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    pixels, numbers = read_idx(images, 3), read_idx(labels, 1)
    if len(pixels) != len(numbers):
        rule = f"hold one label for each of the {len(pixels)} images"
        fail("demo", str(labels), rule, len(numbers), DemoError)
    if pixels.size == 0:
        fail("demo", str(images), "hold at least one pixel", pixels.shape, DemoError)
    flat = pixels.reshape(len(pixels), -1).astype(np.float32)
    flat /= 255
    return flat, numbers.astype(np.int64)
