"""Coordinates of a COO tensor: reading, bounds, lexicographic order and merging of duplicates.

Coordinates are an integer array of shape (ndim, nnz); column ``j`` is the position of entry ``j``.
Everything here takes O(ndim * nnz) memory whatever the shape of the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from snack_cupy import _check
from snack_cupy._check import fail
from snack_cupy._xp import Array, device_of, dtype_name, get_array_module, is_array, on_device
from snack_cupy.topology import mover

MAX_INDEX = 2**63 - 1


class Merge(NamedTuple):
    """How stored entries become canonical ones: sorted, and each run of equal coordinates summed.

    Attributes
    ----------
    order : int64 array, shape (nnz,), or None where the entries are sorted already
        Stable lexicographic order of the entries.
    starts : int64 array, shape (canonical nnz,), or None where no coordinates occur twice
        Where each run of equal coordinates starts in that order.
    """

    order: Array | None
    starts: Array | None


def coords_dtype(shape: Sequence[int]) -> np.dtype:
    """Dtype of coordinates: int32 where every index of ``shape`` fits, else int64."""
    return np.dtype(np.int32 if max(shape, default=0) <= 2**31 else np.int64)


# Reading


def read_entries(op: str, coords: Any, data: Any) -> tuple[Array, Array]:
    """``coords`` as an integer array (ndim, nnz) and ``data`` as an array (nnz,), on one device.

    Sequences are converted, on the device of whatever array is among them; arrays are not copied.
    """
    if not is_array(coords) and not isinstance(coords, list | tuple):
        rule = "be an integer array of shape (ndim, nnz) or a list of index sequences"
        fail(op, "coords", rule, type(coords).__name__, TypeError)
    parts = [coords] if is_array(coords) else list(coords)
    device = next((device_of(part) for part in (data, *parts) if is_array(part)), "cpu")
    if is_array(coords):
        rows = coords
        _check_integers(op, "coords", rows)
        _check.check_same_device(op, "coords", rows, device)
        if rows.ndim != 2:
            fail(op, "coords", "have 2 dimensions (ndim, nnz)", rows.ndim)
    else:
        rows = _stack(op, [_read_index(op, i, part, device) for i, part in enumerate(parts)])
    if rows.shape[0] == 0:
        fail(op, "coords", "have a row for each dimension, at least 1", 0)
    values = _read_data(op, data, device)
    nnz = rows.shape[1]
    if values.shape[0] != nnz:
        rule = f"have one entry for each of the {nnz} coordinates"
        fail(op, "data", rule, values.shape[0])
    return rows, values


def _read_index(op: str, axis: int, part: Any, device: str) -> Array:
    name = f"coords[{axis}]"
    index: Array = part if is_array(part) else _to_numpy(op, name, part)
    if not is_array(part) and index.size == 0:
        index = index.astype(np.int64)  # NumPy makes floats of an empty list
    _check_integers(op, name, index)
    if index.ndim != 1:
        fail(op, name, "be one index sequence", f"{index.ndim} dimensions")
    if not is_array(part):
        return mover(device)(index)
    _check.check_same_device(op, name, index, device)
    return index


def _read_data(op: str, data: Any, device: str) -> Array:
    array = data if is_array(data) else mover(device)(_to_numpy(op, "data", data))
    check_value_dtype(op, "data", array.dtype)
    if array.ndim != 1:
        fail(op, "data", "have 1 dimension", array.ndim)
    _check.check_same_device(op, "data", array, device)
    return array


def _to_numpy(op: str, name: str, part: object) -> np.ndarray:
    try:
        return np.asarray(part)
    except ValueError:
        fail(op, name, "be a flat sequence of numbers", "nested sequences of unequal lengths")


def _stack(op: str, rows: list[Array]) -> Array:
    lengths = tuple(row.shape[0] for row in rows)
    if len(set(lengths)) > 1:
        fail(op, "coords", "hold index sequences of one length", lengths)
    if not rows:
        return np.empty((0, 0), np.int64)
    if len({row.dtype for row in rows}) > 1:
        # NumPy would promote int64 and uint64 to float64; an index that wraps is out of range.
        rows = [row.astype(np.int64) for row in rows]
    with on_device(rows[0]):
        return get_array_module(*rows).stack(rows)


def _check_integers(op: str, name: str, array: Array) -> None:
    if array.dtype.kind not in "iu":
        fail(op, name, "have an integer dtype", dtype_name(array), TypeError)


def check_value_dtype(op: str, argument: str, dtype: np.dtype) -> None:
    """Values may be booleans, integers, floats (bfloat16 included) or complex numbers."""
    if dtype.kind not in "biufc" and dtype.name != "bfloat16":
        fail(op, argument, "have a boolean or numeric dtype", dtype.name, TypeError)


# Bounds


def bounds(coords: Array) -> tuple[list[int], list[int]]:
    """Smallest and largest index of each dimension; one copy to the host. nnz must not be 0."""
    xp = get_array_module(coords)
    low, high = xp.stack([coords.min(axis=1), coords.max(axis=1)]).tolist()
    return low, high


def check_bounds(op: str, coords: Array, shape: Sequence[int]) -> None:
    """Every index must lie within ``shape``."""
    if coords.shape[1] == 0:
        return
    for axis, (low, high, size) in enumerate(zip(*bounds(coords), shape, strict=True)):
        if low < 0 or high >= size:
            got = low if low < 0 else high
            fail(op, f"coords[{axis}]", f"hold indices in [0, {size})", got, IndexError)


def read_axes(op: str, axes: Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """A permutation of ``ndim`` axes, none negative; None: reversed."""
    if axes is None:
        return tuple(reversed(range(ndim)))
    given = tuple(axes)
    if not all(isinstance(axis, Integral) for axis in given):
        fail(op, "axes", "be integers", given, TypeError)
    order = tuple(int(axis) + ndim if axis < 0 else int(axis) for axis in given)
    if sorted(order) != list(range(ndim)):
        fail(op, "axes", f"be a permutation of the {ndim} axes", given)
    return order


# Order


def sort_keys(coords: Array, shape: Sequence[int]) -> list[Array]:
    """int64 keys, most significant first, whose lexicographic order is that of the coordinates.

    Neighbouring axes share a key while the product of their sizes fits 63 bits, so there is one
    key unless the tensor has 2^63 elements or more.
    """
    keys: list[Array] = []
    span = MAX_INDEX + 1
    for row, size in zip(coords, shape, strict=True):
        size = max(size, 1)
        if span * size > MAX_INDEX:
            keys.append(row.astype(np.int64))
            span = size
        else:
            keys[-1] = keys[-1] * size + row
            span *= size
    return keys


def compare_neighbours(keys: list[Array]) -> tuple[Array, Array]:
    """Whether each entry comes before its successor, and whether it equals it: (nnz - 1,) each."""
    before = keys[0][:-1] < keys[0][1:]
    equal = keys[0][:-1] == keys[0][1:]
    for key in keys[1:]:
        before |= equal & (key[:-1] < key[1:])
        equal &= key[:-1] == key[1:]
    return before, equal


def find_sorted(coords: Array, shape: Sequence[int]) -> bool:
    """Whether the coordinates never decrease; equal neighbours are allowed."""
    before, equal = compare_neighbours(sort_keys(coords, shape))
    return bool((before | equal).all())


def find_merge(coords: Array, shape: Sequence[int]) -> Merge:
    """The order and the runs that make the coordinates canonical."""
    xp = get_array_module(coords)
    keys = sort_keys(coords, shape)
    before, equal = compare_neighbours(keys)
    order = None
    if not bool((before | equal).all()):
        order = xp.argsort(keys[-1], kind="stable")
        for key in keys[-2::-1]:
            order = order[xp.argsort(key[order], kind="stable")]
        before, equal = compare_neighbours([key[order] for key in keys])
    if not bool(equal.any()):
        return Merge(order, None)
    is_start = xp.concatenate([xp.ones(1, dtype=bool), ~equal])
    return Merge(order, xp.flatnonzero(is_start))


# Merging


def first_entries(merge: Merge) -> Array | None:
    """Position of the first stored entry of each canonical one; None: all, as they stand."""
    if merge.starts is None:
        return merge.order
    return merge.starts if merge.order is None else merge.order[merge.starts]


def merge_data(merge: Merge, data: Array) -> Array:
    """Canonical values: duplicates summed in the dtype of ``data``, half types in float32."""
    if merge.order is not None:
        data = data[merge.order]
    if merge.starts is None:
        return data
    if dtype_name(data) in ("float16", "bfloat16"):
        return sum_runs(data.astype(np.float32), merge.starts).astype(data.dtype)
    return sum_runs(data, merge.starts)


def sum_runs(data: Array, starts: Array) -> Array:
    """Sum of each run; see `fold_runs`."""
    return fold_runs(data, starts, get_array_module(data).add)


def fold_runs(data: Array, starts: Array, combine: Callable[[Array, Array], Array]) -> Array:
    """Fold of each run ``data[starts[i]:starts[i + 1]]``, the last one to the end; none is empty.

    Neighbours are combined pairwise until each run is one number: a fixed order, the same on every
    device, in as many rounds as the longest run has bits.
    """
    xp = get_array_module(data)
    end = xp.full(1, data.shape[0], dtype=starts.dtype)
    lengths = xp.diff(xp.concatenate([starts, end]))
    total = data[starts]
    several = xp.flatnonzero(lengths > 1)  # the other runs, most of them as a rule, are done
    if several.size == 0:
        return total
    starts, lengths = starts[several], lengths[several]
    while int(lengths.max()) > 1:
        halves = (lengths + 1) // 2
        ends = xp.cumsum(halves)
        item = xp.arange(int(ends[-1]), dtype=starts.dtype)
        run = xp.searchsorted(ends, item, side="right")
        first = starts[run] + 2 * (item - (ends - halves)[run])
        paired = xp.flatnonzero(first + 1 < (starts + lengths)[run])
        sums = data[first]
        sums[paired] = combine(sums[paired], data[first[paired] + 1])
        data, starts, lengths = sums, ends - halves, halves
    total[several] = data
    return total
