"""Several sparse tensors made one: concatenation, stacking, Kronecker and matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
from scipy import sparse

from snack_cupy import _check, _coords
from snack_cupy._check import fail
from snack_cupy._entries import StoredEntries
from snack_cupy._xp import get_array_module, on_device


def concatenate(tensors: Sequence[Any], axis: int = 0) -> Any:
    """Sparse tensors one after the other along an axis; dtypes promote as NumPy's do.

    Parameters
    ----------
    tensors : sequence of COOTensor, of equal sizes but along `axis`, on one device
    axis : int

    Raises
    ------
    TypeError
        One of them is no COOTensor.
    ValueError
        There is none, or shapes, devices or `axis` do not fit.

    Examples
    --------
    >>> import snack_cupy
    >>> A = snack_cupy.eye(2)
    >>> snack_cupy.concatenate([A, 3 * A], axis=1).to_dense()
    array([[1., 0., 3., 0.],
           [0., 1., 0., 3.]])
    """
    op = "concatenate"
    parts = _read_tensors(op, tensors)
    first = parts[0]
    along = _read_axis(op, axis, first.ndim)
    rest = (*first.shape[:along], *first.shape[along + 1 :])
    for i, part in enumerate(parts):
        if (*part.shape[:along], *part.shape[along + 1 :]) != rest or part.ndim != first.ndim:
            fail(op, f"tensors[{i}].shape", f"equal {first.shape} but along {along}", part.shape)
    size = sum(part.shape[along] for part in parts)
    shape = (*first.shape[:along], size, *first.shape[along + 1 :])
    with on_device(first.data):
        xp = get_array_module(first.data)
        dtype = _coords.coords_dtype(shape)
        parts = [part.coalesce() for part in parts]  # sums belong to each one's own dtype
        moved, before = [], 0
        for part in parts:
            coords = part.coords.astype(dtype)
            coords[along] += dtype.type(before)
            moved.append(coords)
            before += part.shape[along]
        value = np.result_type(*(part.dtype for part in parts))
        data = xp.concatenate([part.data.astype(value, copy=False) for part in parts])
        in_order = along == 0 and all(part._is_sorted for part in parts)
        unique = all(part._has_duplicates is False for part in parts)
        return first._from_parts(
            xp.concatenate(moved, axis=1),
            data,
            shape,
            is_sorted=True if in_order else None,
            has_duplicates=False if unique else None,
        )


def stack(tensors: Sequence[Any], axis: int = 0) -> Any:
    """Sparse tensors of one shape along a new axis; else as `concatenate`.

    Parameters
    ----------
    tensors : sequence of COOTensor, of one shape and device
    axis : int

    Raises
    ------
    TypeError, ValueError
        As for `concatenate`.
    """
    parts = _read_tensors("stack", tensors)
    shape = parts[0].shape
    along = _read_axis("stack", axis, len(shape) + 1)
    for i, part in enumerate(parts):
        if part.shape != shape:
            fail("stack", f"tensors[{i}].shape", f"equal {shape}", part.shape)
    key = (slice(None),) * along + (None,)
    return concatenate([part[key] for part in parts], axis=along)


def kron(left: Any, right: Any) -> Any:
    """Kronecker product of two sparse matrices: ``left.nnz * right.nnz`` entries.

    Parameters
    ----------
    left, right : COOTensor, 2-D, on one device

    Raises
    ------
    TypeError, ValueError
        An operand is no COOTensor, not 2-D, or on another device.
    """
    a, b = _read_tensors("kron", (left, right))
    a._check_matrix("kron")
    b._check_matrix("kron")
    shape = (a.shape[0] * b.shape[0], a.shape[1] * b.shape[1])
    if max(shape) > _coords.MAX_INDEX:
        fail("kron", "the product", "have sizes below 2^63", shape)
    with on_device(a.data):
        a, b = a.coalesce(), b.coalesce()
        xp = get_array_module(a.data)
        dtype = _coords.coords_dtype(shape)
        rows = [
            (x.astype(np.int64)[:, None] * size + y).reshape(-1).astype(dtype)
            for x, y, size in zip(a.coords, b.coords, b.shape, strict=True)
        ]
        data = (a.data[:, None] * b.data).reshape(-1)
        return a._from_parts(xp.stack(rows), data, shape, has_duplicates=False)


def multiply_matrices(left: Any, right: Any) -> Any:
    """Sparse (m, k) times sparse (k, n), canonical; SciPy's product, on a GPU cuSPARSE's.

    Half types are multiplied in float32 and rounded once.
    """
    op = "COOTensor.matmul"
    left._check_matrix("matmul")
    right._check_matrix("matmul")
    _check.check_same_device(op, "other", right.data, left.device)
    if left.shape[1] != right.shape[0]:
        fail(op, "other", f"have {left.shape[1]} rows", right.shape)
    dtype = np.result_type(left.dtype, right.dtype)
    with on_device(left.data):
        exact = np.dtype(np.float32) if dtype.name in ("float16", "bfloat16") else dtype
        shape = (left.shape[0], right.shape[1])
        xp = get_array_module(left.data)
        if left.device == "cpu":
            factory: Any = sparse.csr_array
        else:
            if exact.kind not in "fc":
                rule = "be floating or complex for sparse times sparse on a GPU (use get())"
                fail(op, "dtype", rule, dtype.name, TypeError)
            import cupyx.scipy.sparse as gpu_sparse

            factory = gpu_sparse.csr_matrix
        product = _csr(factory, left, exact) @ _csr(factory, right, exact)
        product.sort_indices()
        entries = product.tocoo()
        coords = xp.stack([entries.row, entries.col]).astype(_coords.coords_dtype(shape))
        data = entries.data.astype(dtype, copy=False)
        return left._from_parts(coords, data, shape, is_sorted=True, has_duplicates=False)


def _csr(factory: Any, tensor: Any, dtype: np.dtype) -> Any:
    topology = tensor.topology
    values = tensor.values.astype(dtype, copy=False)
    columns = topology.columns.astype(np.int32, copy=False)  # 16-bit ones are this library's own
    return factory((values, columns, topology.row_offsets), shape=tensor.shape)


def _read_tensors(op: str, tensors: Any) -> list[Any]:
    parts = list(tensors)
    if not parts:
        fail(op, "tensors", "hold at least one tensor", 0)
    for i, part in enumerate(parts):
        if not isinstance(part, StoredEntries):
            rule = "be a COOTensor"
            fail(op, f"tensors[{i}]", rule, type(part).__name__, TypeError)
        _check.check_same_device(op, f"tensors[{i}]", part.data, parts[0].device)
    return parts


def _read_axis(op: str, axis: Any, ndim: int) -> int:
    if not isinstance(axis, Integral):
        fail(op, "axis", "be an integer", repr(axis), TypeError)
    if not -ndim <= int(axis) < ndim:
        fail(op, "axis", f"be between {-ndim} and {ndim - 1}", axis)
    return int(axis) % ndim
