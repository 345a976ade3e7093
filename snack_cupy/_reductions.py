"""Reductions of sparse tensors over axes: runs of entries that share what is left of a position.

Runs are folded pairwise in one fixed order, then met with zero where elements are not stored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np

from snack_cupy import _coords
from snack_cupy._check import fail
from snack_cupy._elementwise import without_zeros
from snack_cupy._entries import StoredEntries
from snack_cupy._xp import Array, get_array_module, on_device

HALVES = ("float16", "bfloat16")
COMBINE = {"sum": "add", "prod": "multiply", "max": "maximum", "min": "minimum"}


def read_axis(op: str, axis: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """The axes meant by NumPy's ``axis``, ascending, none twice."""
    given = tuple(range(ndim)) if axis is None else axis
    given = given if isinstance(given, tuple | list) else (given,)
    for one in given:
        if not isinstance(one, Integral):
            fail(op, "axis", "be None, an integer or a tuple of them", repr(one), TypeError)
        if not -ndim <= int(one) < ndim:
            fail(op, "axis", f"be between {-ndim} and {ndim - 1}", one)
    axes = sorted(int(one) % ndim for one in given)
    if len(set(axes)) != len(axes):
        fail(op, "axis", "name no axis twice", axis)
    return tuple(axes)


def reduce(
    name: str,
    tensor: StoredEntries,
    axis: int | Sequence[int] | None = None,
    *,
    keepdims: bool = False,
    dtype: Any = None,
) -> Any:
    """One of sum, prod, max, min: a tensor of the other axes; all axes: an array without any."""
    op = f"COOTensor.{name}"
    axes = read_axis(op, axis, tensor.ndim)
    kept = tuple(i for i in range(tensor.ndim) if i not in axes)
    count = math.prod(tensor.shape[i] for i in axes)
    if count == 0 and name in ("max", "min"):
        fail(op, "the axes", "hold at least one element", count)
    with on_device(tensor.data):
        source = tensor.coalesce()
        data = source.data
        wanted = np.dtype(dtype) if dtype is not None else _result_dtype(name, data.dtype)
        _coords.check_value_dtype(op, "dtype", wanted)
        data = data.astype(np.float32 if wanted.name in HALVES else wanted, copy=False)
        if not axes:
            return source._with_data(data.astype(wanted, copy=False))
        if not kept:
            total = _fold_all(name, data, count).astype(wanted)
            if not keepdims:
                return total[0]
            return _of_dense(source, total.reshape((1,) * tensor.ndim))
        shape = tuple(tensor.shape[i] for i in kept)
        coords, data = _fold_runs(name, source.coords[list(kept)], data, shape, count)
        data = data.astype(wanted, copy=False)
        if keepdims:
            xp = get_array_module(data)
            zero = xp.zeros(data.size, coords.dtype)
            rows = iter(coords)
            coords = xp.stack([zero if i in axes else next(rows) for i in range(tensor.ndim)])
            shape = tuple(1 if i in axes else size for i, size in enumerate(tensor.shape))
        coords = coords.astype(_coords.coords_dtype(shape), copy=False)
        result = source._from_parts(coords, data, shape, is_sorted=True, has_duplicates=False)
        return result if name == "prod" and count == 0 else without_zeros(result)


def mean(tensor: Any, axis: int | Sequence[int] | None = None, *, keepdims: bool = False) -> Any:
    """Sum over the axes divided by their number of elements; integers give float64."""
    count = math.prod(tensor.shape[i] for i in read_axis("COOTensor.mean", axis, tensor.ndim))
    if count == 0:
        fail("COOTensor.mean", "the axes", "hold at least one element", count)
    given = tensor.dtype
    exact = given if given.kind in "fc" and given.name not in HALVES else np.dtype(np.float64)
    exact = np.dtype(np.float32) if given.name in HALVES else exact
    total = reduce("sum", tensor, axis, keepdims=keepdims, dtype=exact) / exact.type(count)
    return total.astype(given) if given.name in HALVES else total


