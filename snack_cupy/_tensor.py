"""How the kernels for half types cut their work, and what that is expected to take on an H200.

Those on tensor cores spread 16 rows of W over a tile of shared memory, or take 16 rows of the
gradient from one; a block holds what it needs of X in registers and takes tile after tile. The
estimates are fitted like those of `snack_cupy._cost`:

    launch and latency  +  X that every multiprocessor reads  +  tiles of a block

The names are those of ``cuda/``: W is (m, k), X (n, k).
"""

from __future__ import annotations

from typing import NamedTuple

from snack_cupy._cost import CYCLES

ROWS = 16  # of a tile, and warps of a block
STEP = 32 * ROWS  # columns that the warps of a block take at once
LOADING = 5.5e6  # bytes a microsecond that reach the registers of all multiprocessors
CLUSTER_BYTES = 200 * 1024  # devices whose blocks may have so much shared memory have clusters

# Cycles of a tile of no columns, by tiles of the batch: barriers and the sums over warps.
TILE_CYCLES = {1: 1400, 2: 1600, 4: 2600}
LATENCY = {False: 2.4, True: 4.5}  # microseconds; a cluster starts later, and its blocks wait


class Tiling(NamedTuple):
    """Rows cut into tiles and groups of tiles, columns into slices, the batch into blocks."""

    groups: int
    slices: int
    width: int  # columns of a slice, a multiple of 64
    batch_blocks: int
    tiles_per_group: int
    shared_bytes: int
    microseconds: float

    @property
    def blocks(self) -> int:
        """Thread blocks of the launch."""
        return self.groups * self.slices * self.batch_blocks


def spmm_tiling(
    m: int, k: int, nnz: int, n: int, batch_tiles: int, pair: bool, multiprocessors: int
) -> Tiling:
    """The `Tiling` of ``spmm_csr_tensor``, or with ``pair`` of ``spmm_csr_tensor_pair``."""
    batch_blocks = -(-n // (8 * batch_tiles))
    slices = 2 if pair else 1
    width = _width(k, slices)
    tiles = -(-m // ROWS)
    groups = max(1, min(tiles, multiprocessors // (slices * batch_blocks)))
    if pair:
        # Sums of all tiles of a group wait in shared memory.
        groups = max(groups, -(-tiles // 24))
    per_group = -(-tiles // groups)
    sums = 4 * 32 * ROWS * 4 * batch_tiles
    waiting = 2 * per_group * 4 * 8 * 8 * batch_tiles if pair else 0
    shared = ROWS * (2 * width + 16) + sums + waiting
    entries = nnz / max(1, tiles * slices)  # of a tile
    cycles = TILE_CYCLES[batch_tiles] + 0.42 * width + 0.18 * entries
    blocks = groups * slices * batch_blocks
    waves = -(-blocks // multiprocessors)
    loaded = min(blocks, multiprocessors) * width * 16 * batch_tiles / LOADING
    time = LATENCY[pair] + waves * (loaded + per_group * cycles / CYCLES)
    return Tiling(groups, slices, width, batch_blocks, per_group, shared, time)


def sddmm_tiling(m: int, k: int, nnz: int, batch_steps: int, multiprocessors: int) -> Tiling:
    """The `Tiling` of ``sddmm_csr_tensor``."""
    slices = -(-k // (8 // batch_steps * STEP))
    width = _width(k, slices)
    slices = -(-k // width)
    tiles = -(-m // ROWS)
    groups = max(1, min(tiles, multiprocessors // slices))
    per_group = -(-tiles // groups)
    entries = nnz / max(1, tiles * slices)
    cycles = 3000 + 0.2 * width + 0.3 * entries
    blocks = groups * slices
    waves = -(-blocks // multiprocessors)
    loaded = min(blocks, multiprocessors) * width * 32 * batch_steps / LOADING
    time = 2.0 + waves * (loaded + per_group * cycles / CYCLES)
    shared = ROWS * 2 * (width + 32)
    return Tiling(groups, slices, width, 1, per_group, shared, time)


def vector_lanes(m: int, nnz: int, multiprocessors: int) -> int:
    """Lanes that own a row in ``spmm_csr_vector_half``.

    As many as have a row's entries in flight at once, but for all rows in one wave: on an H200 at
    sparsity .9 3.8 microseconds with 16 against 5.3 with 8 at 4096 x 4096, 7.3 against 6.5 at
    11008 x 4096.
    """
    row = nnz / max(1, m)
    lanes = 8 if row <= 160 else 16 if row <= 800 else 32
    while lanes > 8 and m * lanes > multiprocessors * 1024:
        lanes //= 2
    return lanes


def vector_microseconds(nnz: int) -> float:
    """What ``spmm_csr_vector_half`` is expected to take."""
    return 2.1 + 4 * nnz / 4.0e6


def _width(k: int, slices: int) -> int:
    return max(64, -(-k // (64 * slices)) * 64)
