"""The operations as ``torch.ops.snack_cupy.*``: definition, CPU and CUDA code, shapes for tracing.

All are batch-major. Index arrays arrive as `snack_cupy.torch.bridge.Structure` holds them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from snack_cupy import dispatch, reference
from snack_cupy._structure import index_dtype
from snack_cupy._structure import transpose as transpose_arrays
from snack_cupy._xp import Array
from snack_cupy.torch import bridge, product

_library = torch.library.Library("snack_cupy", "DEF")
_library.define(
    "spmm(Tensor x, Tensor values, Tensor? bias, Tensor row_offsets, Tensor columns,"
    " str? algorithm=None) -> Tensor",  # TorchInductor takes `kernel` for itself
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "spmm_transposed(Tensor grad, Tensor values, Tensor col_offsets, Tensor rows,"
    " Tensor permutation) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "sddmm(Tensor grad, Tensor x, Tensor row_offsets, Tensor columns) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)

_library.define(
    "transpose(Tensor row_offsets, Tensor columns, int k) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)

spmm = torch.ops.snack_cupy.spmm.default
spmm_transposed = torch.ops.snack_cupy.spmm_transposed.default
sddmm = torch.ops.snack_cupy.sddmm.default
transpose = torch.ops.snack_cupy.transpose.default


@torch.library.register_fake("snack_cupy::spmm", lib=_library)
def _spmm_fake(
    x: Tensor,
    values: Tensor,
    bias: Tensor | None,
    row_offsets: Tensor,
    columns: Tensor,
    algorithm: str | None = None,
) -> Tensor:
    return x.new_empty((x.shape[0], row_offsets.shape[0] - 1))


@torch.library.register_fake("snack_cupy::spmm_transposed", lib=_library)
def _spmm_transposed_fake(
    grad: Tensor, values: Tensor, col_offsets: Tensor, rows: Tensor, permutation: Tensor
) -> Tensor:
    return grad.new_empty((grad.shape[0], col_offsets.shape[0] - 1))


@torch.library.register_fake("snack_cupy::sddmm", lib=_library)
def _sddmm_fake(grad: Tensor, x: Tensor, row_offsets: Tensor, columns: Tensor) -> Tensor:
    return grad.new_empty((bridge.index_length(columns),))


@torch.library.register_fake("snack_cupy::transpose", lib=_library)
def _transpose_fake(row_offsets: Tensor, columns: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    nnz = bridge.index_length(columns)
    narrow = index_dtype(row_offsets.shape[0] - 1).itemsize == 2
    length, dtype = (2 * nnz, torch.uint8) if narrow else (nnz, torch.int32)
    rows = columns.new_empty((length,), dtype=dtype)
    return row_offsets.new_empty((k + 1,)), rows, row_offsets.new_empty((nnz,))


# CUDA: one torch.empty, raw pointers, one launch on PyTorch's current stream.

_DTYPE_NAMES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
_plans: dict[tuple, dispatch.Plan] = {}


def _plan(key: tuple) -> dispatch.Plan:
    """The plan of these: op, sizes, dtype, device, alignment, kernel, scratch limit, TF32; kept."""
    plan = _plans.get(key)
    if plan is None:
        op, m, k, nnz, batch, dtype, device, aligned, kernel, scratch, tf32 = key
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
            scratch,
            tf32,
        )
        plan = dispatch.plan(problem, device)
        if len(_plans) >= 4096:
            _plans.clear()
        _plans[key] = plan
    return plan


def _launch(plan: dispatch.Plan, pointers: tuple[int, ...], device: int) -> None:
    if plan.workspace:
        workspace = torch.empty(plan.workspace, dtype=torch.uint8, device=f"cuda:{device}")
        pointers += (workspace.data_ptr(),)
    bridge.launch(plan, pointers, device)


@torch.library.impl("snack_cupy::spmm", "CUDA", lib=_library)
def _spmm_cuda(
    x: Tensor,
    values: Tensor,
    bias: Tensor | None,
    row_offsets: Tensor,
    columns: Tensor,
    algorithm: str | None = None,
) -> Tensor:
    x, values = x.contiguous(), values.contiguous()
    batch, k = x.shape
    m, nnz, device = row_offsets.shape[0] - 1, values.shape[0], x.get_device()
    y = torch.empty((batch, m), dtype=x.dtype, device=x.device)
    if nnz == 0 or batch == 0 or m == 0:
        return y.zero_() if bias is None else y.copy_(bias.expand(batch, m))
    start, address = values.data_ptr(), x.data_ptr()
    offset, first = 0, row_offsets
    if bias is not None:
        bias = bias.contiguous()
        offset = bias.data_ptr()
    if algorithm == "snack_coo":
        first = _packed_rows(row_offsets, nnz, m)
    entries = columns.data_ptr()
    aligned = (start | address | entries) & 15 == 0
    key = ("spmm", m, k, nnz, batch, x.dtype, device, aligned, algorithm)
    plan = _plan(key + product.allowed(x, batch))
    pointers = (first.data_ptr(), entries, 0, start, address, offset, y.data_ptr())
    if plan.product:
        product.multiply(plan, pointers, (m, k), x, bias, y)
    else:
        _launch(plan, pointers, device)
    return y


@torch.library.impl("snack_cupy::spmm_transposed", "CUDA", lib=_library)
def _spmm_transposed_cuda(
    grad: Tensor, values: Tensor, col_offsets: Tensor, rows: Tensor, permutation: Tensor
) -> Tensor:
    grad, values = grad.contiguous(), values.contiguous()
    batch, m = grad.shape
    k, nnz, device = col_offsets.shape[0] - 1, values.shape[0], grad.get_device()
    out = torch.empty((batch, k), dtype=grad.dtype, device=grad.device)
    if nnz == 0 or batch == 0 or k == 0:
        return out.zero_()
    start, address = values.data_ptr(), grad.data_ptr()
    entries = rows.data_ptr()
    aligned = (start | address | entries) & 15 == 0
    key = ("spmm_transposed", m, k, nnz, batch, grad.dtype, device, aligned, None)
    plan = _plan(key + product.allowed(grad, batch))
    pointers = (
        col_offsets.data_ptr(),
        entries,
        permutation.data_ptr(),
        start,
        address,
        0,
        out.data_ptr(),
    )
    if plan.product:
        product.multiply(plan, pointers, (k, m), grad, None, out)
    else:
        _launch(plan, pointers, device)
    return out


@torch.library.impl("snack_cupy::sddmm", "CUDA", lib=_library)
def _sddmm_cuda(grad: Tensor, x: Tensor, row_offsets: Tensor, columns: Tensor) -> Tensor:
    grad, x = grad.contiguous(), x.contiguous()
    (batch, m), k = grad.shape, x.shape[1]
    nnz, device = bridge.index_length(columns), grad.get_device()
    out = torch.empty((nnz,), dtype=grad.dtype, device=grad.device)
    if nnz == 0 or batch == 0:
        return out.zero_()
    left, right = grad.data_ptr(), x.data_ptr()
    entries = columns.data_ptr()
    aligned = (left | right | entries) & 15 == 0
    key = ("sddmm", m, k, nnz, batch, grad.dtype, device, aligned, None)
    plan = _plan(key + product.allowed(grad, batch))
    pointers = (row_offsets.data_ptr(), entries, left, right, out.data_ptr())
    if plan.product:
        product.sample(plan, pointers, grad, x)
    else:
        _launch(plan, pointers, device)
    return out


def _packed_rows(row_offsets: Tensor, nnz: int, m: int) -> Tensor:
    """Row of each entry, for the COO kernel: made at each call, for it is only a reference."""
    counts = row_offsets[1:] - row_offsets[:-1]
    entries = torch.arange(m, dtype=torch.int32, device=row_offsets.device)
    rows = torch.repeat_interleave(entries, counts, output_size=nnz)
    # Little-endian machines only, as CUDA's are: the low 16 bits come first.
    return rows.view(torch.int16)[::2].contiguous() if index_dtype(m).itemsize == 2 else rows


# The column-major view (col_offsets, rows, permutation): an operation so that a compiled forward
# may build it. On every device the array code does it; tensors of its own come out.


@torch.library.impl("snack_cupy::transpose", ("CPU", "CUDA"), lib=_library)
def _transpose(row_offsets: Tensor, columns: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    with bridge.array_scope(row_offsets.device):
        view = transpose_arrays(
            bridge.to_array(row_offsets),
            bridge.index_to_array(columns),
            (row_offsets.shape[0] - 1, k),
        )
        return (
            bridge.to_tensor(view.col_offsets).clone(),
            bridge.index_to_tensor(view.rows).clone(),
            bridge.to_tensor(view.permutation).clone(),
        )


# CPU: the SciPy twins on the tensors' own memory.


def _numpy(tensor: Tensor) -> Array:
    """NumPy view; bfloat16 is widened to float32, which SciPy's sums would do anyway."""
    return (
        tensor.detach().float().numpy()
        if tensor.dtype is torch.bfloat16
        else (tensor.detach().numpy())
    )


@torch.library.impl("snack_cupy::spmm", "CPU", lib=_library)
def _spmm_cpu(
    x: Tensor,
    values: Tensor,
    bias: Tensor | None,
    row_offsets: Tensor,
    columns: Tensor,
    algorithm: str | None = None,
) -> Tensor:
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


@torch.library.impl("snack_cupy::spmm_transposed", "CPU", lib=_library)
def _spmm_transposed_cpu(
    grad: Tensor, values: Tensor, col_offsets: Tensor, rows: Tensor, permutation: Tensor
) -> Tensor:
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


@torch.library.impl("snack_cupy::sddmm", "CPU", lib=_library)
def _sddmm_cpu(grad: Tensor, x: Tensor, row_offsets: Tensor, columns: Tensor) -> Tensor:
    out = reference.sddmm(
        row_offsets.numpy(),
        bridge.index_to_array(columns),
        _numpy(grad),
        _numpy(x),
        batch_major=True,
    )
    return torch.from_numpy(out).to(grad.dtype)