def arg_extreme(name: str, tensor: StoredEntries, axis: int | None) -> Array:
    """Dense int64 array: first index of the largest (smallest) element along one axis.

    The first zero that is not stored competes with the stored entries: in a row whose stored
    columns are 0, 1, 4 it is 2.
    """
    op = f"COOTensor.{name}"
    if axis is None:
        flat = tensor.reshape((tensor.size,))  # type: ignore[attr-defined]
        return arg_extreme(name, flat.reshape((1, flat.shape[0])), 1)[0]
    (along,) = read_axis(op, axis, tensor.ndim)
    size = tensor.shape[along]
    if size == 0:
        fail(op, "the axis", "hold at least one element", size)
    if tensor.dtype.kind == "c":
        fail(op, "dtype", "have an order", tensor.dtype.name, TypeError)
    kept = tuple(i for i in range(tensor.ndim) if i != along)
    shape = tuple(tensor.shape[i] for i in kept)
    with on_device(tensor.data):
        xp = get_array_module(tensor.data)
        moved = tensor.transpose((*kept, along)).coalesce()
        result = xp.zeros(math.prod(shape), np.int64)
        if moved.nnz == 0:
            return result.reshape(shape)
        rest = moved.coords[:-1]
        if kept:
            starts = _run_starts(rest, shape)
            key = _coords.sort_keys(rest, shape)[0]
        else:
            starts, key = xp.zeros(1, np.int64), xp.zeros(moved.nnz, np.int64)
        lengths = xp.diff(xp.concatenate([starts, xp.full(1, moved.nnz, starts.dtype)]))
        run = xp.searchsorted(starts, xp.arange(moved.nnz), side="right") - 1
        best = _run_fold("max" if name == "argmax" else "min", moved.data, starts)
        full = lengths == size
        zero = xp.zeros((), moved.dtype)
        beaten = (best < zero) if name == "argmax" else (best > zero)
        # NumPy takes the first NaN for the extreme of either kind.
        is_best = (moved.data == best[run]) | (moved.data != moved.data)
        column = moved.coords[-1].astype(np.int64)
        first = _run_fold("min", xp.where(is_best, column, size), starts)
        rank = xp.arange(moved.nnz) - starts[run]
        gap = _run_fold("min", xp.where(column != rank, rank, lengths[run]), starts)
        tied = (best == zero) & ~full
        chosen = xp.where(beaten & ~full, gap, xp.where(tied, xp.minimum(first, gap), first))
        result[key[starts]] = chosen
        return result.reshape(shape)


def _fold_runs(
    name: str, coords: Array, data: Array, shape: tuple[int, ...], count: int
) -> tuple[Array, Array]:
    """Positions of the result, sorted, and the fold of each one's entries and zeros."""
    xp = get_array_module(data)
    if data.size == 0:
        if name == "prod" and count == 0:  # an empty product is 1 everywhere
            fail("COOTensor.prod", "the axes", "hold at least one element", count)
        return coords, data
    merge = _coords.find_merge(coords, shape)
    if merge.order is not None:
        coords, data = coords[:, merge.order], data[merge.order]
    starts = xp.arange(data.size) if merge.starts is None else merge.starts
    folded = _run_fold(name, data, starts)
    lengths = xp.diff(xp.concatenate([starts, xp.full(1, data.size, starts.dtype)]))
    if name != "sum":
        folded = _meet_zeros(name, folded, lengths < min(count, _coords.MAX_INDEX))
    return coords[:, starts], folded


def _fold_all(name: str, data: Array, count: int) -> Array:
    xp = get_array_module(data)
    if data.size == 0:
        return xp.ones(1, data.dtype) if name == "prod" and count == 0 else xp.zeros(1, data.dtype)
    folded = _run_fold(name, data, xp.zeros(1, np.int64))
    if name != "sum" and data.size < count:
        folded = _meet_zeros(name, folded, xp.ones(1, bool))
    return folded


def _run_fold(name: str, data: Array, starts: Array) -> Array:
    combine = getattr(get_array_module(data), COMBINE[name])
    return _coords.fold_runs(data, starts, combine)


def _meet_zeros(name: str, folded: Array, where: Array) -> Array:
    xp = get_array_module(folded)
    met = getattr(xp, COMBINE[name])(folded, xp.zeros((), folded.dtype))
    return xp.where(where, met, folded).astype(folded.dtype, copy=False)


def _run_starts(coords: Array, shape: tuple[int, ...]) -> Array:
    xp = get_array_module(coords)
    _, equal = _coords.compare_neighbours(_coords.sort_keys(coords, shape))
    return xp.flatnonzero(xp.concatenate([xp.ones(1, bool), ~equal]))


def _result_dtype(name: str, dtype: np.dtype) -> np.dtype:
    if name in ("sum", "prod") and dtype.kind in "biu":
        return np.add.reduce(np.zeros(1, dtype)).dtype
    return dtype


def _of_dense(source: Any, dense: Array) -> Any:
    xp = get_array_module(dense)
    coords = xp.zeros((dense.ndim, 1), np.int32)
    whole = source._from_parts(
        coords, dense.reshape(1), dense.shape, is_sorted=True, has_duplicates=False
    )
    return without_zeros(whole)
