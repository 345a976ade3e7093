"""`COOTensor`: a sparse tensor as coordinates and data, for NumPy and CuPy code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import sparse

from snack_cupy import _check, _coords, _joining, ops
from snack_cupy._array_surface import ArraySurface
from snack_cupy._check import fail
from snack_cupy._coords import Merge
from snack_cupy._entries import on_own_device
from snack_cupy._xp import Array, dtype_name, get_array_module, is_array, on_device
from snack_cupy.topology import Topology, check_topology, mover

SCIPY_FORMATS = ("bsr", "coo", "csc", "csr", "dia", "dok", "lil")


class COOTensor(ArraySurface):
    """Sparse n-dimensional tensor: the position and the value of each stored entry.

    Entries may come in any order and positions may occur twice; an element's value is the sum of
    its entries, and every operation gives what it gives on `coalesce`'s result. Entries that hold
    zero are kept and counted. Linear algebra works on 2-D tensors, through the canonical
    `topology` that is made at first use and kept.

    Parameters
    ----------
    coords : integer array, shape (ndim, nnz), or a list or tuple of ndim index sequences
        Stored as int32 where every size allows it, else int64.
    data : array or sequence, shape (nnz,)
        Booleans, integers, floats (bfloat16 where ml_dtypes is installed) or complex numbers.
    shape : tuple of ints, optional
        The default is the smallest shape that holds all coordinates.
    check : bool
        Compare the coordinates with `shape`; on a GPU this waits for the device. Skipping the check
        on wrong coordinates is undefined behaviour.

    Attributes
    ----------
    shape : tuple of ints

    Raises
    ------
    TypeError
        Coordinates are not integers, or data are not numbers.
    ValueError
        Lengths or devices disagree, or the shape is missing and cannot be told.
    IndexError
        A coordinate is negative or beyond its size.

    Notes
    -----
    Coordinates and data are copied. `data` may be written in place later; the coordinates may not.
    Nothing of the size of ``shape`` is allocated but by `to_dense`, and by linear algebra one
    array of ``shape[0]`` or ``shape[1]`` offsets.

    Examples
    --------
    >>> import numpy as np
    >>> from snack_cupy import COOTensor
    >>> A = COOTensor(([0, 2, 0], [1, 0, 1]), [1.0, 2.0, 10.0], shape=(3, 2))
    >>> A
    <COOTensor: shape=(3, 2), dtype=float64, nnz=3, device='cpu'>
    >>> A.to_dense()
    array([[ 0., 11.],
           [ 0.,  0.],
           [ 2.,  0.]])
    >>> A @ np.array([1.0, 100.0])
    array([1100.,    0.,    2.])
    >>> A.is_sorted, A.has_duplicates, A.coalesce().nnz
    (False, True, 2)
    """

    shape: tuple[int, ...]

    def __init__(
        self,
        coords: Array | Sequence[Any],
        data: Array | Sequence[Any],
        shape: Sequence[int] | None = None,
        *,
        check: bool = True,
    ) -> None:
        op = "COOTensor"
        rows, values = _coords.read_entries(op, coords, data)
        with on_device(values):
            if shape is None:
                if rows.shape[1] == 0:
                    fail(op, "shape", "be given where there are no entries", None)
                shape = [max(high + 1, 0) for high in _coords.bounds(rows)[1]]
            size = _check_tensor_shape(op, shape)
            if len(size) != rows.shape[0]:
                fail(op, "shape", f"have {rows.shape[0]} entries, one per row of coords", size)
            if check:
                _coords.check_bounds(op, rows, size)
            xp = get_array_module(values)
            dtype = _coords.coords_dtype(size)
            self._adopt(xp.array(rows, dtype=dtype, order="C"), xp.array(values), size)

    # Other constructors

    @classmethod
    def from_dense(cls, array: Array | Sequence[Any]) -> COOTensor:
        """From a dense array: an entry for each element that is not zero.

        Parameters
        ----------
        array : array or sequence of at least 1 dimension
            Of a dtype that `data` may have; a CuPy array gives a tensor on its device.

        Raises
        ------
        TypeError
            The elements are not numbers.
        ValueError
            The array has no dimension.

        Examples
        --------
        >>> import numpy as np
        >>> from snack_cupy import COOTensor
        >>> COOTensor.from_dense(np.eye(3, dtype=np.float32))
        <COOTensor: shape=(3, 3), dtype=float32, nnz=3, device='cpu'>
        """
        op = "COOTensor.from_dense"
        dense: Array = array if is_array(array) else np.asarray(array)
        _coords.check_value_dtype(op, "array", dense.dtype)
        shape = tuple(dense.shape)
        if not shape:
            fail(op, "array", "have at least 1 dimension", 0)
        with on_device(dense):
            index = dense.nonzero()
            data = dense[index]
            dtype = _coords.coords_dtype(shape)
            coords = get_array_module(dense).stack([axis.astype(dtype) for axis in index])
        return cls._from_parts(coords, data, shape, is_sorted=True, has_duplicates=False)

    @classmethod
    def from_scipy(cls, matrix: Any) -> COOTensor:
        """From a SciPy sparse array or matrix of any format; all stored entries are kept.

        Parameters
        ----------
        matrix : SciPy sparse array or matrix
            Copied.

        Raises
        ------
        TypeError
            It is not one.

        Examples
        --------
        >>> from scipy import sparse
        >>> from snack_cupy import COOTensor
        >>> COOTensor.from_scipy(sparse.eye_array(3, format="csr"))
        <COOTensor: shape=(3, 3), dtype=float64, nnz=3, device='cpu'>
        """
        op = "COOTensor.from_scipy"
        if not sparse.issparse(matrix):
            rule = "be a SciPy sparse array or matrix"
            fail(op, "matrix", rule, type(matrix).__name__, TypeError)
        entries = matrix.tocoo()
        return cls(entries.coords, entries.data, entries.shape)

    @classmethod
    def from_topology(cls, topology: Topology, values: Array) -> COOTensor:
        """From a structure and its values in canonical order; `values` is shared, not copied.

        Parameters
        ----------
        topology : Topology
            Shared too, as long as it is not updated.
        values : array, shape (nnz,), on the topology's device

        Raises
        ------
        TypeError, ValueError
            An argument is of another kind, or `values` has another shape or device.
        """
        op = "COOTensor.from_topology"
        check_topology(op, topology)
        _check.check_array(op, "values", values)
        _coords.check_value_dtype(op, "values", values.dtype)
        _check.check_same_device(op, "values", values, topology.device)
        _check.check_shape(op, "values", values, (topology.nnz,))
        with on_device(values):
            coords = topology.xp.stack([topology.row, topology.col])
        self = cls._from_parts(coords, values, topology.shape, is_sorted=True, has_duplicates=False)
        self._keep_topology(topology)
        return self

    # Linear algebra

    def __matmul__(self, other: object) -> Any:
        """Product with a dense vector, matrix or batch: (m, k) @ (k,), (k, n) or (..., k, n).

        With another COOTensor of shape (k, n) the product is sparse.

        Dtypes promote as NumPy's do. float32, float64, float16 and bfloat16 run on both devices,
        booleans, integers and complex numbers on the CPU only. Computed by `snack_cupy.spmm`.

        Raises
        ------
        TypeError
            The dtypes do not promote, or their common one does not run on the device.
        ValueError
            The tensor is not 2-D, or the other operand has another size or device.
        """
        if isinstance(other, COOTensor):
            return _joining.multiply_matrices(self, other)
        return self._multiply(other, reflected=False)

    def __rmatmul__(self, other: object) -> Array:
        """Product with dense rows: shape (..., m) @ (m, k); as `__matmul__` else."""
        return self._multiply(other, reflected=True)

    @on_own_device
    def _multiply(self, dense: Any, *, reflected: bool) -> Array:
        if not is_array(dense):
            return NotImplemented
        op = "COOTensor.matmul"
        self._check_matrix("matmul")
        _check.check_same_device(op, "dense", dense, self.device)
        m, k = self.shape
        if dense.ndim == 0:
            fail(op, "dense", "have at least 1 dimension", dense.ndim)
        if dense.shape[-1 if reflected else max(dense.ndim - 2, 0) - dense.ndim] != (
            m if reflected else k
        ):
            rule = f"have shape (..., {m})" if reflected else f"have shape ({k},) or (..., {k}, n)"
            fail(op, "dense", rule, tuple(dense.shape))
        if not reflected and dense.ndim > 2:
            xp = get_array_module(dense)
            batch, n = dense.shape[:-2], dense.shape[-1]
            wide = xp.moveaxis(dense, -2, 0).reshape(k, math.prod(batch) * n)
            return xp.moveaxis(self._multiply(wide, reflected=False).reshape(m, *batch, n), 0, -2)
        try:
            dtype = np.result_type(self.dtype, dense.dtype)
        except TypeError:
            rule = f"have a dtype that promotes with {self.dtype.name}"
            fail(op, "dense", rule, dtype_name(dense), TypeError)
        values = self.values.astype(dtype, copy=False)
        dense = dense.astype(dtype, copy=False)
        if dtype.name in _check.VALUE_DTYPES:
            if reflected:
                return ops.spmm_transposed(self.topology, values, dense, batch_major=True)
            return ops.spmm(self.topology, values, dense)
        if self.device != "cpu":
            fail(op, "dtype", f"be one of {_check.VALUE_DTYPES} on a GPU", dtype.name, TypeError)
        topology = self.topology
        parts = (values, topology.col, topology.row_offsets)
        matrix = sparse.csr_array(parts, shape=self.shape)
        if not reflected:
            return matrix @ dense
        rows = dense.reshape(math.prod(dense.shape[:-1]), m)
        return (matrix.T @ rows.T).T.reshape(*dense.shape[:-1], k)

    @on_own_device
    def astype(self, dtype: Any, copy: bool = True) -> COOTensor:
        """The same elements in another dtype.

        Parameters
        ----------
        dtype : dtype
            Of booleans, integers, floats or complex numbers.
        copy : bool
            False returns the tensor itself where nothing changes.

        Raises
        ------
        TypeError
            The dtype is another one.
        """
        dtype = np.dtype(dtype)
        _coords.check_value_dtype("COOTensor.astype", "dtype", dtype)
        if dtype == self.dtype:
            return self.copy() if copy else self
        source = self.coalesce() if self.has_duplicates else self
        return source._with_data(source._data.astype(dtype))

    # Conversions

    @on_own_device
    def to_dense(self) -> Array:
        """Dense array of shape `shape`: ``size * dtype.itemsize`` bytes, however few entries."""
        merge = self._find_merge() if self.has_duplicates else Merge(None, None)
        chosen = _coords.first_entries(merge)
        coords = self._coords if chosen is None else self._coords[:, chosen]
        dense = get_array_module(self._data).zeros(self.shape, dtype=self.dtype)
        dense[tuple(coords)] = _coords.merge_data(merge, self._data)
        return dense

    def to_scipy(self, format: str = "coo") -> Any:
        """A SciPy sparse array of a 2-D tensor, in host memory; nothing is shared.

        Parameters
        ----------
        format : str
            "coo" keeps the stored entries as they are; "bsr", "csc", "csr", "dia", "dok" and "lil"
            hold the sums of duplicates.

        Raises
        ------
        ValueError
            The tensor is not 2-D, or the format is unknown.
        TypeError
            SciPy has no such dtype (float16, bfloat16).
        """
        op = "COOTensor.to_scipy"
        self._check_matrix("to_scipy")
        if format not in SCIPY_FORMATS:
            fail(op, "format", f"be one of {SCIPY_FORMATS}", repr(format))
        if self.dtype.name in ("float16", "bfloat16"):
            rule = "be one SciPy knows (call astype(numpy.float32) first)"
            fail(op, "dtype", rule, self.dtype.name, TypeError)
        source = self if format == "coo" else self.coalesce()
        move = mover("cpu")
        row, col = move(source._coords)
        parts = (move(source._data), (row, col))
        return sparse.coo_array(parts, shape=self.shape, copy=True).asformat(format)


def _check_tensor_shape(op: str, shape: Any) -> tuple[int, ...]:
    size = _check.check_matrix_shape(op, shape, ndim=None)
    if max(size, default=0) > _coords.MAX_INDEX:
        fail(op, "shape", "have no entry above 2^63 - 1", size)
    return size
