"""The short way through a layer's call on the GPU, which most calls take.

Everything a call may be besides a product (traced, transformed, cast, of another device or kind of
tensor, or wrong) is asked here in a few cheap questions. Where the answer is no throughout, the
kernels are launched at once. The long way, `snack_cupy.torch.functional.linear`, gives the same
result for every call, and the messages for wrong ones.

Little Python runs here on purpose: beside an H200 the products of a backward took the host 10
microseconds each in a loop of them, and 20 to 30 in autograd's thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter

from snack_cupy.torch import autograd, cuda
from snack_cupy.torch.bridge import Structure

if TYPE_CHECKING:
    from snack_cupy.torch.linear import SnackLinear

_CPU = -1  # what Tensor.get_device() says of tensors that are on no GPU


def linear(layer: SnackLinear, x: Tensor) -> Tensor | None:
    """``layer(x)``, or None where the call has to go the long way."""
    if torch.compiler.is_compiling():
        return None
    parameters = layer._parameters
    values, bias = parameters.get("values"), parameters.get("bias", _MISSING)
    if (type(x) is not Tensor and type(x) is not Parameter) or type(values) is not Parameter:
        return None
    device, dtype = x.get_device(), values.dtype
    if (
        device == _CPU
        or device != torch._C._cuda_getDevice()
        or device != values.get_device()
        or x.dtype is not dtype
        or dtype not in cuda.DTYPE_NAMES
        or x.dim() == 0
        or x.shape[-1] != layer.in_features
        or x.is_neg()
        or torch._C._is_any_autocast_enabled()
        or torch._C._are_functorch_transforms_active()
        or torch._C._is_torch_function_mode_enabled()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._is_tracing()
        or autograd.forward_mode()
    ):
        return None
    if bias is not None and (
        type(bias) is not Parameter
        or bias.dtype is not dtype
        or bias.get_device() != device
        or bias.numel() != layer.out_features
    ):
        return None
    if x.dim() != 2:
        lead = x.shape[:-1]
        y = linear(layer, x.reshape(lead.numel(), layer.in_features))
        return y if y is None else y.view(*lead, layer.out_features)
    buffers: dict[str, Any] = layer._buffers  # self.name would search three dictionaries
    rows, columns = buffers["row_offsets"], buffers["packed_columns"]
    if torch.is_grad_enabled() and (
        values.requires_grad or x.requires_grad or (bias is not None and bias.requires_grad)
    ):
        if x.requires_grad and buffers["permutation"] is None:
            layer._build_transposed()
        transposed = (buffers["col_offsets"], buffers["packed_rows"], buffers["permutation"])
        return _apply(x, values, bias, Structure(rows, columns, *transposed), device)
    return cuda.spmm_here(device, x, values, bias, rows, columns)


_MISSING: Any = "a parametrised bias, say"


class _Linear(Function):
    """`autograd.Spmm` on the current CUDA device, whose kernels are launched at once."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        values: Tensor,
        bias: Tensor | None,
        structure: Structure,
        device: int,
    ) -> Tensor:
        """The product."""
        rows, columns, *_ = structure
        ctx.save_for_backward(x, values)
        ctx.set_materialize_grads(False)
        ctx.structure, ctx.version, ctx.device = structure, rows._version, device
        return cuda.spmm_here(device, x, values, bias, rows, columns)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of x, values and bias, where they are needed."""
        device = ctx.device
        if (
            torch.compiler.is_compiling()
            or type(dy) is not Tensor
            or dy.is_neg()
            or dy._is_zerotensor()
            or torch.is_grad_enabled()  # a derivative of these gradients will be asked for
            or device != torch._C._cuda_getDevice()
            or torch._C._are_functorch_transforms_active()
            or torch._C._is_torch_function_mode_enabled()
            or torch._C._len_torch_dispatch_stack()
            or autograd.forward_mode()
        ):
            return *autograd.gradients(ctx, dy), None, None
        rows, columns, col_offsets, packed_rows, permutation, _ = ctx.structure
        if rows._version != ctx.version:
            raise RuntimeError(autograd.STALE)
        x, values = ctx.saved_tensors
        need_x, need_values, need_bias, _, _ = ctx.needs_input_grad
        dx = dv = db = None
        if need_x:
            dx = cuda.spmm_transposed_here(
                device, dy, values, col_offsets, packed_rows, permutation
            )
        if need_values:
            dv = cuda.sddmm_here(device, dy, x, rows, columns)
        if need_bias:
            db = dy.sum(0)
        return dx, dv, db, None, None


# _Linear.apply without the Python code around it, which is for transforms: 3 of 10 microseconds.
_apply = super(Function, _Linear).apply
