"""Elementwise operations of sparse tensors: an element that is not stored is zero, and stays it.

A function may run where ``f(0, ...)`` is zero; all others would fill the tensor and are refused.
Two sparse operands are aligned on the union of their positions by one stable sort.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from snack_cupy import _check, _coords
from snack_cupy._check import fail
from snack_cupy._entries import StoredEntries
from snack_cupy._xp import Array, get_array_module, is_array, on_device

# 0 op x is 0 for every finite x, so a dense operand is read at stored positions only.
INTERSECTIONS = ("multiply", "logical_and", "bitwise_and")
ZERO_LEFT = ("divide", "true_divide", "floor_divide", "remainder", "fmod")
# Bits of the result carry no value of the operand's dtype.
COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")


def is_scalar(value: object) -> bool:
    """Whether ``value`` is one number: Python's, NumPy's, or an array without dimensions."""
    if isinstance(value, int | float | complex | np.number | np.bool_):
        return True
    if isinstance(value, np.generic):
        return value.dtype.name == "bfloat16"
    return is_array(value) and value.ndim == 0  # type: ignore[attr-defined]


def refuse_dense(op: str, why: str) -> None:
    """Raise: the result would not be sparse."""
    rule = "keep zeros zero (ask for a dense result with to_dense())"
    fail(f"COOTensor.{op}", "the operation", rule, why)


def unary(name: str, tensor: StoredEntries) -> Any:
    """``f(tensor)`` for a ufunc that maps zero to zero; the structure is kept."""
    with on_device(tensor.data), np.errstate(all="ignore"):
        function = _function(tensor.data, name)
        probe = np.asarray(getattr(np, name)(np.zeros(1, tensor.dtype)))
        if probe.astype(bool).any():
            refuse_dense(name, f"{name}(0) = {probe[0]}")
        source = tensor if name == "negative" else tensor.coalesce()  # signs act on each part
        return source._with_data(_checked(name, function(source.data)))


def binary(name: str, left: Any, right: Any) -> Any:
    """``f(left, right)`` where one or both are sparse; NotImplemented for strangers."""
    sparse = [isinstance(side, StoredEntries) for side in (left, right)]
    if all(sparse):
        return _sparse_sparse(name, left, right)
    tensor, other = (left, right) if sparse[0] else (right, left)
    if is_scalar(other):
        return _with_scalar(name, tensor, other, reflected=not sparse[0])
    if is_array(other):
        return _with_dense(name, tensor, other, reflected=not sparse[0])
    return NotImplemented


def _with_scalar(name: str, tensor: StoredEntries, scalar: Any, *, reflected: bool) -> Any:
    if is_array(scalar):
        _check.check_same_device(f"COOTensor.{name}", "scalar", scalar, tensor.device)
    if tensor.dtype.name == "bfloat16" and isinstance(scalar, int | float):
        scalar = tensor.dtype.type(scalar)  # NumPy lets a Python number decide the dtype here
    keeps = name in INTERSECTIONS or (name in ZERO_LEFT and not reflected)
    if not keeps:
        host = scalar.get() if hasattr(scalar, "get") else scalar
        zero = np.zeros(1, tensor.dtype)
        with np.errstate(all="ignore"):
            pair = (host, zero) if reflected else (zero, host)
            probe = np.asarray(getattr(np, name)(*pair))
        if probe.astype(bool).any():
            refuse_dense(name, f"f(0) = {probe[0]} for the number {host}")
    with on_device(tensor.data):
        function = _function(tensor.data, name)
        source = tensor.coalesce()
        pair = (scalar, source.data) if reflected else (source.data, scalar)
        result = source._with_data(_checked(name, function(*pair)))
        return without_zeros(result) if name in COMPARISONS else result


def _with_dense(name: str, tensor: StoredEntries, dense: Array, *, reflected: bool) -> Any:
    op = f"COOTensor.{name}"
    if not (name in INTERSECTIONS or (name in ZERO_LEFT and not reflected)):
        refuse_dense(name, "a dense operand")
    _check.check_same_device(op, "dense", dense, tensor.device)
    shape = _broadcast_shape(op, tensor.shape, tuple(dense.shape))
    with on_device(tensor.data):
        xp = get_array_module(tensor.data)
        source = broadcast_to(tensor, shape).coalesce()
        picked = xp.broadcast_to(dense, shape)[tuple(source.coords)]
        pair = (picked, source.data) if reflected else (source.data, picked)
        return source._with_data(_checked(name, _function(dense, name)(*pair)))


def _sparse_sparse(name: str, left: StoredEntries, right: StoredEntries) -> Any:
    op = f"COOTensor.{name}"
    _check.check_same_device(op, "other", right.data, left.device)
    with np.errstate(all="ignore"):
        probe = np.asarray(getattr(np, name)(np.zeros(1, left.dtype), np.zeros(1, right.dtype)))
    # != and | of NaN and bool are true: 0 / 0 is refused as well.
    if probe.astype(bool).any():
        refuse_dense(name, f"f(0, 0) = {probe[0]}")
    shape = _broadcast_shape(op, left.shape, right.shape)
    with on_device(left.data):
        a, b = (broadcast_to(side, shape).coalesce() for side in (left, right))
        coords, slots_a, slots_b = align(a, b)
        xp = get_array_module(coords)
        slots = coords.shape[1]
        filled_a = xp.zeros(slots, a.dtype)
        filled_b = xp.zeros(slots, b.dtype)
        filled_a[slots_a] = a.data
        filled_b[slots_b] = b.data
        if name in INTERSECTIONS:
            both = xp.zeros(slots, bool)
            both[slots_a] = True
            other = xp.zeros(slots, bool)
            other[slots_b] = True
            chosen = xp.flatnonzero(both & other)
            coords, filled_a, filled_b = coords[:, chosen], filled_a[chosen], filled_b[chosen]
        data = _checked(name, _function(a.data, name)(filled_a, filled_b))
        result = left._from_parts(coords, data, shape, is_sorted=True, has_duplicates=False)
        return without_zeros(result)


def align(a: StoredEntries, b: StoredEntries) -> tuple[Array, Array, Array]:
    """Sorted union of the positions of two canonical tensors, and the slot of each entry there."""
    xp = get_array_module(a.data)
    coords = xp.concatenate([a.coords, b.coords], axis=1)
    if coords.shape[1] == 0:
        empty = xp.zeros(0, np.int64)
        return coords, empty, empty
    merge = _coords.find_merge(coords, a.shape)
    total = coords.shape[1]
    order = xp.arange(total) if merge.order is None else merge.order
    starts = xp.arange(total) if merge.starts is None else merge.starts
    is_start = xp.zeros(total, np.int64)
    is_start[starts] = 1
    slot = xp.empty(total, np.int64)
    slot[order] = xp.cumsum(is_start) - 1
    return coords[:, order[starts]], slot[: a.nnz], slot[a.nnz :]


def without_zeros(tensor: Any) -> Any:
    """The tensor without stored entries that are zero; itself where there are none."""
    xp = get_array_module(tensor.data)
    chosen = xp.flatnonzero(tensor.data != 0)
    if chosen.size == tensor.nnz:
        return tensor
    return tensor._from_parts(
        tensor.coords[:, chosen],
        tensor.data[chosen],
        tensor.shape,
        is_sorted=tensor._is_sorted or None,
        has_duplicates=False if tensor._has_duplicates is False else None,
    )


def broadcast_to(tensor: Any, shape: tuple[int, ...]) -> Any:
    """Axes of size 1 repeated and new ones put in front: ``nnz`` grows by the same factor."""
    if shape == tensor.shape:
        return tensor
    op = "COOTensor.broadcast_to"
    new = len(shape) - tensor.ndim
    old = (1,) * new + tensor.shape
    fits = new >= 0 and all(a in (1, b) for a, b in zip(old, shape, strict=True))
    if not fits:
        fail(op, "shape", f"be one that {tensor.shape} broadcasts to", shape)
    with on_device(tensor.data):
        xp = get_array_module(tensor.data)
        dtype = _coords.coords_dtype(shape)
        nnz = tensor.nnz
        repeated = [size if was != size else 1 for was, size in zip(old, shape, strict=True)]
        copies = int(np.prod(repeated, dtype=object)) if nnz else 0
        grid = xp.arange(copies, dtype=np.int64)
        rows = []
        for axis in reversed(range(len(shape))):
            if repeated[axis] != 1:
                rows.append(xp.tile(grid % repeated[axis], nnz).astype(dtype))
                grid = grid // repeated[axis]
            elif axis < new:
                rows.append(xp.zeros(nnz * copies, dtype))
            else:
                rows.append(xp.repeat(tensor.coords[axis - new].astype(dtype), copies))
        data = xp.repeat(tensor.data, copies)
        known = tensor._has_duplicates
        return tensor._from_parts(xp.stack(rows[::-1]), data, shape, has_duplicates=known)


def _broadcast_shape(op: str, left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    ndim = max(len(left), len(right))
    pairs = zip((1,) * (ndim - len(left)) + left, (1,) * (ndim - len(right)) + right, strict=True)
    shape = []
    for a, b in pairs:
        if a != b and 1 not in (a, b):
            fail(op, "shapes", "broadcast with each other", f"{left} and {right}")
        shape.append(b if a == 1 else a)
    return tuple(shape)


def _function(array: Array, name: str) -> Callable[..., Array]:
    function = getattr(get_array_module(array), name, None)
    if function is None:
        fail(f"COOTensor.{name}", "the operation", "be one the array module has", name, TypeError)
    return function


def _checked(name: str, data: Array) -> Array:
    _coords.check_value_dtype(f"COOTensor.{name}", "result", data.dtype)
    return data
