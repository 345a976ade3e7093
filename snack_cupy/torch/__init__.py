"""PyTorch layer of snack_cupy: sparse modules, operations on tensors, dynamic sparse training."""

from snack_cupy.torch.bridge import to_array, to_tensor
from snack_cupy.torch.functional import sddmm, spmm
from snack_cupy.torch.linear import SnackLinear
from snack_cupy.torch.restructuring import remap_optimizer_state
from snack_cupy.torch.training import SET, RigL
from snack_cupy.torch.weight import SparseWeight

__all__ = [
    "SET",
    "RigL",
    "SnackLinear",
    "SparseWeight",
    "remap_optimizer_state",
    "sddmm",
    "spmm",
    "to_array",
    "to_tensor",
]
