"""NumPy and SciPy twins of the sparse operations: the tests' oracle, and the path on the CPU.

The functions take the raw parts of a canonical structure (row offsets and columns) and trust them.
The sparse (m, k) matrix is worked through in runs of rows, and the dense operands in blocks of
columns, so that besides the result never more than 64 MiB are held. Each run is multiplied in one
of two ways, both deterministic:

- entry by entry: SciPy's CSR product, or for ``sddmm`` a gather of the two rows of each entry;
- as a tile: the run is written into a small dense array for a BLAS product, or for ``sddmm`` read
  out of one. A tile is at most a quarter of the matrix and 4 MiB.

:func:`choose_tile_rows` says which. A tile would multiply its zeros by an infinity or a NaN of the
dense operand; such operands are multiplied entry by entry, so both ways mean the same.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy import sparse

Array = np.ndarray[Any, Any]

# No temporary is larger than this, and no operation holds more than six such at a time.
_MAX_BYTES = 8 << 20
_MAX_ROWS = 1 << 20
_MAX_ENTRIES = 1 << 19  # converted or scattered at a time
_MAX_WIDTH = 1 << 12  # columns of a dense operand multiplied at a time
_MAX_GATHERED = 1 << 18  # numbers gathered at a time by sddmm; 2^16 to 2^20 measured within 25 %
_TILE_BYTES = 2 << 20
_MIN_TILE_ROWS = 32

# How many times faster the tiles must be, for OpenBLAS's threads spin: for each other, and for a
# while after a product. On two cores, a step whose `sddmm` by tiles was estimated 4 times as fast
# took 16 ms in turn with an `nn.Linear`, against 15 ms entry by entry; and beside another busy
# process that `sddmm` took 64 ms, against 7 ms.
_TILE_ADVANTAGE = 5
# Estimated time in nanoseconds, with coefficients (a, b, c, d, e):
#   entry by entry  nnz * (a + b * n)
#   as tiles        tiles * c + m * k * (d + e * n)
# Fitted to the least of many runs in float32 on 2 cores of an AMD EPYC 7003 (NumPy 2.4 with
# OpenBLAS, SciPy 1.17), m x k from 256 x 256 to 4096 x 4096, densities 1 to 50 %, n from 8 to 256.
_COST = {
    "spmm": (2.5, 0.16, 50e3, 0.6, 0.013),
    "spmm_transposed": (1.0, 0.16, 50e3, 0.6, 0.013),
    "sddmm": (3.0, 0.50, 40e3, 0.6, 0.014),
}


def choose_tile_rows(op: str, m: int, k: int, nnz: int, n: int, dtype: Any) -> int:
    """Rows of the dense tiles with which `op` is much faster, or 0 to work entry by entry.

    Parameters
    ----------
    op : {"spmm", "spmm_transposed", "sddmm"}
    m, k, nnz : sizes and number of entries of the sparse matrix
    n : columns of the dense operand (the batch)
    dtype : type the products are summed in; tiles need one that BLAS knows

    Examples
    --------
    >>> choose_tile_rows("spmm", 1024, 1024, 1048576, 64, "float32")
    256
    >>> choose_tile_rows("spmm", 1024, 1024, 104858, 64, "float32")
    0
    """
    dtype = np.dtype(dtype)
    # For one column a tile was 1.5 to 6 times as slow at every density: it is used only once.
    if dtype.char not in "fdFD" or n < 2:
        return 0
    # A quarter of the rows, so that a tile is never the matrix; and BLAS needs a few rows.
    rows = min(max(_TILE_BYTES // max(1, k * dtype.itemsize), _MIN_TILE_ROWS), m // 4)
    if rows < _MIN_TILE_ROWS or rows * k * dtype.itemsize > 2 * _TILE_BYTES:
        return 0
    per_entry, per_product, per_tile, per_cell, per_cell_product = _COST[op]
    by_entry = nnz * (per_entry + per_product * n)
    by_tile = -(-m // rows) * per_tile + m * k * (per_cell + per_cell_product * n)
    return rows if _TILE_ADVANTAGE * by_tile < by_entry else 0


@np.errstate(over="ignore", invalid="ignore")  # infinities and NaNs are results, as on the GPU
def spmm(
    row_offsets: Array,
    columns: Array,
    values: Array,
    dense: Array,
    k: int,
    *,
    batch_major: bool = False,
    bias: Array | None = None,
    out: Array | None = None,
) -> Array:
    """Sparse (m, k) times dense (k, n): ``out = A @ dense``; batch-major, ``out = dense @ A.T``.

    Parameters
    ----------
    row_offsets : int32 array, shape (m + 1,)
    columns : uint16 or int32 array, shape (nnz,)    increasing within a row
    values : array, shape (nnz,)
    dense : array, shape (k, n); with `batch_major` (batch, k)    any strides
    k : number of columns of the sparse matrix
    batch_major : the dense arrays hold one sample a row
    bias : array, shape (m,), optional    added to every sample
    out : array, shape (m, n); with `batch_major` (batch, m), optional    written, never read

    Returns
    -------
    array, `out` or a new one of the common type of `values` and `dense`

    Notes
    -----
    Costs 2 * nnz * n operations or, as tiles, 2 * m * k * n. Half types are summed in float32 and
    rounded once, bias included.

    Examples
    --------
    >>> row_offsets, columns = np.array([0, 2, 3]), np.array([0, 2, 1])
    >>> spmm(row_offsets, columns, np.array([1.0, 2.0, 3.0]), np.eye(3), 3)
    array([[1., 0., 2.],
           [0., 3., 0.]])
    """
    right = dense.T if batch_major else dense
    m, n = len(row_offsets) - 1, right.shape[1]
    out = _result(out, (n, m) if batch_major else (m, n), values, dense)
    target = out.T if batch_major else out
    if len(columns) == 0:
        target[...] = 0 if bias is None else bias[:, None]
        return out
    dtype = _sum_dtype(values, dense)
    tile_rows = choose_tile_rows("spmm", m, k, len(columns), n, dtype)
    tile = np.empty((tile_rows, k), dtype)
    product: Any = None

    for block in _column_blocks(right, dtype):
        operand = _load(right[:, block], dtype, any_order=tile_rows > 0)
        tiled = tile_rows > 0 and _all_finite(operand)
        if not tiled:
            operand = _load(operand, dtype)
        gathered = operand.dtype != dtype or not operand.flags.c_contiguous
        gathered = gathered and not tiled
        max_rows = _rows_within(block, dtype, tile_rows if tiled else _MAX_ROWS)
        max_entries = _rows_within(block, dtype, _MAX_ENTRIES) if gathered else _MAX_ENTRIES
        for rows, span in _spans(row_offsets, max_rows, max_entries):
            if gathered:  # `operand` was too long to be copied: take its rows entry by entry
                index = np.arange(span.stop - span.start, dtype=np.int32)
                matrix = _csr(row_offsets, index, values[span], rows, span, len(index), dtype)
                buffer = np.empty((len(index), operand.shape[1]), dtype)
                part = matrix @ _take_rows(operand, columns[span], buffer)
            else:
                matrix = _csr(row_offsets, columns[span], values[span], rows, span, k, dtype)
                if tiled:
                    part = _matmul(_to_tile(matrix, tile), operand, batch_major)
                else:
                    part = matrix @ operand
            # A row longer than `max_entries` arrives in several spans.
            product = product + part if span.start > row_offsets[rows.start] else part
            if span.stop == row_offsets[rows.stop]:
                if bias is not None:
                    product += bias[rows, None].astype(dtype)
                target[rows, block] = product
    return out


@np.errstate(over="ignore", invalid="ignore")
def spmm_transposed(
    row_offsets: Array,
    columns: Array,
    values: Array,
    dense: Array,
    k: int,
    *,
    batch_major: bool = False,
    out: Array | None = None,
) -> Array:
    """Transposed sparse times dense (m, n): ``out = A.T @ dense``; batch-major, ``dense @ A``.

    Parameters
    ----------
    row_offsets, columns, values, k, batch_major : as for :func:`spmm`
    dense : array, shape (m, n); with `batch_major` (batch, m)    any strides
    out : array, shape (k, n); with `batch_major` (batch, k), optional    written, never read

    Returns
    -------
    array, `out` or a new one of the common type of `values` and `dense`

    Notes
    -----
    The sum over the rows is taken in their order, in float32 for half types, and rounded once.

    Examples
    --------
    >>> row_offsets, columns = np.array([0, 2, 3]), np.array([0, 2, 1])
    >>> spmm_transposed(row_offsets, columns, np.array([1.0, 2.0, 3.0]), np.eye(2), 3)
    array([[1., 0.],
           [0., 3.],
           [2., 0.]])
    """
    right = dense.T if batch_major else dense
    n = right.shape[1]
    out = _result(out, (n, k) if batch_major else (k, n), values, dense)
    target = out.T if batch_major else out
    if len(columns) == 0:
        out[...] = 0
        return out
    dtype = _sum_dtype(values, dense)
    m = len(row_offsets) - 1
    tile_rows = choose_tile_rows("spmm_transposed", m, k, len(columns), n, dtype)
    tile = np.empty((tile_rows, k), dtype)
    band = _MAX_BYTES // dtype.itemsize  # output rows summed at a time
    width = min(max(1, band // k), _MAX_WIDTH)

    for first in range(0, k, band):
        stop = min(first + band, k)
        for block in _blocks(n, width):
            max_rows = _rows_within(block, dtype, tile_rows or _MAX_ROWS)
            total: Array | None = None
            for rows, span in _spans(row_offsets, max_rows, _MAX_ENTRIES):
                operand = _load(right[rows, block], dtype, any_order=tile_rows > 0)
                matrix = _csr(row_offsets, columns[span], values[span], rows, span, k, dtype)
                if stop - first < k:
                    matrix = _column_band(matrix, first, stop)
                if tile_rows and _all_finite(operand):
                    part = _matmul(_to_tile(matrix, tile).T, operand, batch_major)
                else:
                    part = matrix.T @ _load(operand, dtype)
                total = part if total is None else np.add(total, part, out=total)
            target[first:stop, block] = total
    return out


@np.errstate(over="ignore", invalid="ignore")
def sddmm(
    row_offsets: Array,
    columns: Array,
    left: Array,
    right: Array,
    *,
    batch_major: bool = False,
    out: Array | None = None,
) -> Array:
    """Sampled product: ``out[j] = sum_n left[row_j, n] * right[col_j, n]`` for each entry j.

    Parameters
    ----------
    row_offsets, columns, batch_major : as for :func:`spmm`
    left : array, shape (m, n); with `batch_major` (batch, m)    any strides
    right : array, shape (k, n); with `batch_major` (batch, k)    any strides
    out : array, shape (nnz,), optional    written, never read

    Returns
    -------
    array, `out` or a new one of the common type of `left` and `right`

    Notes
    -----
    Costs 2 * nnz * n operations or, as tiles, 2 * m * k * n. Half types are summed in float32 and
    rounded once.

    Examples
    --------
    >>> row_offsets, columns = np.array([0, 2, 3]), np.array([0, 2, 1])
    >>> sddmm(row_offsets, columns, np.array([[1.0], [2.0]]), np.array([[3.0], [4.0], [5.0]]))
    array([3., 5., 8.])
    """
    if batch_major:
        left, right = left.T, right.T
    (m, n), k = left.shape, right.shape[0]
    out = _result(out, columns.shape, left, right)
    dtype = _sum_dtype(left, right)
    tile_rows = choose_tile_rows("sddmm", m, k, len(columns), n, dtype)
    tile = np.empty((tile_rows, k), dtype)
    blocks = list(_column_blocks(right, dtype))
    most = tile_rows or _MAX_ROWS
    max_rows = min((_rows_within(block, dtype, most) for block in blocks), default=most)

    @functools.lru_cache(maxsize=1)  # where there is one block, all runs of rows share it
    def right_operand(start: int, stop: int) -> Array:
        return _load(right[:, start:stop], dtype, any_order=tile_rows > 0)

    for rows, span in _spans(row_offsets, max_rows, _MAX_ENTRIES):
        counts = np.diff(_local_offsets(row_offsets, rows, span))
        row = np.repeat(np.arange(rows.stop - rows.start), counts)
        total = np.zeros(len(row), dtype)
        for block in blocks:
            left_part = _load(left[rows, block], dtype, any_order=tile_rows > 0)
            right_part = right_operand(block.start, block.stop)
            if tile_rows:
                dots = np.matmul(left_part, right_part.T, out=tile[: len(left_part)])
                total += dots.reshape(-1).take(row * k + columns[span], mode="clip")
            else:
                _add_dots(total, left_part, right_part, row, columns[span])
        out[span] = total
    return out


def _add_dots(total: Array, left: Array, right: Array, row: Array, col: Array) -> None:
    """Add the dot product of ``left[row[j]]`` and ``right[col[j]]`` to ``total[j]``."""
    step = max(1, min(len(total), _MAX_GATHERED // left.shape[1]))
    left_rows, right_rows = np.empty((2, step, left.shape[1]), total.dtype)
    for part in _blocks(len(total), step):
        _take_rows(left, row[part], left_rows)
        _take_rows(right, col[part], right_rows)
        size = part.stop - part.start
        total[part] += np.einsum("jn,jn->j", left_rows[:size], right_rows[:size])


def _result(out: Array | None, shape: tuple[int, ...], first: Array, second: Array) -> Array:
    """`out`, or a new array of the common type of two operands."""
    return np.empty(shape, np.result_type(first.dtype, second.dtype)) if out is None else out


def _sum_dtype(first: Array, second: Array) -> np.dtype[Any]:
    """The type in which products are summed: float32 for half types, else the common type."""
    common = np.result_type(first.dtype, second.dtype)
    return np.dtype(np.float32) if common.name in ("float16", "bfloat16") else common


def _rows_within(block: slice, dtype: np.dtype[Any], most: int) -> int:
    """How many rows as wide as `block` fit one temporary, at most `most` and at least 1."""
    return max(1, min(most, _MAX_BYTES // ((block.stop - block.start) * dtype.itemsize)))


def _blocks(size: int, width: int) -> Iterator[slice]:
    """Slices of at most `width` that cover range(size)."""
    return (slice(start, min(start + width, size)) for start in range(0, size, width))


def _column_blocks(dense: Array, dtype: np.dtype[Any]) -> Iterator[slice]:
    """Blocks of columns: all where no copy is needed, else as many as a temporary holds."""
    rows, n = dense.shape
    if dense.flags.c_contiguous and dense.dtype == dtype and n <= _MAX_WIDTH:
        return _blocks(n, max(1, n))
    width = _MAX_BYTES // (max(1, rows) * dtype.itemsize)
    # No room for one column: the rows are taken entry by entry, 64 numbers of each at a time.
    return _blocks(n, min(width, _MAX_WIDTH) or 64)


def _is_blas_ready(dense: Array) -> bool:
    """Whether BLAS can read the matrix in place: one axis dense, the other not overlapping it."""
    (rows, columns), (down, along) = dense.shape, dense.strides
    size = dense.itemsize
    return bool(
        (along == size and down >= columns * size and down % size == 0)
        or (down == size and along >= rows * size and along % size == 0)
    )


def _load(dense: Array, dtype: np.dtype[Any], *, any_order: bool = False) -> Array:
    """A matrix as a C-contiguous array of `dtype`, or as it is where a copy would be too large.

    With `any_order`, every order that BLAS reads is left alone.
    """
    if dense.dtype == dtype and (dense.flags.c_contiguous or (any_order and _is_blas_ready(dense))):
        return dense
    if dense.size * dtype.itemsize > _MAX_BYTES:
        return dense
    copy = np.empty(dense.shape, dtype)
    # With a multiple of 4096 bytes between columns all of a row's numbers fall into one set of the
    # L1 cache (8 ways): 8 columns at a time are 4 times as fast as all 64 or 256 (1024, 4096 rows).
    step = 8 if dense.strides[1] % 4096 == 0 else max(1, dense.shape[1])
    for block in _blocks(dense.shape[1], step):
        copy[:, block] = dense[:, block]
    return copy


def _take_rows(dense: Array, index: Array, out: Array) -> Array:
    """Rows `index` of a matrix, written into the first rows of `out`; nothing else is copied."""
    rows = out[: len(index)]
    if dense.flags.c_contiguous and dense.dtype == out.dtype:
        dense.take(index, axis=0, out=rows, mode="clip")  # in any other order it copies `dense`
    else:
        rows[...] = dense[index]
    return rows


def _all_finite(dense: Array) -> bool:
    """False if any number is infinite or NaN (or if the sum overflows, which harms nothing)."""
    return bool(np.isfinite(dense.sum()))


def _matmul(left: Array, right: Array, column_major: bool) -> Array:
    """``left @ right``, stored in the order of the array it will be copied to."""
    return (right.T @ left.T).T if column_major else left @ right


def _spans(row_offsets: Array, max_rows: int, max_entries: int) -> Iterator[tuple[slice, slice]]:
    """Runs of rows and their entries; a longer row comes alone, in several spans of entries."""
    m, nnz = len(row_offsets) - 1, int(row_offsets[-1])
    row = 0
    while row < m:
        first = int(row_offsets[row])
        window = row_offsets[row : min(row + max_rows, m) + 1]
        fitting = int(np.searchsorted(window, min(first + max_entries, nnz), side="right")) - 1
        rows = slice(row, row + max(1, fitting))
        last = int(row_offsets[rows.stop])
        for start in range(first, max(last, first + 1), max_entries):
            yield rows, slice(start, min(start + max_entries, last))
        row = rows.stop


def _local_offsets(row_offsets: Array, rows: slice, span: slice) -> Array:
    """Offsets of `rows` within the entries of `span`."""
    window = row_offsets[rows.start : rows.stop + 1]
    return (np.clip(window, span.start, span.stop) - span.start).astype(np.int32)


def _csr(
    row_offsets: Array,
    columns: Array,
    values: Array,
    rows: slice,
    span: slice,
    k: int,
    dtype: np.dtype[Any],
) -> Any:
    """The entries `span` of `rows` as a SciPy matrix."""
    offsets = _local_offsets(row_offsets, rows, span)
    parts = (values.astype(dtype, copy=False), columns.astype(np.int32, copy=False), offsets)
    return sparse.csr_array(parts, shape=(rows.stop - rows.start, k))


def _column_band(matrix: Any, first: int, stop: int) -> Any:
    """Columns [first, stop) of a SciPy matrix, in a time independent of their number."""
    inside = (matrix.indices >= first) & (matrix.indices < stop)
    offsets = np.concatenate(([0], np.cumsum(inside)))[matrix.indptr].astype(np.int32)
    parts = (matrix.data[inside], matrix.indices[inside] - np.int32(first), offsets)
    return sparse.csr_array(parts, shape=(matrix.shape[0], stop - first))


def _to_tile(matrix: Any, tile: Array) -> Array:
    """A SciPy matrix written into the first rows of `tile`."""
    return np.asarray(matrix.toarray(out=tile[: matrix.shape[0]]))
