"""Truly sparse neural networks on the GPU: only the non-zero connections exist.

The core works on NumPy and CuPy arrays and imports neither CuPy nor PyTorch by itself; the PyTorch
layer is ``import snack_cupy.torch``.
"""

from snack_cupy._explain import explain
from snack_cupy._jit import CompileError, CudaUnavailableError
from snack_cupy._joining import concatenate, kron, stack
from snack_cupy._product import scratch_limit, set_scratch_limit
from snack_cupy.construct import diag, eye
from snack_cupy.coo import COOTensor
from snack_cupy.ops import sddmm, spmm, spmm_transposed, warmup
from snack_cupy.topology import Topology

__version__ = "0.1.0"

__all__ = [
    "COOTensor",
    "CompileError",
    "CudaUnavailableError",
    "Topology",
    "__version__",
    "concatenate",
    "diag",
    "explain",
    "eye",
    "kron",
    "scratch_limit",
    "sddmm",
    "set_scratch_limit",
    "spmm",
    "spmm_transposed",
    "stack",
    "warmup",
]
