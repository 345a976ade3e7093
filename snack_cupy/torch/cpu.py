"""The three products on CPU tensors: the SciPy twins of `snack_cupy.reference` on their memory."""

from __future__ import annotations

import torch
from torch import Tensor

from snack_cupy import reference
from snack_cupy._xp import Array
from snack_cupy.torch import bridge


def spmm(
    x: Tensor,
    values: Tensor,
    bias: Tensor | None,
    row_offsets: Tensor,
    columns: Tensor,
    algorithm: str | None = None,
) -> Tensor:
    """``x @ W.T + bias``: x (batch, k), values (nnz,), bias (m,), result (batch, m)."""
    out = reference.spmm(
        row_offsets.numpy(),
        bridge.index_to_array(columns),
        _numpy(values),
        _numpy(x),
        x.shape[1],
        batch_major=True,
        bias=None if bias is None else _numpy(bias),
    )
    return torch.from_numpy(out).to(x.dtype)


def spmm_transposed(
    grad: Tensor, values: Tensor, col_offsets: Tensor, rows: Tensor, permutation: Tensor
) -> Tensor:
    """``grad @ W``: grad (batch, m), values (nnz,), result (batch, k)."""
    # The column-major view is a CSR matrix of the transpose.
    out = reference.spmm(
        col_offsets.numpy(),
        bridge.index_to_array(rows),
        _numpy(values)[permutation.numpy()],
        _numpy(grad),
        grad.shape[1],
        batch_major=True,
    )
    return torch.from_numpy(out).to(grad.dtype)


def sddmm(grad: Tensor, x: Tensor, row_offsets: Tensor, columns: Tensor) -> Tensor:
    """Entries of ``grad.T @ x``: grad (batch, m), x (batch, k), result (nnz,)."""
    out = reference.sddmm(
        row_offsets.numpy(),
        bridge.index_to_array(columns),
        _numpy(grad),
        _numpy(x),
        batch_major=True,
    )
    return torch.from_numpy(out).to(grad.dtype)


def _numpy(tensor: Tensor) -> Array:
    """NumPy view; bfloat16 is widened to float32, which SciPy's sums would do anyway."""
    tensor = tensor.detach()
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()
