"""The three products on CUDA tensors: an output, raw pointers, and the launches of a plan.

This is the hot path of a layer, so it asks PyTorch for little: memory for the output (and for the
workspace of some plans), the addresses of tensors, the current stream. Tensors may have any
strides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from snack_cupy import _jit, dispatch
from snack_cupy.topology import index_dtype
from snack_cupy.torch import bridge

_DTYPE_NAMES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
# As torch.empty on the current device, without the dispatcher: what TorchInductor's code calls.
_empty_strided = torch._C._dynamo.guards._empty_strided_cuda
_plans: dict[tuple, dispatch.Plan] = {}


def spmm(
    x: Tensor,
    values: Tensor,
    bias: Tensor | None,
    row_offsets: Tensor,
    columns: Tensor,
    algorithm: str | None = None,
) -> Tensor:
    """``x @ W.T + bias``: x (batch, k), values (nnz,), bias (m,), result (batch, m)."""
    device = x.get_device()
    if device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            return _spmm(device, x, values, bias, row_offsets, columns, algorithm)
    return _spmm(device, x, values, bias, row_offsets, columns, algorithm)


def spmm_transposed(
    grad: Tensor, values: Tensor, col_offsets: Tensor, rows: Tensor, permutation: Tensor
) -> Tensor:
    """``grad @ W``: grad (batch, m), values (nnz,), result (batch, k)."""
    device = grad.get_device()
    if device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            return _spmm_transposed(device, grad, values, col_offsets, rows, permutation)
    return _spmm_transposed(device, grad, values, col_offsets, rows, permutation)


def sddmm(grad: Tensor, x: Tensor, row_offsets: Tensor, columns: Tensor) -> Tensor:
    """Entries of ``grad.T @ x``: grad (batch, m), x (batch, k), result (nnz,)."""
    device = grad.get_device()
    if device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            return _sddmm(device, grad, x, row_offsets, columns)
    return _sddmm(device, grad, x, row_offsets, columns)


# On the current device.


def _spmm(
    device: int,
    x: Tensor,
    values: Tensor,
    bias: Tensor | None,
    row_offsets: Tensor,
    columns: Tensor,
    algorithm: str | None,
) -> Tensor:
    x, values = x.contiguous(), values.contiguous()
    (batch, k), (nnz,), m = x.shape, values.shape, row_offsets.shape[0] - 1
    y = _empty_strided((batch, m), (m, 1), x.dtype)
    if nnz == 0 or batch == 0 or m == 0:
        return y.zero_() if bias is None else y.copy_(bias.expand(batch, m))
    start, address, entries = values.data_ptr(), x.data_ptr(), columns.data_ptr()
    offset, first = 0, row_offsets
    if bias is not None:
        bias = bias.contiguous()
        offset = bias.data_ptr()
    if algorithm == "snack_coo":
        first = _packed_rows(row_offsets, nnz, m)
    aligned = (start | address | entries) & 15 == 0
    plan = _plan(("spmm", m, k, nnz, batch, x.dtype, device, aligned, algorithm))
    pointers = (first.data_ptr(), entries, 0, start, address, offset, y.data_ptr())
    _launch(plan, pointers, device)
    return y


def _spmm_transposed(
    device: int,
    grad: Tensor,
    values: Tensor,
    col_offsets: Tensor,
    rows: Tensor,
    permutation: Tensor,
) -> Tensor:
    grad, values = grad.contiguous(), values.contiguous()
    (batch, m), (nnz,), k = grad.shape, values.shape, col_offsets.shape[0] - 1
    out = _empty_strided((batch, k), (k, 1), grad.dtype)
    if nnz == 0 or batch == 0 or k == 0:
        return out.zero_()
    start, address = values.data_ptr(), grad.data_ptr()
    aligned = (start | address) & 15 == 0
    plan = _plan(("spmm_transposed", m, k, nnz, batch, grad.dtype, device, aligned, None))
    structure = (col_offsets.data_ptr(), rows.data_ptr(), permutation.data_ptr())
    _launch(plan, (*structure, start, address, 0, out.data_ptr()), device)
    return out


def _sddmm(device: int, grad: Tensor, x: Tensor, row_offsets: Tensor, columns: Tensor) -> Tensor:
    grad, x = grad.contiguous(), x.contiguous()
    (batch, m), k, nnz = grad.shape, x.shape[1], bridge.index_length(columns)
    out = _empty_strided((nnz,), (1,), grad.dtype)
    if nnz == 0 or batch == 0:
        return out.zero_()
    left, right = grad.data_ptr(), x.data_ptr()
    aligned = (left | right) & 15 == 0
    plan = _plan(("sddmm", m, k, nnz, batch, grad.dtype, device, aligned, None))
    pointers = (row_offsets.data_ptr(), columns.data_ptr(), left, right, out.data_ptr())
    _launch(plan, pointers, device)
    return out


def _packed_rows(row_offsets: Tensor, nnz: int, m: int) -> Tensor:
    """Row of each entry, for the COO kernel: made at each call, for it is only a reference."""
    counts = row_offsets[1:] - row_offsets[:-1]
    entries = torch.arange(m, dtype=torch.int32, device=row_offsets.device)
    rows = torch.repeat_interleave(entries, counts, output_size=nnz)
    # Little-endian machines only, as CUDA's are: the low 16 bits come first.
    return rows.view(torch.int16)[::2].contiguous() if index_dtype(m).itemsize == 2 else rows


def _plan(key: tuple[Any, ...]) -> dispatch.Plan:
    """The plan of (op, m, k, nnz, batch, dtype, device index, aligned, kernel), kept."""
    plan = _plans.get(key)
    if plan is None:
        op, m, k, nnz, batch, dtype, device, aligned, kernel = key
        problem = dispatch.Problem(
            op,
            m,
            k,
            nnz,
            batch,
            _DTYPE_NAMES[dtype],
            index_dtype(k).name,
            index_dtype(m).name,
            True,
            aligned,
            kernel,
        )
        plan = dispatch.plan(problem, device)
        if len(_plans) >= 4096:
            _plans.clear()
        _plans[key] = plan
    return plan


def _launch(plan: dispatch.Plan, pointers: tuple[int, ...], device: int) -> None:
    if plan.workspace:
        workspace = _empty_strided((plan.workspace,), (1,), torch.uint8)
        pointers += (workspace.data_ptr(),)
    _jit.launch(plan, pointers, bridge.current_stream(device))
