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

from snack_cupy import _jit, kernels
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
    column-major view. ``aligned``: values, columns and dense operands start on 16-byte boundaries.
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


class Device(NamedTuple):
    """What a choice depends on of a CUDA device; ``shared_bytes`` is what one block may have."""

    multiprocessors: int
    shared_bytes: int


H200 = Device(multiprocessors=132, shared_bytes=227 * 1024)


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


def choose_spmm(problem: Problem, device: Device = H200) -> Choice:
    """Kernel for ``spmm`` or ``spmm_transposed`` (the same kernels on the column-major view)."""
    resident = _resident_batch(problem, device)
    if resident:
        values: dict[str, Any] = {"T": problem.dtype, "kBatch": resident}
        reason = f"X fits shared memory: a block holds {resident} batch rows"
        return Choice(kernels.SPMM_RESIDENT, values, reason)
    permuted = problem.op == "spmm_transposed"
    index = problem.row_index if permuted else problem.index
    if problem.kernel == "snack_coo":
        coo = {"T": problem.dtype, "R": problem.row_index, "I": problem.index}
        return Choice(kernels.SNACK_COO, coo, "asked for: SNACK's COO kernel with atomics")
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


def _resident_batch(problem: Problem, device: Device) -> int:
    """Batch rows a block of the resident kernel holds, or 0 where that kernel does not apply.

    Measured on an H200 in microseconds at 4096 x 4096, sparsity .9: 4.9, 10.4 and 15.4 at batch 1,
    8 and 16, and 25.5 at 32, where each 8 rows read W again. With few rows of W (768 x 3072) tiles
    of 4 rows on twice the blocks win: 5.2 against 7.0 at batch 8.
    """
    batch_major = problem.batch_major or problem.n == 1
    chosen = problem.op == "spmm" and problem.kernel is None
    applies = chosen and batch_major and problem.aligned and problem.index == "uint16"
    if not applies or problem.dtype == "float64":
        return 0
    widest = 8 if problem.m > 8 * device.multiprocessors or problem.n > 16 else 4
    fitting = device.shared_bytes // (4 * (problem.k + 1))
    batch = widest
    while batch > fitting or (batch > 1 and batch // 2 >= problem.n):
        batch //= 2
    return batch


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
    return _plan(problem, device)


@functools.lru_cache(maxsize=4096)
def _plan(problem: Problem, device: int) -> Plan:
    if problem.op == "sddmm":
        choice = choose_sddmm(problem)
        sizes = (problem.m, problem.k, problem.n)
        return Plan((_step(choice, problem.m, sizes, device),), (choice,))
    choice = choose_spmm(problem, device_facts(device))
    if choice.kernel is kernels.SNACK_COO:
        return _plan_snack_coo(problem, choice, device)
    if choice.kernel is kernels.SPMM_RESIDENT:
        return _plan_resident(problem, choice, device)
    m, k = (problem.m, problem.k) if problem.op == "spmm" else (problem.k, problem.m)
    width = choice.values.get("kBatch") or 32 * choice.values["kVec"]
    warps = m * -(-problem.n // width)
    return Plan((_step(choice, warps, (m, k, problem.n), device),), (choice,))


def _step(
    choice: Choice,
    warps: int,
    sizes: tuple[int, ...],
    device: int,
    select: Callable[[tuple[int, ...]], tuple[int, ...]] | None = None,
) -> Step:
    """A launch of ``warps`` warps in one-dimensional blocks."""
    blocks = -(-warps // WARPS)
    if blocks >= 2**31:
        fail(choice.kernel.name, "problem", "need fewer than 2^31 thread blocks", blocks)
    function = choice.kernel.get(device, **choice.values)
    return Step(function, (blocks,), (BLOCK,), sizes, select)


def _plan_resident(problem: Problem, choice: Choice, device: int) -> Plan:
    """One wave of blocks; each tile of batch rows has an equal share of the multiprocessors."""
    facts, batch = device_facts(device), choice.values["kBatch"]
    tiles = -(-problem.n // batch)
    # Large blocks hide more latency, but start later: few warps where few rows are to be had.
    rows = problem.m * tiles / facts.multiprocessors
    warps = 8 if rows <= 8 else 16 if rows <= 24 else 32
    blocks = max(1, min(-(-problem.m // warps), facts.multiprocessors // tiles))
    function = choice.kernel.get(device, max_shared_bytes=facts.shared_bytes, **choice.values)
    sizes = (problem.m, problem.k, problem.n, problem.nnz, blocks)
    shared_bytes = 4 * batch * (problem.k + 1)
    select = itemgetter(0, 1, 3, 4, 5, 6)
    step = Step(function, (tiles * blocks,), (32 * warps,), sizes, select, shared_bytes)
    return Plan((step,), (choice,))


@functools.cache
def device_facts(device: int) -> Device:
    """The `Device` of one CUDA device."""
    attributes = _jit.require_cupy().cuda.Device(device).attributes
    return Device(attributes["MultiProcessorCount"], attributes["MaxSharedMemoryPerBlockOptin"])


def _plan_snack_coo(problem: Problem, choice: Choice, device: int) -> Plan:
    fill = Choice(kernels.FILL_ROWS, {"T": problem.dtype}, "the atomics add to bias or zero")
    fill_warps = -(-problem.m * problem.n // 32)
    fill_step = _step(fill, fill_warps, (problem.m, problem.n), device, itemgetter(5, 6))
    blocks_per_row = -(-problem.nnz // BLOCK)
    sizes = (problem.m, problem.k, problem.nnz, blocks_per_row)
    warps = blocks_per_row * WARPS * problem.n
    scatter_step = _step(choice, warps, sizes, device, itemgetter(0, 1, 3, 4, 6))
    return Plan((fill_step, scatter_step), (fill, choice))
