"""The words of dispatch: a problem, a choice of kernel for it, and the plan of its launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from snack_cupy._cost import Slicing
from snack_cupy.kernels import Kernel

ITEM_BYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}


class Problem(NamedTuple):
    """What a choice depends on; ``n`` is the batch, or the number of dense columns.

    ``op`` is "spmm", "spmm_transposed" or "sddmm". ``m, k`` are the sizes of the stored matrix.
    ``index`` and ``row_index`` are the dtypes of its column indices and of the row indices of its
    column-major view. ``aligned``: values, columns and dense operands start on 16-byte boundaries.
    ``scratch``: bytes that the dense form of the matrix may take for a product of the dense
    library, 0 to forbid it; ``tf32``: whether that may round float32 operands to TF32.
    """

    op: str
    m: int
    k: int
    nnz: int
    n: int
    dtype: str
    index: str  # type: ignore[assignment]  # hides tuple.index
    row_index: str
    batch_major: bool
    aligned: bool = True
    kernel: str | None = None
    scratch: int = 0
    tf32: bool = False


class Device(NamedTuple):
    """What a choice depends on of a CUDA device; ``shared_bytes`` is what one block may have."""

    multiprocessors: int
    shared_bytes: int


H200 = Device(multiprocessors=132, shared_bytes=227 * 1024)


class Choice(NamedTuple):
    """A kernel, the template values it is compiled with, and the reason for both.

    ``slicing`` says how the kernels that hold X in shared memory slice by slice cut their work,
    ``microseconds`` what it is expected to take on an H200, where that was fitted. ``product``: the
    kernel goes between the sparse matrix and its dense form, by which the dense library multiplies.
    """

    kernel: Kernel
    values: dict[str, Any]
    reason: str
    slicing: Slicing | None = None
    microseconds: float | None = None
    product: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One kernel launch: sizes are passed first, then the pointers picked by ``select``."""

    function: Any
    grid: tuple[int, ...]
    block: tuple[int, ...]
    sizes: tuple[int, ...]
    select: Callable[[tuple[int, ...]], tuple[int, ...]] | None = None
    shared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """The launches of one operation; `snack_cupy._jit.launch` runs them.

    ``workspace`` is the number of bytes they need for partial sums; with ``product`` for the dense
    form of the matrix, by which the caller multiplies: after the launches, for "sddmm" before them.
    """

    steps: tuple[Step, ...]
    choices: tuple[Choice, ...] = field(default=())
    workspace: int = 0
    product: bool = False
