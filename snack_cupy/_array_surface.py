"""`ArraySurface`: what makes a sparse tensor feel like an array; base class of `COOTensor`.

Methods name operations that `_elementwise`, `_reductions` and `_indexing` carry out, and answer
NumPy's two protocols, so that ``numpy.sin(A)`` and ``numpy.concatenate([A, B])`` work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from snack_cupy import _elementwise, _indexing, _joining, _reductions
from snack_cupy._check import fail
from snack_cupy._entries import StoredEntries, on_own_device
from snack_cupy._xp import Array

Axis = int | Sequence[int] | None
REDUCED = {
    "add": "sum", "multiply": "prod", "maximum": "max", "minimum": "min",
    "logical_and": "all", "logical_or": "any",
}  # fmt: skip
METHODS = (
    "sum", "prod", "mean", "max", "min", "any", "all", "argmax", "argmin",
    "reshape", "transpose", "diagonal", "astype", "copy",
)  # fmt: skip


def _operator(name: str, *, reflected: bool = False) -> Any:
    def method(self: Any, other: Any) -> Any:
        left, right = (other, self) if reflected else (self, other)
        return _elementwise.binary(name, left, right)

    method.__name__ = name
    method.__doc__ = f"``numpy.{name}`` where zeros stay zero; refused where they would not."
    return method


class ArraySurface(StoredEntries):
    """Indexing, elementwise arithmetic, reductions and NumPy's protocols.

    An element that is not stored is zero and stays zero: operations that would change it raise
    `ValueError` and name `to_dense`. Products with a dense array or a number touch stored entries
    alone, so ``0 * inf`` is zero here.
    """

    __array_priority__ = 100.0
    __hash__ = object.__hash__

    __add__, __radd__ = _operator("add"), _operator("add", reflected=True)
    __sub__, __rsub__ = _operator("subtract"), _operator("subtract", reflected=True)
    __mul__, __rmul__ = _operator("multiply"), _operator("multiply", reflected=True)
    __truediv__ = _operator("true_divide")
    __rtruediv__ = _operator("true_divide", reflected=True)
    __floordiv__ = _operator("floor_divide")
    __rfloordiv__ = _operator("floor_divide", reflected=True)
    __mod__, __rmod__ = _operator("remainder"), _operator("remainder", reflected=True)
    __pow__, __rpow__ = _operator("power"), _operator("power", reflected=True)
    __and__, __rand__ = _operator("bitwise_and"), _operator("bitwise_and", reflected=True)
    __or__, __ror__ = _operator("bitwise_or"), _operator("bitwise_or", reflected=True)
    __xor__, __rxor__ = _operator("bitwise_xor"), _operator("bitwise_xor", reflected=True)
    __lt__, __gt__ = _operator("less"), _operator("greater")
    __le__, __ge__ = _operator("less_equal"), _operator("greater_equal")
    __eq__, __ne__ = _operator("equal"), _operator("not_equal")

    def __neg__(self) -> Self:
        """Every element with its sign changed."""
        return _elementwise.unary("negative", self)

    def __pos__(self) -> Self:
        """The tensor itself."""
        return self

    def __abs__(self) -> Self:
        """Absolute value of every element."""
        return _elementwise.unary("absolute", self)

    def __getitem__(self, key: Any) -> Any:
        """Elements by integers, slices, ``...``, None, and an index array on one axis."""
        return _indexing.getitem(self, key)

    def __iter__(self) -> Any:
        """The parts along the first axis."""
        return (self[i] for i in range(self.shape[0]))

    # Reductions

    def sum(self, axis: Axis = None, *, dtype: Any = None, keepdims: bool = False) -> Any:
        """Sum over axes: a tensor of the others; over all: an array without dimensions.

        Examples
        --------
        >>> from snack_cupy import COOTensor
        >>> A = COOTensor(([0, 0, 2], [0, 1, 1]), [1, 2, 4], shape=(3, 2))
        >>> A.sum(axis=1).to_dense().tolist(), int(A.sum()), A.argmax(axis=0).tolist()
        ([3, 0, 4], 7, [0, 2])
        """
        return _reductions.reduce("sum", self, axis, keepdims=keepdims, dtype=dtype)

    def prod(self, axis: Axis = None, *, dtype: Any = None, keepdims: bool = False) -> Any:
        """Product over axes; zero wherever an element is not stored."""
        return _reductions.reduce("prod", self, axis, keepdims=keepdims, dtype=dtype)

    def max(self, axis: Axis = None, *, keepdims: bool = False) -> Any:
        """Largest element over axes, elements that are not stored included."""
        return _reductions.reduce("max", self, axis, keepdims=keepdims)

    def min(self, axis: Axis = None, *, keepdims: bool = False) -> Any:
        """Smallest element over axes, elements that are not stored included."""
        return _reductions.reduce("min", self, axis, keepdims=keepdims)

    def mean(self, axis: Axis = None, *, keepdims: bool = False) -> Any:
        """Mean over axes; of integers and booleans in float64."""
        return _reductions.mean(self, axis, keepdims=keepdims)

    def any(self, axis: Axis = None, *, keepdims: bool = False) -> Any:
        """Whether some element over axes is not zero."""
        return _reductions.reduce("sum", self._truth(), axis, keepdims=keepdims, dtype=bool)

    def all(self, axis: Axis = None, *, keepdims: bool = False) -> Any:
        """Whether no element over axes is zero."""
        return _reductions.reduce("prod", self._truth(), axis, keepdims=keepdims, dtype=bool)

    def argmax(self, axis: int | None = None) -> Array:
        """Index of the first largest element along an axis: a dense int64 array."""
        return _reductions.arg_extreme("argmax", self, axis)

    def argmin(self, axis: int | None = None) -> Array:
        """Index of the first smallest element along an axis: a dense int64 array."""
        return _reductions.arg_extreme("argmin", self, axis)

    @on_own_device
    def _truth(self) -> Self:
        source = self.coalesce()
        return source._with_data(source.data != 0)

    # Shape

    def reshape(self, *shape: Any) -> Self:
        """The elements in row-major order under another shape; one size may be -1."""
        given = shape[0] if len(shape) == 1 else shape
        return _indexing.reshape(self, given)

    @property
    def mT(self) -> Self:
        """The last two axes exchanged."""
        if self.ndim < 2:
            fail("COOTensor.mT", "the tensor", "have at least 2 dimensions", self.ndim)
        return self.transpose((*range(self.ndim - 2), self.ndim - 1, self.ndim - 2))

    def tril(self, k: int = 0) -> Self:
        """Elements on and below diagonal ``k`` of the last two axes."""
        return _indexing.triangle(self, k, lower=True)

    def triu(self, k: int = 0) -> Self:
        """Elements on and above diagonal ``k`` of the last two axes."""
        return _indexing.triangle(self, k, lower=False)

    def diagonal(self, offset: int = 0) -> Self:
        """Elements (i, i + offset) of a 2-D tensor."""
        return _indexing.diagonal(self, offset)

    @on_own_device
    def eliminate_zeros(self) -> None:
        """Drop stored entries that are zero, in place; duplicates are not summed before."""
        kept = _elementwise.without_zeros(self)
        if kept is not self:
            self._adopt(
                kept._coords,
                kept._data,
                self.shape,
                is_sorted=kept._is_sorted,
                has_duplicates=kept._has_duplicates,
            )

    # NumPy's protocols

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """NumPy's ufuncs, and CuPy's; ``out`` and ``where`` are refused."""
        name = ufunc.__name__
        if method == "reduce" and name in REDUCED and set(options) <= {"axis", "keepdims", "dtype"}:
            options = {"axis": 0, **{k: v for k, v in options.items() if v is not None}}
            return getattr(inputs[0], REDUCED[name])(**options)
        if method != "__call__" or options:
            got = f"{method}({', '.join(sorted(options))})"
            raise TypeError(f"COOTensor: numpy.{name} must be called without options, got {got}")
        if name == "matmul":
            left, right = inputs
            if isinstance(left, ArraySurface):
                return left.__matmul__(right)  # type: ignore[operator]
            return right.__rmatmul__(left)
        if ufunc.nout != 1 or len(inputs) > 2:
            return NotImplemented
        if len(inputs) == 1:
            return _elementwise.unary(name, self)
        return _elementwise.binary(name, *inputs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """NumPy's functions that have a sparse result; all others are refused."""
        name = func.__name__
        if name in ("concatenate", "stack", "kron"):
            return getattr(_joining, name)(*args, **kwargs)
        if name in ("amax", "amin"):
            name = name[1:]
        if name in (*METHODS, "tril", "triu") and isinstance(args[0], ArraySurface):
            return getattr(args[0], name)(*args[1:], **kwargs)
        if name in ("dot", "matmul") and len(args) == 2:
            return args[0] @ args[1]
        if name in ("shape", "ndim", "size") and len(args) == 1:
            return getattr(args[0], name)
        if name in ("broadcast_to",):
            return _elementwise.broadcast_to(args[0], tuple(args[1]))
        rule = "be one that keeps zeros (ask for a dense array with to_dense())"
        raise TypeError(f"COOTensor: numpy.{func.__name__} must {rule}, got {func.__name__}")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Refused: a conversion to dense is asked for by name."""
        raise TypeError("COOTensor: a dense array must be asked for with to_dense(), got __array__")
