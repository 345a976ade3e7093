"""How the kernels that hold X in shared memory cut their work, and what that is expected to take.

`snack_cupy.dispatch` chooses by these estimates. They are microseconds on an H200, fitted to what
was measured there by CUDA-graph replay at 768 x 768 to 11008 x 4096, sparsity .8 to .99, batch 1 to
512; elsewhere their order still holds, for the terms are those of any such device:

    launch and latency  +  X staged in all blocks  +  entries of the busiest block  +  reduction

The names are those of ``cuda/``: W is (m, k), X (n, k).
"""

from __future__ import annotations

import math
from typing import NamedTuple

STAGING = 5.0e6  # bytes a microsecond that reach the shared memories of all multiprocessors
CYCLES = 1900.0  # of a multiprocessor in a microsecond
SEARCH = 2.0  # microseconds until a block knows which entries of its rows are in its slice
STORES = 78e3  # words of Y a microsecond, each to a sector of its own
REDUCTION = 3.6e6  # bytes a microsecond of partial sums read
WORKSPACE = 64 << 20  # bytes of partial sums at once: more do not stay in the second-level cache
MAX_SLICES = 16
WARPS = 32
TURN = 64  # entries a warp takes at once

# Cycles an entry takes on a multiprocessor, by batch rows of a tile.
_SLICED_CYCLES = {16: 1.0, 32: 1.58, 64: 2.84}
_SDDMM_CYCLES = {4: 0.5, 8: 0.6, 16: 0.95, 32: 1.8, 64: 3.1}
_RESIDENT_CYCLES = {2: 0.25, 4: 0.37, 8: 0.59}


class Slicing(NamedTuple):
    """X cut into slices of columns and tiles of batch rows, W into blocks of rows."""

    batch: int  # batch rows of a tile
    slices: int
    width: int  # columns of a slice, a multiple of 4
    row_blocks: int
    rows: int  # of a block
    chunk: int  # batch rows of a launch
    row_each: bool  # whether groups of lanes have a row each: for short rows
    shared_bytes: int
    microseconds: float


def spmm_slicing(
    m: int, k: int, nnz: int, n: int, multiprocessors: int, shared_bytes: int
) -> Slicing | None:
    """The `Slicing` of ``spmm_csr_sliced`` expected to be fastest, None where X does not fit."""
    batches = [batch for batch in (16, 32, 64) if batch == 16 or batch < 2 * n]
    made = (
        spmm_candidate(m, k, nnz, n, batch, slices, multiprocessors, shared_bytes)
        for batch in batches
        for slices in _slice_counts(k, batch, shared_bytes - spmm_hand_bytes())
    )
    return min(made, key=lambda slicing: slicing.microseconds, default=None)


def spmm_hand_bytes() -> int:
    """Shared memory in which the warps of ``spmm_csr_sliced`` leave the entries of a turn."""
    return WARPS * 640


