"""What a sparse layer answers to ``layer.weight``: facts, never a dense matrix."""

from __future__ import annotations

from typing import Any, NoReturn

import torch


class SparseWeight:
    """Shape, dtype and device of a sparse layer's weight, for code that asks nn.Linear's.

    What `SnackLinear.weight` is. Its shape is (out_features, in_features).

    Raises
    ------
    TypeError
        Any attempt to compute with it; the message names the ways to get a tensor.
    """

    def __init__(self, values: torch.Tensor, shape: tuple[int, int]) -> None:
        self._values = values
        self.shape = torch.Size(shape)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values."""
        return self._values.dtype

    @property
    def device(self) -> torch.device:
        """Device of the values."""
        return self._values.device

    @property
    def requires_grad(self) -> bool:
        """Whether the values require a gradient."""
        return self._values.requires_grad

    @property
    def is_cuda(self) -> bool:
        """Whether the values live on a CUDA device."""
        return self._values.is_cuda

    @property
    def ndim(self) -> int:
        """Always 2."""
        return 2

    def dim(self) -> int:
        """Always 2."""
        return 2

    def size(self, dim: int | None = None) -> torch.Size | int:
        """The shape, or one size of it."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """Number of elements of the dense matrix: out_features * in_features."""
        return self.shape.numel()

    def __repr__(self) -> str:
        return (
            f"SparseWeight(shape={tuple(self.shape)}, nnz={self._values.shape[0]}, "
            f"dtype={self.dtype}, device='{self.device}')"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _refuse(getattr(func, "__name__", str(func)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"SparseWeight has no attribute {name!r}")
        _refuse(name)


def _refusal(name: str) -> Any:
    """A method that refuses; Python looks operators up on the class, past ``__getattr__``."""

    def method(self: SparseWeight, *args: Any) -> NoReturn:
        _refuse(name)

    return method


def _refuse(name: str) -> NoReturn:
    raise TypeError(
        f"weight.{name}: a sparse layer stores no dense weight; use layer.values (nnz,), "
        "layer.topology, or layer.to_dense().weight for a dense copy"
    )


_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
_OTHERS = ("neg", "abs", "lt", "le", "gt", "ge", "getitem", "setitem", "len", "iter", "array")
for _name in (*_ARITHMETIC, *(f"r{_name}" for _name in _ARITHMETIC), *_OTHERS):
    setattr(SparseWeight, f"__{_name}__", _refusal(f"__{_name}__"))
