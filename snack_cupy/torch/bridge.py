"""Between PyTorch tensors and NumPy/CuPy arrays: shared memory, streams, allocations.

Arrays are handed over without a copy (NumPy views on the CPU, DLPack on the GPU). Index arrays of
16 bits travel as ``torch.uint8`` tensors of twice the length, because ``torch.uint16`` lacks most
operations and DistributedDataParallel refuses it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from snack_cupy import _jit
from snack_cupy._check import fail
from snack_cupy._xp import Array, dtype_name, is_array, is_numpy
from snack_cupy.topology import Topology


def to_array(tensor: torch.Tensor) -> Array:
    """The tensor's memory as a NumPy (CPU) or CuPy (CUDA) array.

    Parameters
    ----------
    tensor : torch.Tensor
        On the CPU or a CUDA device, any strides. bfloat16 needs the package ml_dtypes.

    Returns
    -------
    array of the same shape, dtype and memory

    Raises
    ------
    TypeError
        ``tensor`` is no tensor.
    ValueError
        The tensor lives on another kind of device, or is one of PyTorch's sparse tensors.
    ImportError
        The tensor is bfloat16 and ml_dtypes is missing.
    CudaUnavailableError
        The tensor is on a GPU and CuPy is missing.
    """
    if not isinstance(tensor, torch.Tensor):
        fail("to_array", "tensor", "be a tensor", type(tensor).__name__, TypeError)
    if tensor.layout is not torch.strided:
        fail("to_array", "tensor", "be dense (strided)", tensor.layout)
    tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16:
        import ml_dtypes

        return to_array(tensor.view(torch.int16)).view(ml_dtypes.bfloat16)
    if tensor.device.type == "cpu":
        return tensor.numpy()
    if tensor.device.type != "cuda":
        fail("to_array", "tensor", "be on the CPU or a CUDA device", tensor.device)
    return _jit.require_cupy().from_dlpack(tensor)


def to_tensor(array: Array) -> torch.Tensor:
    """The memory of a NumPy or CuPy array as a tensor; the inverse of `to_array`.

    Parameters
    ----------
    array : NumPy or CuPy array
        Of a dtype that PyTorch has, bfloat16 included.

    Returns
    -------
    tensor of the same shape, dtype and memory

    Raises
    ------
    TypeError
        ``array`` is neither a NumPy nor a CuPy array.
    """
    if not is_array(array):
        fail("to_tensor", "array", "be a NumPy or CuPy array", type(array).__name__, TypeError)
    if dtype_name(array) == "bfloat16":
        return to_tensor(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array) if is_numpy(array) else torch.from_dlpack(array)


def index_to_tensor(array: Array) -> torch.Tensor:
    """An index array (uint16 or int32) as the tensor that stores it: uint8 or int32."""
    return to_tensor(array.view(np.uint8) if array.dtype == np.uint16 else array)


def index_to_array(tensor: torch.Tensor) -> Array:
    """The inverse of `index_to_tensor`."""
    array = to_array(tensor)
    return array.view(np.uint16) if tensor.dtype is torch.uint8 else array


def index_name(tensor: torch.Tensor) -> str:
    """Dtype name of the indices stored in ``tensor``: "uint16" or "int32"."""
    return "uint16" if tensor.dtype is torch.uint8 else "int32"


def index_length(tensor: torch.Tensor) -> int:
    """Number of indices stored in ``tensor``."""
    return tensor.shape[0] // 2 if tensor.dtype is torch.uint8 else tensor.shape[0]


def unpack_indices(tensor: torch.Tensor) -> torch.Tensor:
    """The indices stored in ``tensor`` as int32, the portable form of checkpoints."""
    if tensor.dtype is torch.uint8:
        return tensor.view(torch.int16).to(torch.int32) & 0xFFFF
    return tensor


def address(array: Array) -> int:
    """Address of an array's first element."""
    return array.ctypes.data if is_numpy(array) else int(array.data.ptr)


class Structure(NamedTuple):
    """The arrays of a `Topology` as tensors; the column-major view is None until needed.

    ``owner`` is the topology whose memory they share, where an update may write it behind PyTorch's
    back: the tensors' versions tell nothing then, and its own is watched.
    """

    row_offsets: torch.Tensor
    columns: torch.Tensor
    col_offsets: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    permutation: torch.Tensor | None = None
    owner: Topology | None = None


_structures: weakref.WeakKeyDictionary[Topology, tuple[int, Structure]] = (
    weakref.WeakKeyDictionary()
)


def structure_of(topology: Topology, *, transposed: bool) -> Structure:
    """The tensors of a topology, sharing its memory, made once per version of it."""
    version, structure = _structures.get(topology, (-1, None))
    if structure is None or version != topology.version:
        structure = Structure(to_tensor(topology.row_offsets), index_to_tensor(topology.columns))
    if transposed and structure.permutation is None:
        view = topology.transposed
        structure = structure._replace(
            col_offsets=to_tensor(view.col_offsets),
            rows=index_to_tensor(view.rows),
            permutation=to_tensor(view.permutation),
        )
    _structures[topology] = (topology.version, structure)
    return structure._replace(owner=topology)  # not kept: the cache holds topologies weakly


def _allocate(size: int) -> Any:
    """A CuPy allocator that takes its memory from PyTorch's."""
    import cupy

    block = torch.empty(max(size, 1), dtype=torch.uint8, device="cuda")
    memory = cupy.cuda.UnownedMemory(block.data_ptr(), size, block, block.device.index)
    return cupy.cuda.MemoryPointer(memory, 0)


@contextlib.contextmanager
def array_scope(device: torch.device) -> Iterator[None]:
    """Run array code as PyTorch would: its device, its current stream, its allocator.

    On the CPU it does nothing.
    """
    if device.type != "cuda":
        yield
        return
    cupy = _jit.require_cupy()
    with torch.cuda.device(device):
        stream = cupy.cuda.Stream.from_external(torch.cuda.current_stream(device))
        with cupy.cuda.Device(torch.cuda.current_device()), stream:
            with cupy.cuda.using_allocator(_allocate):
                yield
