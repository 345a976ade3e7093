"""Launches outside the products: one workspace for several kernels, on CuPy's current stream.

NumPy arrays take the same way where `snack_cupy._jit.compile_instance` is that of the tests'
emulator; the library itself comes here with CuPy arrays only.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from snack_cupy._xp import Array, get_array_module, is_cupy, is_numpy
from snack_cupy.kernels import Kernel

THREADS = 256
_ALIGNMENT = 256


@functools.cache
def _function(kernel: Kernel, device: int, values: tuple[tuple[str, Any], ...]) -> Any:
    return kernel.get(device, **dict(values))


class Work:
    """Where kernels are launched: the device of some array, which must be current, and a stream."""

    def __init__(self, like: Array) -> None:
        self.xp = get_array_module(like)
        self.device = 0 if is_numpy(like) else int(like.device.id)
        self.stream = 0 if is_numpy(like) else self.xp.cuda.get_current_stream().ptr

    def launch(
        self,
        kernel: Kernel,
        blocks: int,
        sizes: tuple[int, ...],
        *pointers: int,
        threads: int = THREADS,
        cooperative: bool = False,
        **values: Any,
    ) -> None:
        """Blocks of one instance; sizes come first, all 8 bytes wide.

        ``cooperative``: all of them run at the same time, or the launch fails.
        """
        if blocks == 0:
            return
        function = _function(kernel, self.device, tuple(values.items()))
        function((blocks,), (threads,), sizes + pointers, 0, self.stream, cooperative)


class Workspace:
    """Device memory in named parts, laid out first and then allocated once; some start at zero."""

    def __init__(self) -> None:
        self._parts: dict[str, int] = {}
        self._bytes = self._zeroed = 0
        self._address = 0
        self._memory: Array = None

    def add(self, name: str, size: int, *, zero: bool = False) -> None:
        """A part of ``size`` bytes; those that start at zero are added first."""
        assert not zero or self._zeroed == self._bytes
        self._parts[name] = self._bytes
        self._bytes += -(-size // _ALIGNMENT) * _ALIGNMENT
        if zero:
            self._zeroed = self._bytes

    def allocate(self, work: Work) -> None:
        """Take the memory from the current allocator and clear it on the current stream."""
        self._memory = work.xp.empty(self._bytes, np.uint8)
        self._address = pointer(self._memory)
        if not is_numpy(self._memory):
            self._memory.data.memset_async(0, self._zeroed)
        else:
            self._memory[: self._zeroed] = 0

    def __getitem__(self, name: str) -> int:
        """Address of a part."""
        return self._address + self._parts[name]


def runs_kernels(array: Array) -> bool:
    """Whether kernels of the library can work on ``array``: memory of a CUDA device."""
    return is_cupy(array) and hasattr(array.data, "ptr")


def pointer(array: Array | None) -> int:
    """Address of an array's first element; 0 for None."""
    if array is None:
        return 0
    return int(array.ctypes.data if is_numpy(array) else array.data.ptr)


def ceil_div(a: int, b: int) -> int:
    """``a / b``, rounded up."""
    return -(-a // b)
