"""Which kernel runs, and how: pure choices from sizes and dtypes, made concrete by `plan`.

`choose_spmm` and `choose_sddmm` need no GPU and are tested without one. `plan` compiles the chosen
kernels and keeps the result, so that a repeated call costs one dictionary look-up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

from snack_cupy import kernels
from snack_cupy._check import fail
from snack_cupy.kernels import Kernel

BLOCK = 256
WARPS = BLOCK // 32
SPMM_KERNELS = ("csr", "snack_coo")
NON_DETERMINISTIC = ("snack_coo",)


class Problem(NamedTuple):
    """What a choice depends on; ``n`` is the batch, or the number of dense columns.

    ``op`` is "spmm", "spmm_transposed" or "sddmm". ``m, k`` are the sizes of the stored matrix.
    ``index`` and ``row_index`` are the dtypes of its column indices and of the row indices of its
    column-major view. ``aligned``: dense operands start on 16-byte boundaries.
    """

    op: str
    m: int
    k: int
    nnz: int
    n: int
    dtype: str
    index: str
    row_index: str
    batch_major: bool
    aligned: bool = True
    kernel: str | None = None


class Choice(NamedTuple):
    """A kernel, the template values it is compiled with, and the reason for both."""

    kernel: Kernel
    values: dict[str, Any]
    reason: str


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
    """The launches of one operation; `snack_cupy._jit.launch` runs them."""

    steps: tuple[Step, ...]
    choices: tuple[Choice, ...] = field(default=())


def choose_spmm(problem: Problem) -> Choice:
    """Kernel for ``spmm`` or ``spmm_transposed`` (the same kernels on the column-major view)."""
    permuted = problem.op == "spmm_transposed"
    index = problem.row_index if permuted else problem.index
    if problem.kernel == "snack_coo":
        values = {"T": problem.dtype, "R": problem.row_index, "I": problem.index}
        return Choice(kernels.SNACK_COO, values, "asked for: SNACK's COO kernel with atomics")
    values = {"T": problem.dtype, "I": index, "kPermuted": permuted}
    if problem.batch_major or problem.n == 1:
        # Rows of X held in registers by a warp: as many as the batch fills, at most 8.
        batch = 1 if problem.n == 1 else 4 if problem.n <= 4 else 8
        reason = f"batch-major: a warp per row and {batch} batch rows"
        return Choice(kernels.SPMM_BATCH_MAJOR, {**values, "kBatch": batch}, reason)
    # A lane moves 4 neighbouring columns where rows of D keep the alignment of a 4-element pack.
    vec = 4 if problem.aligned and problem.n % 4 == 0 else 1
    reason = f"feature-major: a warp per row and {32 * vec} columns"
    return Choice(kernels.SPMM_FEATURE_MAJOR, {**values, "kVec": vec}, reason)


def choose_sddmm(problem: Problem) -> Choice:
    """Kernel for ``sddmm``."""
    values = {"T": problem.dtype, "I": problem.index}
    if problem.batch_major or problem.n == 1:
        reason = "batch-major: a lane per entry"
        return Choice(kernels.SDDMM_BATCH_MAJOR, values, reason)
    return Choice(kernels.SDDMM_FEATURE_MAJOR, values, "feature-major: a warp per entry")


def plan(problem: Problem, device: int) -> Plan:
    """The launches that solve ``problem`` on CUDA device ``device``, compiled and ready.

    Pointers go to `snack_cupy._jit.launch` in this order, 0 for what is absent:

    - ``spmm``: row_offsets, columns, 0, values, dense, bias, out
    - ``spmm_transposed``: col_offsets, rows, permutation, values, dense, 0, out
    - ``sddmm``: row_offsets, columns, left, right, out
    - ``spmm`` by "snack_coo": rows, columns, 0, values, dense, bias, out
    """
    # lru_cache on the NamedTuple itself would hash all its strings at each call as well; this
    # wrapper exists to give the cached function its documentation and a place to be patched.
    return _plan(problem, device)


@functools.lru_cache(maxsize=4096)
def _plan(problem: Problem, device: int) -> Plan:
    if problem.op == "sddmm":
        choice = choose_sddmm(problem)
        sizes = (problem.m, problem.k, problem.n)
        return Plan((_step(choice, problem.m, sizes, device),), (choice,))
    choice = choose_spmm(problem)
    if choice.kernel is kernels.SNACK_COO:
        return _plan_snack_coo(problem, choice, device)
    m, k = (problem.m, problem.k) if problem.op == "spmm" else (problem.k, problem.m)
    width = choice.values.get("kBatch") or 32 * choice.values["kVec"]
    warps = m * -(-problem.n // width)
    return Plan((_step(choice, warps, (m, k, problem.n), device),), (choice,))


def _step(choice: Choice, warps: int, sizes: tuple[int, ...], device: int) -> Step:
    """A launch of ``warps`` warps in one-dimensional blocks."""
    blocks = -(-warps // WARPS)
    if blocks >= 2**31:
        fail(choice.kernel.name, "problem", "need fewer than 2^31 thread blocks", blocks)
    function = choice.kernel.get(device, **choice.values)
    return Step(function, (blocks,), (BLOCK,), sizes)


def _plan_snack_coo(problem: Problem, choice: Choice, device: int) -> Plan:
    fill = Choice(kernels.FILL_ROWS, {"T": problem.dtype}, "the atomics add to bias or zero")
    fill_warps = -(-problem.m * problem.n // 32)
    fill_step = _step(fill, fill_warps, (problem.m, problem.n), device)
    blocks_per_row = -(-problem.nnz // BLOCK)
    sizes = (problem.m, problem.k, problem.nnz, blocks_per_row)
    scatter = _step(choice, blocks_per_row * WARPS * problem.n, sizes, device)
    steps = (
        Step(fill_step.function, fill_step.grid, fill_step.block, fill_step.sizes, itemgetter(5, 6)),
        Step(
            scatter.function, scatter.grid, scatter.block, scatter.sizes, itemgetter(0, 1, 3, 4, 6)
        ),
    )
    return Plan(steps, (fill, choice))
