"""Three autograd functions closed under differentiation.

The gradients of each are the other two, so any order of derivative composes from them:

    y = spmm(x, v)               dx = spmm_transposed(dy, v)    dv = sddmm(dy, x)
    z = spmm_transposed(g, v)    dg = spmm(dz, v)               dv = sddmm(g, dz)
    s = sddmm(g, x)              dg = spmm(x, ds)               dx = spmm_transposed(g, ds)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

from snack_cupy.topology import Topology
from snack_cupy.torch import ops
from snack_cupy.torch.bridge import Structure

STALE = (
    "snack_cupy: the topology of a sparse layer was modified by an inplace operation between "
    "forward and backward; call backward before the update"
)

_NO_GRADIENTS = (None,) * len(Structure._fields)


def _save(ctx: Any, structure: Structure, *dense: torch.Tensor) -> None:
    *tensors, owner = structure
    ctx.save_for_backward(*dense, *tensors)
    ctx.owner = owner
    # Saved-tensor hooks (checkpointing, offloading) hand back other tensors at backward, whose
    # versions tell nothing: keep the buffer that an update bumps, and its version, with the graph.
    # Compiled graphs check the tensors they save themselves.
    if not torch.compiler.is_compiling():
        ctx.row_offsets = structure.row_offsets
        ctx.version = _version(structure.row_offsets, owner)


def _load(ctx: Any) -> tuple[torch.Tensor, torch.Tensor, Structure]:
    if not torch.compiler.is_compiling() and _version(ctx.row_offsets, ctx.owner) != ctx.version:
        raise RuntimeError(STALE)
    first, second, *tensors = ctx.saved_tensors
    return first, second, Structure(*tensors)._replace(owner=ctx.owner)


def _version(row_offsets: torch.Tensor, owner: Topology | None) -> int:
    return row_offsets._version if owner is None else owner.version


def _spmm(x: torch.Tensor, values: torch.Tensor, structure: Structure) -> torch.Tensor:
    if torch.is_grad_enabled():
        return Spmm.apply(x, values, None, None, *structure)
    return ops.spmm(x, values, None, structure.row_offsets, structure.columns)


def _spmm_transposed(
    grad: torch.Tensor, values: torch.Tensor, structure: Structure
) -> torch.Tensor:
    if torch.is_grad_enabled():
        return SpmmTransposed.apply(grad, values, *structure)
    return ops.spmm_transposed(grad, values, *structure[2:5])


def _sddmm(grad: torch.Tensor, x: torch.Tensor, structure: Structure) -> torch.Tensor:
    if torch.is_grad_enabled():
        return Sddmm.apply(grad, x, *structure)
    return ops.sddmm(grad, x, structure.row_offsets, structure.columns)


class Spmm(Function):
    """``y = x @ W.T + bias``: x (batch, k), values (nnz,), bias (m,) or None, y (batch, m)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        values: torch.Tensor,
        bias: torch.Tensor | None,
        kernel: str | None,
        *structure: Any,
    ) -> torch.Tensor:
        """The product; ``structure`` is that of `Structure`."""
        held = Structure(*structure)
        _save(ctx, held, x, values)
        return ops.spmm(x, values, bias, held.row_offsets, held.columns, kernel)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of x, values and bias, where they are needed."""
        x, values, structure = _load(ctx)
        need_x, need_values, need_bias = ctx.needs_input_grad[:3]
        dx = _spmm_transposed(dy, values, structure) if need_x else None
        dv = _sddmm(dy, x, structure) if need_values else None
        db = dy.sum(0) if need_bias else None
        return dx, dv, db, None, *_NO_GRADIENTS


class SpmmTransposed(Function):
    """``z = g @ W``: g (batch, m), values (nnz,), z (batch, k)."""

    @staticmethod
    def forward(
        ctx: Any, grad: torch.Tensor, values: torch.Tensor, *structure: Any
    ) -> torch.Tensor:
        """The product; ``structure`` is that of `Structure`, complete."""
        _save(ctx, Structure(*structure), grad, values)
        return ops.spmm_transposed(grad, values, *structure[2:5])

    @staticmethod
    def backward(ctx: Any, dz: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of grad and values, where they are needed."""
        grad, values, structure = _load(ctx)
        need_grad, need_values = ctx.needs_input_grad[:2]
        dg = _spmm(dz, values, structure) if need_grad else None
        dv = _sddmm(grad, dz, structure) if need_values else None
        return dg, dv, *_NO_GRADIENTS


class Sddmm(Function):
    """``s[e] = sum_b g[b, row_e] x[b, col_e]``: g (batch, m), x (batch, k), s (nnz,)."""

    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, x: torch.Tensor, *structure: Any) -> torch.Tensor:
        """The sampled product; ``structure`` is that of `Structure`."""
        held = Structure(*structure)
        _save(ctx, held, grad, x)
        return ops.sddmm(grad, x, held.row_offsets, held.columns)

    @staticmethod
    def backward(ctx: Any, ds: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of grad and x, where they are needed."""
        grad, x, structure = _load(ctx)
        need_grad, need_x = ctx.needs_input_grad[:2]
        dg = _spmm(x, ds, structure) if need_grad else None
        dx = _spmm_transposed(grad, ds, structure) if need_x else None
        return dg, dx, *_NO_GRADIENTS
