"""Indexing and reshaping of sparse tensors: entries are chosen and their coordinates renumbered."""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any

import numpy as np

from snack_cupy import _check, _coords
from snack_cupy._check import fail
from snack_cupy._entries import StoredEntries
from snack_cupy._xp import Array, get_array_module, is_array, on_device
from snack_cupy.topology import mover

OP = "COOTensor[...]"


def getitem(tensor: StoredEntries, key: Any) -> Any:
    """NumPy's indexing with integers, slices, an ellipsis, None, and an array on one axis.

    An element that all indices are integers for comes as an array without dimensions.
    """
    items = _expand(key, tensor.ndim)
    with on_device(tensor.data):
        source = tensor.coalesce()
        xp = get_array_module(source.data)
        coords, data = source.coords, source.data
        rows: list[Array | None] = [None] * tensor.ndim
        in_order = True
        # Choose with integers and slices first: what an index array repeats is then less.
        ordered = sorted(
            (axis for axis, item in _numbered(items)), key=lambda a: _is_array_index(items, a)
        )
        by_axis = dict(_numbered(items))
        sizes: dict[int, int] = {}
        for axis in ordered:
            item, size = by_axis[axis], tensor.shape[axis]
            if isinstance(item, slice) and item == slice(None):
                sizes[axis] = size
                continue
            column = coords[axis]
            if isinstance(item, Integral):
                at = _read_integer(int(item), axis, size)
                chosen, new = xp.flatnonzero(column == at), None
            elif isinstance(item, slice):
                chosen, new, sizes[axis] = _take_slice(column, item, size)
                in_order &= item.step is None or item.step > 0
            else:
                index = _read_index(item, axis, size, tensor.device)
                chosen, new, sizes[axis] = _take_array(column, index)
                in_order = False
            coords, data = coords[:, chosen], data[chosen]
            rows = [row if row is None else row[chosen] for row in rows]
            rows[axis] = new

        out_rows: list[Array] = []
        shape: list[int] = []
        axis = 0
        for item in items:
            if item is None:
                out_rows.append(xp.zeros(data.shape[0], coords.dtype))
                shape.append(1)
                continue
            if not isinstance(item, Integral):
                row = rows[axis]
                out_rows.append(coords[axis] if row is None else row)
                shape.append(sizes[axis])
            axis += 1
        if not shape:
            return data[0] if data.size else xp.zeros(1, data.dtype)[0]
        dtype = _coords.coords_dtype(shape)
        stacked = xp.stack([row.astype(dtype, copy=False) for row in out_rows])
        known = True if in_order else None
        return source._from_parts(
            stacked, data, tuple(shape), is_sorted=known, has_duplicates=False
        )


