"""The index arrays of a structure: their types, the checks of them, and what follows from them.

Functions on plain arrays; the device of the arrays must be current.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from scipy import sparse

from snack_cupy import _check, kernels
from snack_cupy._check import fail
from snack_cupy._device_work import Work, Workspace, ceil_div, pointer, runs_kernels
from snack_cupy._xp import Array, device_of, dtype_name, get_array_module

NARROW_LIMIT = 65536  # sizes up to this have 16-bit indices
MAX_SIZE = 2**31 - 1

# Masks of the column-major view: always affordable below 4 MiB, else at 32 bytes for each entry.
_MASKS = 2**20
_MASKS_PER_ENTRY = 8
# As in cuda/transpose.cu: columns of a block of the masks, rows and columns of a tile.
_SEGMENT = 4096
_TILE = (256, 64)


def index_dtype(size: int) -> np.dtype:
    """Dtype of indices below ``size``: uint16 where they fit, else int32."""
    return np.dtype(np.uint16 if size <= NARROW_LIMIT else np.int32)


class TransposedView(NamedTuple):
    """The same entries in column-major order.

    Attributes
    ----------
    col_offsets : int32 array, shape (k + 1,)
    rows : uint16 (where m <= 65536) or int32 array, shape (nnz,)
    permutation : int32 array, shape (nnz,)
        Entry ``j`` of the column-major order is entry ``permutation[j]`` of the canonical one.
    """

    col_offsets: Array
    rows: Array
    permutation: Array


def transpose(row_offsets: Array, columns: Array, shape: tuple[int, int]) -> TransposedView:
    """Column-major view of a canonical structure."""
    return Transposing(columns, shape)(row_offsets, columns)


class Transposing:
    """`transpose` of structures of one size, with its workspace allocated beforehand.

    On a GPU by the kernels of ``cuda/transpose.cu``, unless the masks of 32 rows that they work on,
    4 bytes a column, would be large beside the entries: then, and on the CPU, by a sort.

    Parameters
    ----------
    columns : array, shape (nnz,)
        Of the structure, or like it.
    shape : (m, k)
    """

    def __init__(self, columns: Array, shape: tuple[int, int]) -> None:
        self.shape = shape
        self._space: Workspace | None = None
        words, nnz = ceil_div(shape[0], 32) * shape[1], columns.shape[0]
        if runs_kernels(columns) and 0 < nnz and words <= max(_MASKS, _MASKS_PER_ENTRY * nnz):
            self.reserve(columns)

    def reserve(self, columns: Array) -> None:
        """Have kernels do it, in memory that is allocated now."""
        m, k = self.shape
        self._work, self._space = Work(columns), (space := Workspace())
        space.add("arrivals", 4, zero=True)
        for name in ("masks", "before"):
            space.add(name, 4 * ceil_div(m, 32) * k)
        space.add("starts", 4 * m * (ceil_div(k, _TILE[1]) + 1))
        space.allocate(self._work)

    def __call__(
        self, row_offsets: Array, columns: Array, out: TransposedView | None = None
    ) -> TransposedView:
        """The view, in the arrays of ``out`` where they are given. To be called once."""
        if self._space is not None:
            return self._by_masks(self._space, row_offsets, columns, out)
        fresh = _transpose(row_offsets, columns, self.shape)
        if out is None:
            return fresh
        for held, new in zip(out, fresh, strict=True):
            held[...] = new
        return out

    def _by_masks(
        self, space: Workspace, row_offsets: Array, columns: Array, out: TransposedView | None
    ) -> TransposedView:
        (m, k), nnz, work = self.shape, columns.shape[0], self._work
        if out is None:
            out = TransposedView(
                work.xp.empty(k + 1, np.int32),
                work.xp.empty(nnz, index_dtype(m)),
                work.xp.empty(nnz, np.int32),
            )
        index, segments = columns.dtype.name, ceil_div(k, _SEGMENT)
        masks, before, starts = space["masks"], space["before"], space["starts"]
        work.launch(
            kernels.TRANSPOSE_MASKS,
            ceil_div(m, 32) * segments,
            (m, k, segments),
            pointer(row_offsets),
            pointer(columns),
            masks,
            starts,
            threads=1024,
            I=index,
        )
        work.launch(
            kernels.TRANSPOSE_COUNTS,
            ceil_div(k, 32),
            (k, ceil_div(m, 32)),
            masks,
            before,
            pointer(out.col_offsets),
            space["arrivals"],
        )
        work.launch(
            kernels.TRANSPOSE_ENTRIES,
            ceil_div(m, _TILE[0]) * ceil_div(k, _TILE[1]),
            (m, k),
            pointer(columns),
            starts,
            masks,
            before,
            *map(pointer, out),
            I=index,
            R=out.rows.dtype.name,
        )
        return out


def _transpose(row_offsets: Array, columns: Array, shape: tuple[int, int]) -> TransposedView:
    (m, k), nnz = shape, columns.shape[0]
    xp = get_array_module(columns)
    if xp is np:
        entries = np.arange(nnz, dtype=np.int32)
        matrix = sparse.csr_array((entries, columns.astype(np.int32), row_offsets), shape=shape)
        view = matrix.tocsc()
        return TransposedView(
            view.indptr.astype(np.int32, copy=False),
            view.indices.astype(index_dtype(m)),
            view.data,
        )
    permutation = xp.argsort(columns, kind="stable").astype(np.int32)
    rows = expand_rows(row_offsets, nnz)[permutation].astype(index_dtype(m))
    bounds = xp.arange(k + 1, dtype=np.int32)
    ordered = columns[permutation].astype(np.int32)
    return TransposedView(
        xp.searchsorted(ordered, bounds, side="left").astype(np.int32), rows, permutation
    )


def split_positions(positions: Array, shape: tuple[int, int]) -> tuple[Array, Array]:
    """Row offsets (int32) and columns (stored dtype) of sorted linear positions (int64)."""
    m, k = int(shape[0]), int(shape[1])
    xp = get_array_module(positions)
    starts = xp.arange(m + 1, dtype=np.int64) * k
    row_offsets = xp.searchsorted(positions, starts, side="left").astype(np.int32)
    columns = (positions % max(k, 1)).astype(index_dtype(k))
    return row_offsets, columns


def check_coords(op: str, row: Array, col: Array, shape: tuple[int, int]) -> None:
    """Coordinates must be equally long 1-D integer arrays on one device, within ``shape``."""
    for name, array in (("row", row), ("col", col)):
        check_index_array(op, name, array)
    if row.shape != col.shape:
        fail(op, "row and col", "have the same length", (row.shape[0], col.shape[0]))
    _check.check_same_device(op, "col", col, device_of(row))
    _check.check_nnz(op, row.shape[0])
    if row.shape[0] == 0:
        return
    xp = get_array_module(row)
    # One copy to the host for the four bounds.
    extremes = (row.min(), row.max(), col.min(), col.max())
    bounds = xp.stack([extreme.astype(np.int64) for extreme in extremes])
    row_min, row_max, col_min, col_max = bounds.tolist()
    for name, low, high, size in (
        ("row", row_min, row_max, shape[0]),
        ("col", col_min, col_max, shape[1]),
    ):
        if low < 0 or high >= size:
            got = low if low < 0 else high
            fail(op, name, f"hold indices in [0, {size})", got, IndexError)


def check_index_array(op: str, name: str, array: object) -> None:
    _check.check_array(op, name, array)
    if array.dtype.kind not in "iu":  # type: ignore[attr-defined]
        fail(op, name, "have an integer dtype", dtype_name(array), TypeError)
    if array.ndim != 1:  # type: ignore[attr-defined]
        fail(op, name, "have 1 dimension", array.ndim)  # type: ignore[attr-defined]


def check_structure(op: str, row_offsets: Array, columns: Array, k: int) -> None:
    """Offsets must run from 0 to nnz without decreasing; columns must increase in each row."""
    nnz = columns.shape[0]
    first, last = int(row_offsets[0]), int(row_offsets[-1])
    if first != 0 or last != nnz:
        fail(op, "row_offsets", f"run from 0 to nnz ({nnz})", (first, last))
    offsets = row_offsets.astype(np.int64)
    if bool((offsets[1:] < offsets[:-1]).any()):
        fail(op, "row_offsets", "not decrease", "an entry below its predecessor")
    if nnz == 0:
        return
    low, high = int(columns.min()), int(columns.max())
    if low < 0 or high >= k:
        fail(op, "columns", f"hold indices in [0, {k})", low if low < 0 else high, IndexError)
    positions = expand_rows(offsets, nnz).astype(np.int64) * k + columns
    if bool((positions[1:] <= positions[:-1]).any()):
        fail(op, "columns", "strictly increase within each row", "an entry out of order")


def check_topology_shape(op: str, shape: Any) -> tuple[int, int]:
    m, k = _check.check_matrix_shape(op, shape)
    if max(m, k) > MAX_SIZE:
        fail(op, "shape", f"have no entry above {MAX_SIZE} (indices are 32-bit)", (m, k))
    return m, k


def expand_rows(row_offsets: Array, nnz: int) -> Array:
    xp = get_array_module(row_offsets)
    if xp is np:
        rows = np.arange(row_offsets.shape[0] - 1, dtype=np.int32)
        return np.repeat(rows, np.diff(row_offsets))
    entries = xp.arange(nnz, dtype=row_offsets.dtype)
    return (xp.searchsorted(row_offsets, entries, side="right") - 1).astype(np.int32)