def spmm_candidate(
    m: int,
    k: int,
    nnz: int,
    n: int,
    batch: int,
    slices: int,
    multiprocessors: int,
    shared_bytes: int,
) -> Slicing:
    """The `Slicing` with tiles of ``batch`` rows and about ``slices`` slices."""
    slices, width = _widths(k, slices)
    # Partial sums of more batch rows than `chunk` would exceed the workspace.
    most = WORKSPACE // (4 * slices * max(m, 1)) // batch * batch
    chunk = n if slices == 1 else min(n, max(batch, most))
    tiles = -(-chunk // batch)
    segment = nnz / max(1, m * slices)
    # Rows side by side share a turn of loads and the sectors of Y that they are stored to; long
    # rows are shared out more evenly one by one.
    row_each = segment < (128 if slices == 1 else 32)
    unit = 32 // (4 if batch < 32 else 8) if row_each else 1
    row_blocks, rows = _row_blocks(m, unit, slices * tiles, multiprocessors)
    blocks = row_blocks * slices * tiles
    # A row's entries come in steps of all groups of lanes, then its sums meet; alone in its group
    # it waits for the longest of its neighbours.
    if row_each:
        entries = segment + (1.4 if batch < 32 else 1.0) * math.sqrt(segment) + 3
    else:
        entries = segment + (12 if batch < 32 else 10)
    busiest = max(rows, 24) * entries * _SLICED_CYCLES[batch] / CYCLES
    staged = (width + 1) * batch * 4
    waves = -(-blocks // multiprocessors)
    time = 3.3 + waves * (min(blocks, multiprocessors) * staged / STAGING + busiest)
    if slices > 1:
        time += SEARCH + 1.4 + 4 * slices * m * tiles * batch / REDUCTION
    else:
        time += m * chunk / (STORES * (unit if row_each else 1))
    shared = staged + spmm_hand_bytes()
    launches = -(-n // chunk)
    return Slicing(batch, slices, width, row_blocks, rows, chunk, row_each, shared, launches * time)


def sddmm_slicing(
    m: int, k: int, nnz: int, n: int, multiprocessors: int, shared_bytes: int
) -> Slicing | None:
    """The `Slicing` of ``sddmm_csr_sliced`` expected to be fastest, None where X does not fit."""
    batch = next(batch for batch in (4, 8, 16, 32, 64) if batch >= min(n, 64))
    tiles = -(-n // batch)
    most = max(1, WORKSPACE // (4 * max(nnz, 1)))
    available = shared_bytes - sddmm_hand_bytes(batch)
    made = (
        _sddmm_candidate(m, k, nnz, n, batch, slices, chunks, multiprocessors)
        for slices in _slice_counts(k, batch, available)
        for chunks in {1, *(-(-tiles // each) for each in range(1, 9))}
        if chunks == 1 or (chunks <= most and chunks * slices <= multiprocessors)
    )
    return min(made, key=lambda slicing: slicing.microseconds, default=None)


def _sddmm_candidate(
    m: int, k: int, nnz: int, n: int, batch: int, slices: int, chunks: int, multiprocessors: int
) -> Slicing:
    """The `Slicing` with tiles of ``batch`` rows, about so many slices and chunks of the batch."""
    slices, width = _widths(k, slices)
    each = math.ceil(n / (batch * chunks))  # tiles of a chunk
    chunk = min(n, each * batch)
    chunks = -(-n // chunk)
    row_each = batch >= 32
    row_blocks, rows = _row_blocks(m, 4 if row_each else 1, slices * chunks, multiprocessors)
    staged = (width + 1) * batch * 4
    entries = nnz / max(1, m * slices) + (10 if row_each else 18)
    busiest = max(rows, 24) * entries * _SDDMM_CYCLES[batch] / CYCLES
    blocks = row_blocks * slices * chunks
    time = 2.0 + each * (1.0 + min(blocks, multiprocessors) * staged / STAGING + busiest)
    if slices > 1:
        time += SEARCH
    if chunks > 1:
        time += 1.4 + 4 * nnz * chunks / REDUCTION
    shared = staged + sddmm_hand_bytes(batch)
    return Slicing(batch, slices, width, row_blocks, rows, chunk, row_each, shared, time)


def sddmm_hand_bytes(batch: int) -> int:
    """Shared memory in which the warps of ``sddmm_csr_sliced`` leave the offsets of a turn."""
    lanes = min(batch // 4, 8)
    return WARPS * 4 * (TURN + (32 // lanes * 4 if lanes >= 4 else 0))


def resident_microseconds(
    m: int, k: int, nnz: int, n: int, batch: int, multiprocessors: int
) -> float:
    """What ``spmm_csr_resident`` is expected to take with ``batch`` rows of X in a block."""
    tiles = -(-n // batch)
    blocks = max(1, min(-(-m // WARPS), multiprocessors // tiles))
    step = 16 * 32 // (4 * (batch // min(batch, 4)))  # entries a warp takes at a time
    entries = -(-(nnz / max(1, m) + 2) // step) * step + 29
    busiest = max(m / blocks, 24) * entries * _RESIDENT_CYCLES[batch] / CYCLES
    waves = -(-tiles * blocks // multiprocessors)
    staged = min(tiles * blocks, multiprocessors) * (k + 1) * batch * 4 / STAGING
    return 2.9 + waves * (staged + busiest)


def vector_microseconds(nnz: int, item_bytes: int) -> float:
    """What ``spmm_csr_vector`` is expected to take, values of ``item_bytes`` bytes in the cache."""
    return 2.5 + nnz * (item_bytes + 2) / 5.5e6


def _slice_counts(k: int, batch: int, available: int) -> range:
    """Numbers of slices whose tile of ``batch`` rows fits ``available`` bytes of shared memory."""
    widest = (available // (4 * batch) - 1) // 4 * 4
    if widest < 4:
        return range(0)
    fewest = -(-k // widest)
    return range(fewest, max(fewest, min(MAX_SLICES, -(-k // 64))) + 1)


def _widths(k: int, slices: int) -> tuple[int, int]:
    """Number of slices and their width, a multiple of 4, for about ``slices`` slices."""
    width = math.ceil(k / (4 * slices)) * 4
    return -(-k // width), width


def _row_blocks(m: int, unit: int, others: int, multiprocessors: int) -> tuple[int, int]:
    """Blocks of rows, and rows of one (a multiple of ``unit``), for one wave if that can be."""
    blocks = max(1, multiprocessors // others)
    rows = math.ceil(m / (unit * blocks)) * unit
    return -(-m // max(rows, 1)), rows
