"""What GPU tests share: arrays on the device, a kernel that only waits, tests lent by the CPU's."""

import functools
import inspect

import numpy as np

SPIN = r"""
extern "C" __global__ void spin(long long nanoseconds) {
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - start < nanoseconds);
}
"""


def put(array, skip=0):
    """A CuPy copy of a NumPy array, C-contiguous, ``skip`` elements into its allocation.

    bfloat16 travels as 16-bit words, so this needs nothing of CuPy's support for it.
    """
    import cupy

    array = np.asarray(array)
    words = array.view(np.uint16) if array.dtype.name == "bfloat16" else array
    memory = cupy.empty(skip + words.size, words.dtype)[skip:]
    memory[...] = cupy.asarray(np.ascontiguousarray(words).ravel())
    return memory.reshape(array.shape).view(array.dtype)


def poisoned(shape, dtype):
    """A CuPy array full of NaN: what an operation leaves out stays visible."""
    return put(np.full(shape, np.nan, dtype))


@functools.cache
def _spin_kernel():
    import cupy

    return cupy.RawKernel(SPIN, "spin")


def spin(milliseconds):
    """Occupy CuPy's current stream for a while."""
    _spin_kernel()((1,), (1,), (np.int64(milliseconds * 1_000_000),))


def tests_that_take_xp(*modules):
    """Tests of CPU modules that have the array module as their argument ``xp``, by name."""
    return {
        name: function
        for module in modules
        for name, function in vars(module).items()
        if name.startswith("test_") and "xp" in inspect.signature(function).parameters
    }
