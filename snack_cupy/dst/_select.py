"""Selection of the smallest magnitudes on the device: the launches of ``cuda/select.cu``."""

from __future__ import annotations

from snack_cupy import kernels
from snack_cupy._device_work import THREADS, Work, Workspace, ceil_div, pointer
from snack_cupy._xp import Array, dtype_name

DIGIT = 11  # bits of a pass
SHARES = 1024  # blocks that look for the last one of equal keys, at most
STATE = 64  # bytes
_EACH = 8  # entries of a thread, at a time
_BLOCKS = 512  # enough to fill a GPU; each one ends with its histogram


def digits(bits: int) -> list[tuple[int, int]]:
    """(shift, width) of each pass over keys of so many bits, from the highest."""
    passes = []
    while bits > 0:
        width = min(DIGIT, bits)
        bits -= width
        passes.append((bits, width))
    return passes


def key_bits(itemsize: int) -> int:
    """Bits of a magnitude."""
    return 8 * itemsize - 1


def add_parts(space: Workspace, name: str, bits: int) -> None:
    """What one selection needs, all of it zeroed."""
    passes = len(digits(bits))
    space.add(f"{name}.state", STATE, zero=True)
    space.add(f"{name}.arrivals", 4 * (passes + 1), zero=True)
    space.add(f"{name}.histograms", passes * 4 << DIGIT, zero=True)
    space.add(f"{name}.counts", 4 * (SHARES + 1), zero=True)


def find_threshold(
    work: Work,
    space: Workspace,
    name: str,
    keys: int,
    count: int,
    n: int,
    dtype: str,
    bits: int,
    counted: int = 0,
) -> None:
    """Threshold of the ``n`` smallest of ``count`` keys at address ``keys``; 0 < n <= count.

    With ``counted``, the address of a number on the device, only so many of the keys are there.
    """
    blocks = min(ceil_div(count, THREADS * _EACH), _BLOCKS)
    for i, (shift, width) in enumerate(digits(bits)):
        work.launch(
            kernels.SELECT_DIGIT,
            blocks,
            (count, n, shift, width, int(i == 0)),
            counted,
            keys,
            space[f"{name}.state"],
            space[f"{name}.histograms"] + (i * 4 << DIGIT),
            space[f"{name}.arrivals"] + 4 * i,
            T=dtype,
        )


def select(work: Work, space: Workspace, name: str, values: Array, n: int) -> None:
    """Fill the state of a selection for the ``n`` entries of smallest magnitude; 0 < n <= nnz."""
    count, dtype = int(values.shape[0]), dtype_name(values)
    bits = key_bits(values.dtype.itemsize)
    find_threshold(work, space, name, pointer(values), count, n, dtype, bits)
    share = max(ceil_div(count, SHARES), THREADS * _EACH)
    work.launch(
        kernels.SELECT_CUTOFF,
        ceil_div(count, share),
        (count, share),
        pointer(values),
        space[f"{name}.state"],
        space[f"{name}.counts"],
        space[f"{name}.arrivals"] + 4 * len(digits(bits)),
        T=dtype,
    )


def smallest(values: Array, n: int) -> Array:
    """`snack_cupy.dst.smallest_magnitude` for 0 < n < nnz."""
    work, space = Work(values), Workspace()
    name = "drop"
    add_parts(space, name, key_bits(values.dtype.itemsize))
    space.allocate(work)
    values = work.xp.ascontiguousarray(values)
    select(work, space, name, values, n)
    count = int(values.shape[0])
    dropped = work.xp.empty(count, bool)
    work.launch(
        kernels.SELECT_MASK,
        ceil_div(count, THREADS),
        (count,),
        pointer(values),
        space[f"{name}.state"],
        pointer(dropped),
        T=dtype_name(values),
    )
    return dropped
