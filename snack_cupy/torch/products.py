"""The three products without gradients: straight to the code of the device, or by the dispatcher.

PyTorch's dispatcher serves tracing, transforms, modes and subclasses of tensors. A plain eager call
needs none of that, and it costs the host as much as a launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from snack_cupy.torch import cpu, cuda, ops
from snack_cupy.torch.bridge import Structure

_PLAIN_TYPES = frozenset((Tensor, torch.nn.Parameter))


def spmm(
    x: Tensor, values: Tensor, bias: Tensor | None, structure: Structure, kernel: str | None = None
) -> Tensor:
    """``x @ W.T + bias``: x (batch, k), values (nnz,), bias (m,) or None, result (batch, m)."""
    if torch.compiler.is_compiling() or not _plain(x, values):
        return ops.spmm(x, values, bias, structure.row_offsets, structure.columns, kernel)
    device = cuda if x.is_cuda else cpu
    return device.spmm(x, values, bias, structure.row_offsets, structure.columns, kernel)


def spmm_transposed(grad: Tensor, values: Tensor, structure: Structure) -> Tensor:
    """``grad @ W``: grad (batch, m), values (nnz,), result (batch, k)."""
    columns = structure[2:5]
    if torch.compiler.is_compiling() or not _plain(grad, values):
        return ops.spmm_transposed(grad, values, *columns)
    return (cuda if grad.is_cuda else cpu).spmm_transposed(grad, values, *columns)


def sddmm(grad: Tensor, x: Tensor, structure: Structure) -> Tensor:
    """Entries of ``grad.T @ x``: grad (batch, m), x (batch, k), result (nnz,)."""
    if torch.compiler.is_compiling() or not _plain(grad, x):
        return ops.sddmm(grad, x, structure.row_offsets, structure.columns)
    return (cuda if grad.is_cuda else cpu).sddmm(grad, x, structure.row_offsets, structure.columns)


def _plain(first: Tensor, second: Tensor) -> bool:
    """Whether the dispatcher would do nothing but call the code for CUDA or CPU tensors."""
    return (
        type(first) in _PLAIN_TYPES
        and type(second) in _PLAIN_TYPES
        and (first.is_cuda or first.is_cpu)
        and not first.is_neg()
        and not second.is_neg()
        and not first._is_zerotensor()
        and not second._is_zerotensor()
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._is_torch_function_mode_enabled()
        and torch._C._get_tracing_state() is None
    )
