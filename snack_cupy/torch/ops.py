"""The operations as ``torch.ops.snack_cupy.*``: definitions, and shapes for tracing.

All are batch-major. Index arrays arrive as `snack_cupy.torch.bridge.Structure` holds them. The code
is that of `snack_cupy.torch.cpu` and `snack_cupy.torch.cuda`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from snack_cupy._structure import index_dtype
from snack_cupy._structure import transpose as transpose_arrays
from snack_cupy.torch import bridge, cpu, cuda

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

for _key, _products in (("CPU", cpu), ("CUDA", cuda)):
    for _name in ("spmm", "spmm_transposed", "sddmm"):
        _library.impl(_name, getattr(_products, _name), _key)


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
