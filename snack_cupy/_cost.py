"""How the kernels that hold X in shared memory cut their work, and what that is expected to take.

`snack_cupy.dispatch` chooses by these estimates. They are microseconds on an H200, fitted to some
8000 cuts for each kernel that were measured there by CUDA-graph replay (768 x 768 to 11008 x 4096,
sparsity .8 to .99, batch 8 to 512): the cut chosen takes 2 to 4 % longer than the best one, in the
geometric mean. Elsewhere their order still holds, for the terms are those of any such device:

    launch and latency  +  X staged in all blocks  +  the busiest block  +  sums over slices

The names are those of ``cuda/``: W is (m, k), X (n, k).
"""

from __future__ import annotations

import math
from typing import NamedTuple

WORKSPACE = 64 << 20  # bytes of partial sums at once: more do not stay in the second-level cache
MAX_SLICES = 16
WARPS = 32
TURN = 64  # entries a warp takes at once
CYCLES = 1900.0  # of a multiprocessor in a microsecond
# Shared memory beyond which the first-level cache is short: it is the rest of 256 KB.
CROWDED = 160 << 10


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


class Costs(NamedTuple):
    """Of one kernel, in microseconds unless said otherwise; dicts are by batch rows of a tile."""

    launch: float
    staging: float  # bytes a microsecond that reach the shared memories of all multiprocessors
    search: float  # until a block knows which entries of its rows are in its slice
    cycles: dict[int, float]  # that an entry takes on a multiprocessor
    sharing: dict[int, float]  # entries that a row costs beside its own where lanes share it
    alone: dict[int, float]  # the same where each group of lanes has its row
    waiting: dict[int, float]  # for the longest row of a set, times the square root of the entries
    turn: tuple[float, float]  # that a warp waits for a turn: of a shared row, of rows side by side
    row: float  # that it waits at a row's end
    crowding: float  # share that entries take longer for each 64 KB beyond CROWDED
    sums: float  # a launch that adds partial sums
    sums_rate: float  # bytes of them a microsecond
    stores: float = math.inf  # words of Y a microsecond, each to a sector of its own


SPMM = Costs(
    launch=2.0,
    staging=4.5e6,
    search=3.1,
    cycles={16: 0.98, 32: 1.43, 64: 2.39},
    sharing={16: 32, 32: 22, 64: 21},
    alone={16: 2.0, 32: 2.4, 64: 1.5},
    waiting={16: 4.9, 32: 3.6, 64: 3.3},
    turn=(0.50, 0.52),
    row=0.28,
    crowding=0.10,
    sums=1.3,
    sums_rate=5.6e6,
    stores=119e3,
)
# Values are gathered through a permutation: entries wait longer, and for the cache.
SPMM_PERMUTED = Costs(
    launch=1.8,
    staging=3.8e6,
    search=3.7,
    cycles={16: 1.47, 32: 1.80, 64: 2.64},
    sharing={16: 18, 32: 17, 64: 19},
    alone={16: 3.0, 32: 3.5, 64: 2.7},
    waiting={16: 2.9, 32: 2.6, 64: 2.7},
    turn=(0.63, 0.57),
    row=0.27,
    crowding=0.37,
    sums=0.8,
    sums_rate=7.3e6,
    stores=110e3,
)
SDDMM = Costs(
    launch=1.3,
    staging=4.4e6,
    search=2.0,
    cycles={4: 0.66, 8: 0.83, 16: 1.14, 32: 2.28, 64: 3.29},
    sharing={4: 73, 8: 60, 16: 47},
    alone={32: 12.4, 64: 12.7},
    waiting={32: 0.0, 64: 0.0},
    turn=(0.46, 1.25),
    row=0.0,
    crowding=0.075,
    sums=1.6,
    sums_rate=3.6e6,
)
TILE = 0.8  # microseconds between two tiles of the batch in ``sddmm_csr_sliced``
ACCUMULATION = 0.13  # cycles in which it adds an entry to the sum of the tiles before


