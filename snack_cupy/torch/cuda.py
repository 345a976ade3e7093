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
from snack_cupy._structure import index_dtype
from snack_cupy.torch import bridge, scratch

DTYPE_NAMES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
# As torch.empty on the current device, without the dispatcher: what TorchInductor's code calls.
_empty_strided: Any = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]
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
            return spmm_here(device, x, values, bias, row_offsets, columns, algorithm)
    return spmm_here(device, x, values, bias, row_offsets, columns, algorithm)


def spmm_transposed(
    grad: Tensor, values: Tensor, col_offsets: Tensor, rows: Tensor, permutation: Tensor
) -> Tensor:
    """``grad @ W``: grad (batch, m), values (nnz,), result (batch, k)."""
    device = grad.get_device()
    if device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            return spmm_transposed_here(device, grad, values, col_offsets, rows, permutation)
    return spmm_transposed_here(device, grad, values, col_offsets, rows, permutation)


def sddmm(grad: Tensor, x: Tensor, row_offsets: Tensor, columns: Tensor) -> Tensor:
    """Entries of ``grad.T @ x``: grad (batch, m), x (batch, k), result (nnz,)."""
    device = grad.get_device()
    if device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            return sddmm_here(device, grad, x, row_offsets, columns)
    return sddmm_here(device, grad, x, row_offsets, columns)


# The same where ``device``, that of all tensors, is the current one.


def spmm_here(
    device: int,
    x: Tensor,
    values: Tensor,
    bias: Tensor | None,
    row_offsets: Tensor,
    columns: Tensor,
    algorithm: str | None = None,
) -> Tensor:
    """`spmm` on the current device."""
    x, values = x.contiguous(), values.contiguous()
    (batch, k), (nnz,), m = x.shape, values.shape, row_offsets.shape[0] - 1
    dtype = x.dtype
    y = _empty_strided((batch, m), (m, 1), dtype)
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
    key = ("spmm", m, k, nnz, batch, dtype, device, aligned, algorithm, *scratch.allowed(x, batch))
    plan = _plans.get(key) or _make_plan(key)
    pointers = (first.data_ptr(), entries, 0, start, address, offset, y.data_ptr())
    if plan.product:
        scratch.multiply(plan, pointers, (m, k), x, bias, y)
    else:
        _launch(plan, pointers, device)
    return y


def spmm_transposed_here(
    device: int,
    grad: Tensor,
    values: Tensor,
    col_offsets: Tensor,
    rows: Tensor,
    permutation: Tensor,
) -> Tensor:
    """`spmm_transposed` on the current device."""
    grad, values = grad.contiguous(), values.contiguous()
    (batch, m), (nnz,), k = grad.shape, values.shape, col_offsets.shape[0] - 1
    dtype = grad.dtype
    out = _empty_strided((batch, k), (k, 1), dtype)
    if nnz == 0 or batch == 0 or k == 0:
        return out.zero_()
    start, address = values.data_ptr(), grad.data_ptr()
    structure = (col_offsets.data_ptr(), rows.data_ptr(), permutation.data_ptr())
    aligned = (start | address | structure[1]) & 15 == 0
    may = scratch.allowed(grad, batch)
    key = ("spmm_transposed", m, k, nnz, batch, dtype, device, aligned, None, *may)
    plan = _plans.get(key) or _make_plan(key)
    pointers = (*structure, start, address, 0, out.data_ptr())
    if plan.product:
        scratch.multiply(plan, pointers, (k, m), grad, None, out)
    else:
        _launch(plan, pointers, device)
    return out


def sddmm_here(
    device: int, grad: Tensor, x: Tensor, row_offsets: Tensor, columns: Tensor
) -> Tensor:
    """`sddmm` on the current device."""
    grad, x = grad.contiguous(), x.contiguous()
    (batch, m), k, nnz = grad.shape, x.shape[1], bridge.index_length(columns)
    dtype = grad.dtype
    out = _empty_strided((nnz,), (1,), dtype)
    if nnz == 0 or batch == 0:
        return out.zero_()
    left, right, entries = grad.data_ptr(), x.data_ptr(), columns.data_ptr()
    aligned = (left | right | entries) & 15 == 0
    key = ("sddmm", m, k, nnz, batch, dtype, device, aligned, None, *scratch.allowed(grad, batch))
    plan = _plans.get(key) or _make_plan(key)
    pointers = (row_offsets.data_ptr(), entries, left, right, out.data_ptr())
    if plan.product:
        scratch.sample(plan, pointers, grad, x)
    else:
        _launch(plan, pointers, device)
    return out


def _launch(plan: dispatch.Plan, pointers: tuple[int, ...], device: int) -> None:
    if plan.workspace:
        workspace = _empty_strided((plan.workspace,), (1,), torch.uint8)
        pointers += (workspace.data_ptr(),)
    _jit.launch(plan, pointers, torch._C._cuda_getCurrentRawStream(device))


def _make_plan(key: tuple[Any, ...]) -> dispatch.Plan:
    """The plan of (op, m, k, nnz, batch, dtype, device, aligned, kernel, scratch, tf32), kept."""
    op, m, k, nnz, batch, dtype, device, *options = key
    name, index, row_index = DTYPE_NAMES[dtype], index_dtype(k).name, index_dtype(m).name
    problem = dispatch.Problem(op, m, k, nnz, batch, name, index, row_index, True, *options)
    plan = dispatch.plan(problem, device)
    if len(_plans) >= 4096:
        _plans.clear()
    _plans[key] = plan
    return plan


def _packed_rows(row_offsets: Tensor, nnz: int, m: int) -> Tensor:
    """Row of each entry, for the COO kernel: made at each call, for it is only a reference."""
    counts = row_offsets[1:] - row_offsets[:-1]
    entries = torch.arange(m, dtype=torch.int32, device=row_offsets.device)
    rows = torch.repeat_interleave(entries, counts, output_size=nnz)
    # Little-endian machines only, as CUDA's are: the low 16 bits come first.
    return rows.view(torch.int16)[::2].contiguous() if index_dtype(m).itemsize == 2 else rows
