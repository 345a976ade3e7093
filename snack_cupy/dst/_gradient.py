"""Growth by gradient on the device: the launches of ``cuda/gradient.cu``."""

from __future__ import annotations

import numpy as np

from snack_cupy import dispatch, kernels
from snack_cupy._device_work import THREADS, Work, Workspace, ceil_div, pointer
from snack_cupy._xp import Array, dtype_name
from snack_cupy.dst import _select

CHUNK = 32 * THREADS  # positions that a block of cuda/bitmap.cuh handles
PARTS = 4  # chunks of a block of the expanding kernels
TILE = 128
SPARE = 65536  # scores that the list can hold beyond twice the number that grow
_BOUNDS = 8192  # bins of the sample's histogram
_SCORE_BITS = 31
_SAMPLE, _LIST, _AGAIN = range(3)


def capacity_of(inactive: int, n: int) -> int:
    """Scores that are listed at most."""
    return min(inactive, 2 * n + SPARE)


def add_parts(space: Workspace, inactive: int, n: int, words: int) -> None:
    """What `grow` needs; all but the list is zeroed."""
    space.add("found", 16, zero=True)
    space.add("tile.arrivals", 4 * 8, zero=True)
    space.add("bounds", 4 * _BOUNDS, zero=True)
    for name in ("grow", "again"):
        _select.add_parts(space, name, _SCORE_BITS)
    space.add("tied.counts", 4 * (ceil_div(words, THREADS) + 1), zero=True)
    for name in ("grown", "tied"):
        space.add(name, 4 * words, zero=True)
    for name in ("scores", "positions"):
        space.add(name, 4 * capacity_of(inactive, n))


def widened(array: Array) -> Array:
    """Half types as float32, which is exact; others as they are."""
    if dtype_name(array) == "bfloat16":  # without asking CuPy for arithmetic in it
        return (array.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array.astype(np.float32) if dtype_name(array) == "float16" else array


def grow(
    work: Work,
    space: Workspace,
    shape: tuple[int, int],
    inactive: int,
    n: int,
    left: Array,
    right: Array,
) -> None:
    """Fill the new map from the kept one, its counts as well; n > 0 of ``inactive`` grow.

    Everything is queued, also what does nothing unless the list turns out too short or too long.
    """
    m, k = shape
    left, right = (work.xp.ascontiguousarray(widened(each)) for each in (left, right))
    batch, item = left.shape[0], left.dtype.itemsize
    multiprocessors = dispatch.device_facts(work.device).multiprocessors
    tiles = ceil_div(m, TILE) * ceil_div(k, TILE)
    samples = min(tiles, multiprocessors)
    chunks = ceil_div(m * k, CHUNK)
    capacity = capacity_of(inactive, n)
    aligned = (pointer(left) | pointer(right)) % min(4 * item, 16) == 0
    vector = int(aligned and m % 4 == 0 and k % 4 == 0)
    state, found = space["grow.state"], space["found"]
    maps = (space["grown"], space["tied"], space["tied.counts"])

    def tile_pass(
        number: int, blocks: int, arrivals: int, histogram: int = 0, shift: int = 0, width: int = 0
    ) -> None:
        work.launch(
            kernels.GRADIENT_TILES,
            blocks,
            (m, k, batch, n, inactive, samples, capacity, vector, shift, width),
            pointer(left),
            pointer(right),
            space["kept"],
            found,
            state,
            histogram,
            space["scores"],
            space["positions"],
            space["tile.arrivals"] + 4 * arrivals,
            *maps,
            T=dtype_name(left),
            kPass=number,
        )

    tile_pass(_SAMPLE, samples, 0, space["bounds"])
    tile_pass(_LIST, tiles, 1)
    _select.find_threshold(
        work, space, "grow", space["scores"], capacity, n, "uint32", _SCORE_BITS, counted=found + 4
    )
    work.launch(
        kernels.MARK_LISTED,
        ceil_div(capacity, 4 * THREADS),
        (capacity, chunks),
        found,
        state,
        space["scores"],
        space["positions"],
        *maps,
        space["tile.arrivals"] + 4 * 2,
    )
    resident = min(tiles, 2 * multiprocessors)
    for i, (shift, width) in enumerate(_select.digits(_SCORE_BITS)):
        histogram = space["again.histograms"] + (i * 4 << _select.DIGIT)
        tile_pass(_AGAIN, resident, 3 + i, histogram, shift, width)
    tile_pass(_AGAIN, resident, 6)
    work.launch(
        kernels.EXPAND_MARKED,
        ceil_div(chunks, PARTS),
        (ceil_div(m * k, 32), chunks),
        space["kept"],
        *maps,
        state,
        space["new"],
        space["new.counts"],
        space["tile.arrivals"] + 4 * 7,
    )
