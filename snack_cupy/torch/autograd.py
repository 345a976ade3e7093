"""Three autograd functions closed under differentiation.

The gradients of each are the other two, so any order of derivative composes from them:

    y = spmm(x, v)               dx = spmm_transposed(dy, v)    dv = sddmm(dy, x)
    z = spmm_transposed(g, v)    dg = spmm(dz, v)               dv = sddmm(g, dz)
    s = sddmm(g, x)              dg = spmm(x, ds)               dx = spmm_transposed(g, ds)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function, forward_ad

from snack_cupy.torch import products
from snack_cupy.torch.bridge import Structure

STALE = (
    "snack_cupy: the topology of a sparse layer was modified by an inplace operation between "
    "forward and backward; call backward before the update"
)

_NO_GRADIENTS = (None,) * len(Structure._fields)


def spmm(
    x: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    structure: Structure,
    kernel: str | None = None,
) -> torch.Tensor:
    """``x @ W.T + bias``: x (batch, k), values (nnz,), bias (m,) or None, result (batch, m)."""
    if _recorded(x, values, bias):
        return Spmm.apply(x, values, bias, kernel, *structure)
    return products.spmm(x, values, bias, structure, kernel)


def spmm_transposed(grad: torch.Tensor, values: torch.Tensor, structure: Structure) -> torch.Tensor:
    """``grad @ W``: grad (batch, m), values (nnz,), result (batch, k)."""
    if _recorded(grad, values):
        return SpmmTransposed.apply(grad, values, *structure)
    return products.spmm_transposed(grad, values, structure)


def sddmm(grad: torch.Tensor, x: torch.Tensor, structure: Structure) -> torch.Tensor:
    """Entries of ``grad.T @ x``: grad (batch, m), x (batch, k), result (nnz,)."""
    if _recorded(grad, x):
        return Sddmm.apply(grad, x, *structure)
    return products.sddmm(grad, x, structure)


def _recorded(*operands: torch.Tensor | None) -> bool:
    """Whether a product of these has to be told to autograd."""
    if forward_mode():
        return True
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands)


def forward_mode() -> bool:
    """Whether operands may carry tangents, also without gradients.

    There are no such derivatives here. Only `Function.apply` says so; a kernel would drop the
    tangent, which stands for a derivative of zero.
    """
    return forward_ad._current_level >= 0


def _save(ctx: Any, structure: Structure, first: torch.Tensor, second: torch.Tensor) -> None:
    """Keep what backward needs.

    Index tensors have no gradient and need not be offloaded or recomputed: they stay beside the
    tensors that autograd saves, and an update is told by their version. A compiled graph has no
    room beside it, and checks the versions of all tensors it saves itself.
    """
    if torch.compiler.is_compiling():
        *tensors, ctx.owner = structure
        ctx.save_for_backward(first, second, *tensors)
    else:
        ctx.save_for_backward(first, second)
        ctx.set_materialize_grads(False)
        ctx.structure, ctx.version = structure, _version(structure)


def _load(ctx: Any) -> tuple[torch.Tensor, torch.Tensor, Structure]:
    """What `_save` kept.

    Raises
    ------
    RuntimeError
        The topology was updated since.
    """
    if torch.compiler.is_compiling():
        first, second, *tensors = ctx.saved_tensors
        return first, second, Structure(*tensors)._replace(owner=ctx.owner)
    structure = ctx.structure
    if _version(structure) != ctx.version:
        raise RuntimeError(STALE)
    first, second = ctx.saved_tensors
    return first, second, structure


def _version(structure: Structure) -> int:
    owner = structure.owner
    return structure.row_offsets._version if owner is None else owner.version


def gradients(ctx: Any, dy: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Gradients of x, values and bias of a product, where they are needed; differentiable."""
    x, values, structure = _load(ctx)
    if dy is None:
        return None, None, None
    need_x, need_values, need_bias = ctx.needs_input_grad[:3]
    dx = spmm_transposed(dy, values, structure) if need_x else None
    dv = sddmm(dy, x, structure) if need_values else None
    db = dy.sum(0) if need_bias else None
    return dx, dv, db


# Index tensors are arguments of their own, so that a compiler sees them all.


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
        return products.spmm(x, values, bias, held, kernel)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Gradients of x, values and bias, where they are needed."""
        return *gradients(ctx, dy), None, *_NO_GRADIENTS


class SpmmTransposed(Function):
    """``z = g @ W``: g (batch, m), values (nnz,), z (batch, k)."""

    @staticmethod
    def forward(
        ctx: Any, grad: torch.Tensor, values: torch.Tensor, *structure: Any
    ) -> torch.Tensor:
        """The product; ``structure`` is that of `Structure`, complete."""
        held = Structure(*structure)
        _save(ctx, held, grad, values)
        return products.spmm_transposed(grad, values, held)

    @staticmethod
    def backward(ctx: Any, dz: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Gradients of grad and values, where they are needed."""
        grad, values, structure = _load(ctx)
        if dz is None:
            return None, None, *_NO_GRADIENTS
        need_grad, need_values = ctx.needs_input_grad[:2]
        dg = spmm(dz, values, None, structure) if need_grad else None
        dv = sddmm(grad, dz, structure) if need_values else None
        return dg, dv, *_NO_GRADIENTS


class Sddmm(Function):
    """``s[e] = sum_b g[b, row_e] x[b, col_e]``: g (batch, m), x (batch, k), s (nnz,)."""

    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, x: torch.Tensor, *structure: Any) -> torch.Tensor:
        """The sampled product; ``structure`` is that of `Structure`."""
        held = Structure(*structure)
        _save(ctx, held, grad, x)
        return products.sddmm(grad, x, held)

    @staticmethod
    def backward(ctx: Any, ds: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Gradients of grad and x, where they are needed."""
        grad, x, structure = _load(ctx)
        if ds is None:
            return None, None, *_NO_GRADIENTS
        need_grad, need_x = ctx.needs_input_grad[:2]
        dg = spmm(x, ds, None, structure) if need_grad else None
        dx = spmm_transposed(grad, ds, structure) if need_x else None
        return dg, dx, *_NO_GRADIENTS