def reshape(tensor: Any, shape: Any) -> Any:
    """The elements in row-major order under another shape; order and duplicates stay as known."""
    op = "COOTensor.reshape"
    given = (shape,) if isinstance(shape, Integral) else tuple(shape)
    if sum(size == -1 for size in given) == 1:
        rest = math.prod(size for size in given if size != -1)
        if rest == 0 or tensor.size % rest:
            fail(op, "shape", f"hold {tensor.size} elements", given)
        given = tuple(tensor.size // rest if size == -1 else size for size in given)
    size = _check.check_matrix_shape(op, given, ndim=None)
    if not size:
        fail(op, "shape", "have at least 1 dimension", size)
    if math.prod(size) != tensor.size:
        fail(op, "shape", f"hold {tensor.size} elements", size)
    if tensor.size > _coords.MAX_INDEX:
        fail(op, "the tensor", "have less than 2^63 elements", tensor.shape)
    with on_device(tensor.data):
        xp = get_array_module(tensor.data)
        dtype = _coords.coords_dtype(size)
        if tensor.nnz == 0:
            coords = xp.zeros((len(size), 0), dtype)
        else:
            (flat,) = _coords.sort_keys(tensor.coords, tensor.shape)
            rows = []
            for extent in reversed(size):
                rows.append((flat % extent).astype(dtype))
                flat = flat // extent
            coords = xp.stack(rows[::-1])
        return tensor._from_parts(
            coords,
            tensor.data,
            size,
            is_sorted=tensor._is_sorted,
            has_duplicates=tensor._has_duplicates,
        )


def triangle(tensor: Any, k: int, *, lower: bool) -> Any:
    """Entries of the last two axes with ``col - row <= k`` (lower) or ``>= k``."""
    name = "COOTensor.tril" if lower else "COOTensor.triu"
    if tensor.ndim < 2:
        fail(name, "the tensor", "have at least 2 dimensions", tensor.ndim)
    with on_device(tensor.data):
        offset = tensor.coords[-1].astype(np.int64) - tensor.coords[-2]
        inside = offset <= k if lower else offset >= k
        return choose(tensor, get_array_module(offset).flatnonzero(inside))


def diagonal(tensor: Any, offset: int = 0) -> Any:
    """Elements (i, i + offset) of a 2-D tensor, as a 1-D tensor."""
    tensor._check_matrix("diagonal")
    m, k = tensor.shape
    length = max(min(m, k - offset) if offset >= 0 else min(m + offset, k), 0)
    with on_device(tensor.data):
        row, col = tensor.coords
        xp = get_array_module(row)
        chosen = xp.flatnonzero(col.astype(np.int64) - row == offset)
        index = (row if offset >= 0 else col)[chosen]
        dtype = _coords.coords_dtype((length,))
        return tensor._from_parts(
            index[None].astype(dtype, copy=False),
            tensor.data[chosen],
            (length,),
            is_sorted=tensor._is_sorted or None,
            has_duplicates=False if tensor._has_duplicates is False else None,
        )


def choose(tensor: Any, chosen: Array) -> Any:
    """The stored entries at ascending positions ``chosen``."""
    return tensor._from_parts(
        tensor.coords[:, chosen],
        tensor.data[chosen],
        tensor.shape,
        is_sorted=tensor._is_sorted or None,
        has_duplicates=False if tensor._has_duplicates is False else None,
    )


def _expand(key: Any, ndim: int) -> list[Any]:
    items = list(key) if isinstance(key, tuple) else [key]
    dots = [i for i, item in enumerate(items) if item is Ellipsis]
    used = sum(item is not None and item is not Ellipsis for item in items)
    if len(dots) > 1:
        fail(OP, "the index", "have one ellipsis", len(dots), IndexError)
    if used > ndim:
        fail(OP, "the index", f"have at most {ndim} entries", used, IndexError)
    fill = [slice(None)] * (ndim - used)
    at = dots[0] if dots else len(items)
    items[at : at + len(dots)] = fill
    arrays = [i for i, item in enumerate(items) if _is_index_array(item)]
    if len(arrays) > 1:
        fail(OP, "the index", "have an array on one axis only", len(arrays), IndexError)
    for item in items:
        known = item is None or isinstance(item, slice) or _is_index_array(item)
        if not known and (not isinstance(item, Integral) or isinstance(item, bool)):
            rule = "hold integers, slices, ..., None or one array"
            fail(OP, "the index", rule, type(item).__name__, IndexError)
    return items


def _numbered(items: list[Any]) -> list[tuple[int, Any]]:
    return list(enumerate(item for item in items if item is not None))


def _is_array_index(items: list[Any], axis: int) -> bool:
    return _is_index_array(_numbered(items)[axis][1])


def _is_index_array(item: Any) -> bool:
    return isinstance(item, list) or (is_array(item) and item.ndim > 0)


def _read_integer(item: int, axis: int, size: int) -> int:
    if not -size <= item < size:
        fail(OP, f"index {axis}", f"be between {-size} and {size - 1}", item, IndexError)
    return item % size


def _read_index(item: Any, axis: int, size: int, device: str) -> Array:
    index = item if is_array(item) else np.asarray(item)
    if not is_array(item) and index.size == 0:
        index = index.astype(np.int64)
    if index.ndim != 1:
        fail(OP, f"index {axis}", "be an array of 1 dimension", index.ndim, IndexError)
    if index.dtype.kind not in "iub":
        fail(OP, f"index {axis}", "be of integers or booleans", index.dtype.name, IndexError)
    if isinstance(index, np.ndarray):
        index = mover(device)(index)
    _check.check_same_device(OP, f"index {axis}", index, device)
    xp = get_array_module(index)
    if index.dtype.kind == "b":
        if index.shape[0] != size:
            fail(OP, f"index {axis}", f"have {size} booleans", index.shape[0], IndexError)
        return xp.flatnonzero(index)
    index = index.astype(np.int64)
    if index.size and (int(index.min()) < -size or int(index.max()) >= size):
        low, high = int(index.min()), int(index.max())
        got = low if low < -size else high
        fail(OP, f"index {axis}", f"be between {-size} and {size - 1}", got, IndexError)
    return xp.where(index < 0, index + size, index)


def _take_slice(column: Array, item: slice, size: int) -> tuple[Array, Array, int]:
    xp = get_array_module(column)
    start, stop, step = item.indices(size)
    length = len(range(start, stop, step))
    column = column.astype(np.int64)
    place = (column - start) // step
    chosen = xp.flatnonzero((place >= 0) & (place < length) & (place * step + start == column))
    return chosen, place[chosen], length


def _take_array(column: Array, index: Array) -> tuple[Array, Array, int]:
    """Each entry as often as ``index`` names its coordinate, with the places it is named at."""
    xp = get_array_module(column)
    order = xp.argsort(index, kind="stable")
    ranked = index[order]
    column = column.astype(np.int64)
    first = xp.searchsorted(ranked, column, side="left")
    ends = xp.cumsum(xp.searchsorted(ranked, column, side="right") - first)
    total = int(ends[-1]) if ends.size else 0
    item = xp.arange(total, dtype=np.int64)
    chosen = xp.searchsorted(ends, item, side="right")
    before = xp.concatenate([xp.zeros(1, ends.dtype), ends])[chosen]
    return chosen, order[first[chosen] + item - before], int(index.shape[0])