def spmm_slicing(
    m: int, k: int, nnz: int, n: int, permuted: bool, multiprocessors: int, shared_bytes: int
) -> Slicing | None:
    """The `Slicing` of ``spmm_csr_sliced`` expected to be fastest, None where X does not fit."""
    batches = [batch for batch in (16, 32, 64) if batch == 16 or batch < 2 * n]
    made = (
        spmm_candidate(m, k, nnz, n, permuted, batch, slices, row_each, multiprocessors)
        for batch in batches
        for slices in _slice_counts(k, batch, shared_bytes - spmm_hand_bytes())
        for row_each in (False, True)
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
    permuted: bool,
    batch: int,
    slices: int,
    row_each: bool,
    multiprocessors: int,
) -> Slicing:
    """The `Slicing` with tiles of ``batch`` rows and about ``slices`` slices."""
    costs = SPMM_PERMUTED if permuted else SPMM
    slices, width = _widths(k, slices)
    # Partial sums of more batch rows than `chunk` would exceed the workspace.
    most = WORKSPACE // (4 * slices * max(m, 1)) // batch * batch
    chunk = n if slices == 1 else min(n, max(batch, most))
    tiles = -(-chunk // batch)
    unit = 32 // (4 if batch < 32 else 8) if row_each else 1
    row_blocks, rows = _row_blocks(m, unit, slices * tiles, multiprocessors)
    blocks = row_blocks * slices * tiles
    staged = (width + 1) * batch * 4
    shared = staged + spmm_hand_bytes()
    busiest = _busiest(costs, rows, nnz / max(1, m * slices), batch, unit, row_each, shared)
    waves = -(-blocks // multiprocessors)
    time = waves * (min(blocks, multiprocessors) * staged / costs.staging + busiest)
    if slices > 1:
        time += costs.search + costs.sums + 4 * slices * m * tiles * batch / costs.sums_rate
    else:
        time += m * chunk / (costs.stores * unit)
    time = -(-n // chunk) * (costs.launch + time)
    return Slicing(batch, slices, width, row_blocks, rows, chunk, row_each, shared, time)


def sddmm_slicing(
    m: int, k: int, nnz: int, n: int, multiprocessors: int, shared_bytes: int
) -> Slicing | None:
    """The `Slicing` of ``sddmm_csr_sliced`` expected to be fastest, None where X does not fit."""
    batches = [batch for batch in (4, 8, 16, 32, 64) if batch == 4 or batch < 2 * n]
    most = max(1, WORKSPACE // (4 * max(nnz, 1)))
    made = (
        sddmm_candidate(m, k, nnz, n, batch, slices, chunks, multiprocessors)
        for batch in (batches if n <= 64 else batches[-1:])
        for slices in _slice_counts(k, batch, shared_bytes - sddmm_hand_bytes(batch))
        for chunks in {1, *(-(-n // (batch * tiles)) for tiles in range(1, 9))}
        if chunks == 1 or (chunks <= most and chunks * slices <= multiprocessors)
    )
    return min(made, key=lambda slicing: slicing.microseconds, default=None)


def sddmm_candidate(
    m: int, k: int, nnz: int, n: int, batch: int, slices: int, chunks: int, multiprocessors: int
) -> Slicing:
    """The `Slicing` with tiles of ``batch`` rows, about so many slices and chunks of the batch."""
    slices, width = _widths(k, slices)
    tiles = math.ceil(n / (batch * chunks))  # of a chunk
    chunk = min(n, tiles * batch)
    chunks = -(-n // chunk)
    row_each = batch >= 32
    unit = 4 if row_each else 1
    row_blocks, rows = _row_blocks(m, unit, slices * chunks, multiprocessors)
    staged = (width + 1) * batch * 4
    shared = staged + sddmm_hand_bytes(batch)
    segment = nnz / max(1, m * slices)
    busiest = _busiest(SDDMM, rows, segment, batch, unit, row_each, shared)
    blocks = row_blocks * slices * chunks
    waves = -(-blocks // multiprocessors)
    tile = TILE + min(blocks, multiprocessors) * staged / SDDMM.staging + busiest
    time = SDDMM.launch + waves * tiles * tile
    time += waves * (tiles - 1) * rows * segment * ACCUMULATION / CYCLES
    if slices > 1:
        time += SDDMM.search
    if chunks > 1:
        time += SDDMM.sums + 4 * nnz * chunks / SDDMM.sums_rate
    return Slicing(batch, slices, width, row_blocks, rows, chunk, row_each, shared, time)


def sddmm_hand_bytes(batch: int) -> int:
    """Shared memory in which the warps of ``sddmm_csr_sliced`` leave the offsets of a turn."""
    lanes = min(batch // 4, 8)
    return WARPS * 4 * (TURN + (32 // lanes * 4 if lanes >= 4 else 0))


def resident_microseconds(
    m: int, k: int, nnz: int, n: int, permuted: bool, batch: int, multiprocessors: int
) -> float:
    """What ``spmm_csr_resident`` is expected to take with ``batch`` rows of X in a block."""
    tiles = -(-n // batch)
    warps = resident_warps(m, n, batch, multiprocessors)
    blocks = resident_blocks(m, n, batch, multiprocessors)
    rows = m / blocks
    cycles, beside, turn, step = (0.36, 78, 0.38, 128) if batch == 4 else (0.61, 47, 0.46, 64)
    if permuted:
        cycles, turn = cycles + 0.5, turn + 0.6
    entries = nnz / max(1, m)
    latency = -(-rows // warps) * (entries + 4) / step * turn
    busiest = _either(rows * (entries + beside) * cycles / CYCLES, latency)
    waves = -(-tiles * blocks // multiprocessors)
    staged = min(tiles * blocks, multiprocessors) * (k + 1) * batch * 4 / 8.7e6
    return 2.75 + waves * (staged + busiest) + m * n / 106e3


def resident_warps(m: int, n: int, batch: int, multiprocessors: int) -> int:
    """Warps of a block: many hide more latency, few start earlier where rows are few."""
    rows = m * -(-n // batch) / multiprocessors
    return 8 if rows <= 8 else 16 if rows <= 24 else 32


def resident_blocks(m: int, n: int, batch: int, multiprocessors: int) -> int:
    """Blocks for each tile of batch rows: an equal share of the multiprocessors."""
    rows_at_once = resident_warps(m, n, batch, multiprocessors)
    return max(1, min(-(-m // rows_at_once), multiprocessors // -(-n // batch)))


def vector_microseconds(nnz: int, item_bytes: int) -> float:
    """What ``spmm_csr_vector`` is expected to take, values of ``item_bytes`` bytes in the cache."""
    return 2.5 + nnz * (item_bytes + 2) / 5.5e6


def product_microseconds(
    op: str, m: int, k: int, nnz: int, n: int, dtype: str, tf32: bool
) -> float:
    """What the dense library's product is expected to take, the dense form of W included.

    On an H200 in float16: 22.4 at 4096 x 4096, sparsity .9, batch 64, where the dense product takes
    8.4; 25.1 for the gradient of the values, 13.2 dense; 15.4 at 2304 x 768, 2048 rows, 12.4 dense.
    """
    item = 4 if dtype == "float32" else 2
    rate = 0.7e9 if item == 2 else 0.38e9 if tf32 else 0.05e9  # flop a microsecond
    start = 3.0 if item == 2 or tf32 else 8.5
    moved = item * (m * k + n * (m + k))
    product = start + max(2 * m * k * n / rate, moved / 6e6)
    if op == "sddmm":
        return product + 2.0 + nnz / 1.6e5
    gathered = nnz / 1.6e5 if op == "spmm_transposed" else 0.0
    return product + 1.5 + max(item * m * k / 2.7e6, gathered)


def plain_microseconds(nnz: int, n: int, item_bytes: int) -> float:
    """What the kernels without shared memory are expected to take at least, X in the L2 cache."""
    return 3.0 + nnz * n * item_bytes / 4e6


def _busiest(
    costs: Costs,
    rows: int,
    entries: float,
    batch: int,
    unit: int,
    row_each: bool,
    shared_bytes: int,
) -> float:
    """Microseconds that the entries of a block take, ``entries`` for each of its rows.

    They are bound by the shared memory, or, where its warps have few turns each, by latency.
    """
    if row_each:
        longest = entries + math.sqrt(entries)
        beside = costs.alone[batch] + costs.waiting[batch] * math.sqrt(entries)
    else:
        longest, beside = entries, costs.sharing[batch]
    crowded = 1 + costs.crowding * max(0, shared_bytes - CROWDED) / (64 << 10)
    bound = rows * (entries + beside) * costs.cycles[batch] * crowded / CYCLES
    turns = math.ceil(longest * unit / TURN)
    latency = math.ceil(rows / (unit * WARPS)) * (turns * costs.turn[row_each] + costs.row)
    return _either(bound, latency)


def _either(first: float, second: float) -> float:
    """About the larger one, more where both are alike."""
    return (first**4 + second**4) ** 0.25


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
