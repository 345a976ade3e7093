"""Products by the dense form of a sparse matrix, where `snack_cupy.dispatch` chooses them.

The dense form is memory of PyTorch's allocator for one call, so that streams and CUDA graphs are
its business; the product is PyTorch's, so that its settings of precision hold.
"""

from __future__ import annotations

import torch
from torch import Tensor

from snack_cupy import _jit
from snack_cupy._plan import Plan
from snack_cupy._product import scratch_limit

SMALLEST_BATCH = 16  # a dense product has never won below


def allowed(x: Tensor, batch: int) -> tuple[int, bool]:
    """Bytes that the dense form may take, and whether PyTorch would multiply x in TF32."""
    if batch < SMALLEST_BATCH:
        return 0, False
    return scratch_limit(), x.dtype is torch.float32 and tf32_allowed()


def tf32_allowed() -> bool:
    """Whether PyTorch's settings allow TF32 in products of float32 matrices on the GPU."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


@torch.no_grad()
def multiply(
    plan: Plan,
    pointers: tuple[int, ...],
    shape: tuple[int, int],
    x: Tensor,
    bias: Tensor | None,
    out: Tensor,
) -> None:
    """``out = x @ W.T + bias``; ``shape`` is that of W, which ``pointers`` give."""
    dense = torch.empty(shape, dtype=x.dtype, device=x.device)
    _launch(plan, pointers, dense)
    # With `out` autocast leaves the operands as they are.
    if bias is None:
        torch.mm(x, dense.t(), out=out)
    else:
        torch.addmm(bias, x, dense.t(), out=out)


@torch.no_grad()
def sample(plan: Plan, pointers: tuple[int, ...], left: Tensor, right: Tensor) -> None:
    """The entries of ``left.T @ right`` that ``pointers`` tell, to where they tell."""
    dense = torch.empty((left.shape[1], right.shape[1]), dtype=left.dtype, device=left.device)
    torch.mm(left.t(), right, out=dense)
    _launch(plan, pointers, dense)


def _launch(plan: Plan, pointers: tuple[int, ...], dense: Tensor) -> None:
    """On the current stream of the current device, that of ``dense``."""
    stream = torch._C._cuda_getCurrentRawStream(dense.get_device())
    _jit.launch(plan, (*pointers, dense.data_ptr()), stream)
