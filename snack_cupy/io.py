"""Sparse tensors in files: .npz (SciPy's too), Matrix Market, .smtx and safetensors.

Readers trust nothing: what a header claims is compared with the bytes that are there before
memory is taken, and every way to fail is a `FileFormatError`.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import math
import os
import zipfile
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from scipy import io as scipy_io
from scipy import sparse

from snack_cupy import _coords
from snack_cupy._check import fail
from snack_cupy.coo import COOTensor

Location = str | os.PathLike[str]
OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
EXPANDED = 2**28  # bytes a small compressed file may always grow to
EXPANSION = 200  # and how many times its own size a large one may
PIECE = 2**20
FORMATS = ("coo", "csr", "csc")


class FileFormatError(ValueError):
    """A file is malformed, truncated, or claims more than it holds."""


def save_npz(path: Location, tensor: COOTensor) -> None:
    """Write a tensor as .npz, as it is stored; SciPy reads it if it is 2-D and of SciPy's dtypes.

    bfloat16 values are stored as 16-bit words with the name of the dtype.

    Examples
    --------
    >>> import tempfile, pathlib, snack_cupy
    >>> from snack_cupy.io import load_npz, save_npz
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder) / "eye.npz"
    ...     save_npz(path, snack_cupy.eye(3))
    ...     load_npz(path)
    <COOTensor: shape=(3, 3), dtype=float64, nnz=3, device='cpu'>
    """
    host = _host("save_npz", tensor)
    arrays: dict[str, Any] = {"format": b"coo", "shape": np.array(host.shape, np.int64)}
    if host.ndim == 2:
        arrays |= {"row": host.row, "col": host.col}
    else:
        arrays["coords"] = host.coords
    arrays["data"] = host.data
    if host.dtype.name == "bfloat16":
        arrays |= {"data": host.data.view(np.uint16), "dtype": b"bfloat16"}
    with Path(path).open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def load_npz(path: Location, *, max_bytes: int | None = None) -> COOTensor:
    """Read a tensor from .npz: this library's, or SciPy's in COO, CSR or CSC.

    Parameters
    ----------
    path : path
    max_bytes : int, optional
        What the arrays may take in memory; the default is 256 MiB, or 200 times a larger file.

    Raises
    ------
    FileFormatError
        The file is no such archive, or holds something else than it claims.
    OSError
        It cannot be opened.
    """
    op = "load_npz"
    limit = _limit(path, max_bytes)
    try:
        with zipfile.ZipFile(path) as archive:
            found: dict[str, np.ndarray] = {}
            for info in archive.infolist():
                limit -= info.file_size
                if limit < 0:
                    _broken(op, "arrays within max_bytes", f"{info.filename}: {info.file_size}")
                found[info.filename.removesuffix(".npy")] = _read_npy(op, archive, info)
        return _from_arrays(op, found)
    except OSError:
        raise
    except Exception as error:
        _reraise(op, error)


def _read_npy(op: str, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(info) as member:
        version = np.lib.format.read_magic(member)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }.get(version)
        if read is None:
            _broken(op, "arrays of npy version 1 or 2", version)
        shape, fortran, dtype = read(member)
        if dtype.hasobject or dtype.kind not in "biufcSU":
            _broken(op, "numbers, never Python objects", dtype)
        size = math.prod(shape) * dtype.itemsize
        if min(shape, default=0) < 0 or size > info.file_size:
            _broken(op, f"at most {info.file_size} bytes in {info.filename}", shape)
        raw = _read_up_to(member, size)
        if len(raw) != size:
            _broken(op, f"{size} bytes in {info.filename}", len(raw))
        return np.frombuffer(raw, dtype).reshape(shape, order="F" if fortran else "C")


def _from_arrays(op: str, found: dict[str, np.ndarray]) -> COOTensor:
    for name in ("format", "shape", "data"):
        if name not in found:
            _broken(op, f"an array named {name}", sorted(found))
    kind = found["format"].item()
    kind = kind.decode("ascii") if isinstance(kind, bytes) else str(kind)
    if kind not in FORMATS:
        _broken(op, f"a format of {FORMATS}", repr(kind))
    shape = tuple(int(size) for size in found["shape"])
    data = found["data"]
    if found.get("dtype", np.array(b"")).item() in (b"bfloat16", "bfloat16"):
        data = data.view(_bfloat16(op))
    if kind == "coo":
        coords = found["coords"] if "coords" in found else [found["row"], found["col"]]
        return COOTensor(coords, data, shape)
    indices, indptr = found["indices"], found["indptr"]
    if len(shape) != 2:
        _broken(op, "2 sizes", shape)
    return _from_offsets(op, indptr, indices, data, shape, by_column=kind == "csc")


def _from_offsets(
    op: str, offsets: Any, indices: Any, data: Any, shape: Any, *, by_column: bool = False
) -> COOTensor:
    lines = shape[1 if by_column else 0]
    if offsets.shape != (lines + 1,) or offsets.dtype.kind not in "iu":
        _broken(op, f"{lines + 1} integer offsets", offsets.shape)
    offsets = offsets.astype(np.int64)
    counts = np.diff(offsets)
    if offsets[0] != 0 or offsets[-1] != indices.shape[0] or (counts < 0).any():
        _broken(op, f"offsets that rise from 0 to {indices.shape[0]}", "others")
    major = np.repeat(np.arange(lines), counts)
    return COOTensor([indices, major] if by_column else [major, indices], data, shape)


def save_mtx(path: Location, tensor: COOTensor) -> None:
    """Write a 2-D tensor as Matrix Market coordinates, through SciPy."""
    host = _host("save_mtx", tensor)
    if host.dtype.name in ("float16", "bfloat16"):
        host = host.astype(np.float32)
    if host.dtype.kind == "b":
        host = host.astype(np.int8)
    text = io.BytesIO()
    scipy_io.mmwrite(text, host.to_scipy(), symmetry="general")
    Path(path).write_bytes(text.getvalue())


def load_mtx(path: Location, *, max_bytes: int | None = None) -> COOTensor:
    """Read Matrix Market, also packed as .gz, .xz or .bz2; SciPy parses it.

    Symmetric files are expanded; pattern files get the value 1.0; `max_bytes` is as in `load_npz`.

    Raises
    ------
    FileFormatError
        The file is malformed, truncated, or claims more than it holds.
    """
    op = "load_mtx"
    text = _read_bytes(op, path, max_bytes)
    try:
        _check_mtx_claims(op, text)
        matrix = scipy_io.mmread(io.BytesIO(text), spmatrix=False)
        if sparse.issparse(matrix):
            return COOTensor.from_scipy(matrix)
        return COOTensor.from_dense(matrix)
    except Exception as error:
        _reraise(op, error)


def _check_mtx_claims(op: str, text: bytes) -> None:
    """Every entry takes 4 bytes of text or more ("1 1" and a line end), an element 2."""
    banner = text[: text.find(b"\n")].lower().split()
    if len(banner) != 5 or banner[:2] != [b"%%matrixmarket", b"matrix"]:
        _broken(op, "the banner of a matrix", text[:40])
    at = 0
    while True:
        end = text.find(b"\n", at)
        line = text[at : end if end >= 0 else len(text)].strip()
        if line and not line.startswith(b"%"):
            break
        if end < 0:
            _broken(op, "a line of sizes", "none")
        at = end + 1
    sizes = [int(word) for word in line.split()]
    dense = banner[2] == b"array"
    if len(sizes) != (2 if dense else 3) or min(sizes) < 0 or max(sizes) > _coords.MAX_INDEX:
        _broken(op, "sizes that are not negative", sizes)
    claimed = sizes[0] * sizes[1] if dense else 2 * sizes[2]
    if dense and banner[4] != b"general":
        claimed //= 2
    if 2 * claimed > len(text) - at:
        _broken(op, f"entries within {len(text)} bytes", sizes)


def save_smtx(path: Location, tensor: COOTensor) -> None:
    """Write the structure of a 2-D tensor as .smtx; values are not part of that format."""
    topology = _host("save_smtx", tensor).topology
    lines = (
        f"{topology.shape[0]}, {topology.shape[1]}, {topology.nnz}",
        " ".join(map(str, topology.row_offsets.tolist())),
        " ".join(map(str, topology.columns.tolist())),
    )
    Path(path).write_text("\n".join(lines) + "\n", encoding="ascii")


def load_smtx(
    path: Location, *, dtype: Any = np.float32, max_bytes: int | None = None
) -> COOTensor:
    """Read .smtx (Deep Learning Matrix Collection), also packed; every value is 1.

    Line 1 holds rows, columns and nnz, line 2 the row offsets, line 3 the columns from 0.

    Raises
    ------
    FileFormatError
        The file is malformed, truncated, or claims more than it holds.
    """
    op = "load_smtx"
    lines = _read_bytes(op, path, max_bytes).split(b"\n", 3)
    try:
        sizes = [int(word) for word in lines[0].replace(b",", b" ").split()]
        if len(sizes) != 3 or min(sizes) < 0:
            _broken(op, "rows, columns and nnz in line 1", lines[0][:40])
        m, k, nnz = sizes
        offsets, columns = ((lines[i].split() if i < len(lines) else []) for i in (1, 2))
        if len(offsets) != m + 1 or len(columns) != nnz:
            _broken(op, f"{m + 1} offsets and {nnz} columns", (len(offsets), len(columns)))
        starts, col = (np.array(part, dtype="S").astype(np.int64) for part in (offsets, columns))
        return _from_offsets(op, starts, col, np.ones(nnz, dtype), (m, k))
    except Exception as error:
        _reraise(op, error)


def save_safetensors(path: Location, tensor: COOTensor) -> None:
    """Write coordinates and data as safetensors; needs the package of that name."""
    from safetensors.numpy import save_file

    host = _host("save_safetensors", tensor)
    data, name = host.data, host.dtype.name
    if name in ("bfloat16", "complex64", "complex128"):
        data = data.view(np.uint16 if name == "bfloat16" else data.real.dtype)
    save_file(
        {"coords": np.ascontiguousarray(host.coords), "data": np.ascontiguousarray(data)},
        os.fspath(path),
        metadata={"format": "coo", "shape": json.dumps(host.shape), "dtype": name},
    )


def load_safetensors(path: Location) -> COOTensor:
    """Read what `save_safetensors` wrote; needs the package safetensors.

    Raises
    ------
    FileFormatError
        The file is malformed, truncated, or holds something else.
    """
    from safetensors import safe_open

    op = "load_safetensors"
    Path(path).stat()  # a missing file is an OSError, whatever the package makes of it
    try:
        with safe_open(os.fspath(path), framework="numpy") as file:
            metadata = file.metadata() or {}
            shape = json.loads(metadata["shape"])
            name = metadata["dtype"]
            coords, data = file.get_tensor("coords"), file.get_tensor("data")
        dtype = _bfloat16(op) if name == "bfloat16" else np.dtype(name)
        return COOTensor(coords, data.view(dtype), shape)
    except Exception as error:
        _reraise(op, error)


def _bfloat16(op: str) -> np.dtype:
    try:
        import ml_dtypes
    except ImportError as error:
        message = f"{op}: bfloat16 must be known to NumPy (install ml_dtypes), got no ml_dtypes"
        raise FileFormatError(message) from error
    return np.dtype(ml_dtypes.bfloat16)


def _host(op: str, tensor: Any) -> COOTensor:
    if not isinstance(tensor, COOTensor):
        fail(op, "tensor", "be a COOTensor", type(tensor).__name__, TypeError)
    return tensor.get()


def _limit(path: Location, max_bytes: int | None) -> int:
    size = Path(path).stat().st_size
    return max(EXPANDED, EXPANSION * size) if max_bytes is None else max_bytes


def _read_bytes(op: str, path: Location, max_bytes: int | None) -> bytes:
    limit = _limit(path, max_bytes)
    opener = OPENERS.get(Path(path).suffix, open)
    try:
        with opener(path, "rb") as file:
            text = _read_up_to(file, limit + 1)
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile) as error:
        _reraise(op, error)
    if len(text) > limit:
        _broken(op, f"at most {limit} bytes when unpacked", "more")
    return text


def _read_up_to(file: Any, limit: int) -> bytes:
    """At most ``limit`` bytes, in pieces: one read of them all would take that much at once."""
    pieces: list[bytes] = []
    left = limit
    while left > 0 and (piece := file.read(min(left, PIECE))):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def _broken(op: str, rule: str, got: object) -> NoReturn:
    raise FileFormatError(f"{op}: the file must hold {rule}, got {got}")


def _reraise(op: str, error: Exception) -> NoReturn:
    if isinstance(error, FileFormatError):
        raise error
    message = f"{op}: the file must be well formed, got {type(error).__name__}: {error}"
    raise FileFormatError(message) from error
