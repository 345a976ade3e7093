"""Which kernel runs, and why: pure choices from sizes and dtypes.

`choose_spmm` and `choose_sddmm` need no GPU and are tested without one. `plan` makes the choice
concrete (`snack_cupy._launches`), compiles it and keeps the result, so that a repeated call costs
one dictionary look-up.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from snack_cupy import _cost, _jit, _launches, _tensor, kernels
from snack_cupy._cost import Slicing
from snack_cupy._plan import H200, ITEM_BYTES, Choice, Device, Plan, Problem, Step
from snack_cupy.kernels import Kernel

__all__ = [
    "H200",
    "NON_DETERMINISTIC",
    "SPMM_KERNELS",
    "Choice",
    "Device",
    "Plan",
    "Problem",
    "Step",
    "choose_sddmm",
    "choose_spmm",
    "device_facts",
    "plan",
]

SPMM_KERNELS = ("csr", "snack_coo")
NON_DETERMINISTIC = ("snack_coo",)


def choose_spmm(problem: Problem, device: Device = H200) -> Choice:
    """Kernel for ``spmm`` or ``spmm_transposed`` (the same kernels on the column-major view)."""
    if problem.kernel == "snack_coo":
        coo = {"T": problem.dtype, "R": problem.row_index, "I": problem.index}
        return Choice(kernels.SNACK_COO, coo, "asked for: SNACK's COO kernel with atomics")
    permuted = problem.op == "spmm_transposed"
    index = problem.row_index if permuted else problem.index
    staged = _choose_staged(problem, index, device)
    values = {"T": problem.dtype, "I": index, "kPermuted": permuted}
    product = _choose_product(problem, kernels.SCATTER_ROWS, values, staged)
    if product is not None:
        return product
    if staged is not None:
        return staged
    if problem.batch_major or problem.n == 1:
        # Rows of X held in registers by a warp: as many as the batch fills, at most 8.
        batch = 1 if problem.n == 1 else 4 if problem.n <= 4 else 8
        reason = f"batch-major: a warp per row and {batch} batch rows"
        return Choice(kernels.SPMM_BATCH_MAJOR, {**values, "kBatch": batch}, reason)
    # A lane moves 4 neighbouring columns where rows of D keep the alignment of a 4-element pack.
    vec = 4 if problem.aligned and problem.n % 4 == 0 else 1
    reason = f"feature-major: a warp per row and {32 * vec} columns"
    return Choice(kernels.SPMM_FEATURE_MAJOR, {**values, "kVec": vec}, reason)


def choose_sddmm(problem: Problem, device: Device = H200) -> Choice:
    """Kernel for ``sddmm``."""
    staged = _choose_staged_sddmm(problem, device)
    values = {"T": problem.dtype, "I": problem.index}
    product = _choose_product(problem, kernels.GATHER_ENTRIES, values, staged)
    if product is not None:
        return product
    if staged is not None:
        return staged
    if problem.batch_major or problem.n == 1:
        reason = "batch-major: a lane per entry"
        return Choice(kernels.SDDMM_BATCH_MAJOR, values, reason)
    return Choice(kernels.SDDMM_FEATURE_MAJOR, values, "feature-major: a warp per entry")


def _choose_product(
    problem: Problem, kernel: Kernel, values: dict[str, Any], sparse: Choice | None
) -> Choice | None:
    """The dense library's product, where it is allowed and expected to be faster than ``sparse``.

    Its time is fitted to what dense layers take on an H200; W goes to its dense form and back at
    each call.
    """
    sizes = (problem.m, problem.k, problem.nnz, problem.n)
    nbytes = ITEM_BYTES[problem.dtype] * problem.m * problem.k
    if problem.kernel is not None or problem.dtype == "float64" or nbytes > problem.scratch:
        return None
    microseconds = _cost.product_microseconds(problem.op, *sizes, problem.dtype, problem.tf32)
    other = sparse.microseconds if sparse is not None else None
    if other is None:
        item = ITEM_BYTES[problem.dtype]
        other = _cost.plain_microseconds(problem.nnz, problem.n, item)
    if other <= microseconds:
        return None
    precision = "TF32" if problem.tf32 and problem.dtype == "float32" else problem.dtype
    reason = (
        f"a dense product in {precision} is faster here: W takes {nbytes:,} bytes of scratch memory"
    )
    return Choice(kernel, values, reason, None, microseconds, product=True)


def _choose_staged_sddmm(problem: Problem, device: Device) -> Choice | None:
    """The kernel for ``sddmm`` that holds X in shared memory, if one applies."""
    if not _may_stage(problem, problem.index):
        return None
    if problem.n == 1 and 4 * problem.k <= device.shared_bytes:
        reason = "one batch row: a warp per row, x in shared memory"
        microseconds = _cost.vector_microseconds(problem.nnz, ITEM_BYTES[problem.dtype])
        return Choice(kernels.SDDMM_VECTOR, {"T": problem.dtype}, reason, None, microseconds)
    tensor, sliced = _choose_sddmm_tensor(problem, device), None
    slicing = _cost.sddmm_slicing(problem.m, problem.k, problem.nnz, problem.n, *device)
    if slicing is not None:
        values = {"T": problem.dtype, "kBatch": slicing.batch}
        sliced = _sliced(kernels.SDDMM_SLICED, values, slicing)
    return None if tensor is None and sliced is None else _faster(tensor, sliced)


def _may_stage(problem: Problem, index: str) -> bool:
    """Whether the kernels that hold X in shared memory apply at all."""
    batch_major = problem.batch_major or problem.n == 1
    chosen = problem.kernel is None and problem.dtype != "float64"
    return chosen and batch_major and problem.aligned and index == "uint16"


def _choose_staged(problem: Problem, index: str, device: Device) -> Choice | None:
    """Of the kernels that hold X in shared memory or registers the one expected to be fastest."""
    if not _may_stage(problem, index):
        return None
    permuted = problem.op == "spmm_transposed"
    m, k = (problem.k, problem.m) if permuted else (problem.m, problem.k)
    if problem.n == 1:
        return _choose_vector(problem, m, k, permuted, device)
    tensor = _choose_spmm_tensor(problem, m, k, permuted, device)
    gathering = _choose_gathering(problem, m, k, permuted, device)
    return None if tensor is None and gathering is None else _faster(tensor, gathering)


def _faster(*choices: Choice | None) -> Choice:
    there = [choice for choice in choices if choice is not None]
    return min(there, key=lambda choice: choice.microseconds or 0.0)


def _choose_vector(
    problem: Problem, m: int, k: int, permuted: bool, device: Device
) -> Choice | None:
    item = ITEM_BYTES[problem.dtype]
    made = []
    if item == 2 and not permuted and 2 * k <= device.shared_bytes:
        lanes = _tensor.vector_lanes(m, problem.nnz, device.multiprocessors)
        halves = {"T": problem.dtype, "kLanes": lanes, "kVectors": 2}
        reason = f"one batch row: {lanes} lanes per row, x in shared memory as it is"
        microseconds = _tensor.vector_microseconds(problem.nnz)
        made.append(Choice(kernels.SPMM_VECTOR_HALF, halves, reason, None, microseconds))
    if 4 * k <= device.shared_bytes:
        values = {"T": problem.dtype, "kPermuted": permuted}
        reason = "one batch row: a warp per row, x in shared memory"
        # Its loads are by entry: half types take as long as float32 (7.7 at 11008 x 4096, .9).
        microseconds = _cost.vector_microseconds(problem.nnz, max(item, 4))
        made.append(Choice(kernels.SPMM_VECTOR, values, reason, None, microseconds))
    return _faster(*made) if made else None


def _choose_gathering(
    problem: Problem, m: int, k: int, permuted: bool, device: Device
) -> Choice | None:
    """Kernels that gather X entry by entry from shared memory."""
    values: dict[str, Any] = {"T": problem.dtype, "kPermuted": permuted}
    slicing = _cost.spmm_slicing(m, k, problem.nnz, problem.n, permuted, *device)
    microseconds, resident = _resident(problem, m, k, permuted, device)
    if resident and (slicing is None or microseconds <= slicing.microseconds):
        values["kBatch"] = resident
        reason = f"X fits shared memory: a block holds {resident} batch rows"
        return Choice(kernels.SPMM_RESIDENT, values, reason, None, microseconds)
    if slicing is None:
        return None
    values |= {"kBatch": slicing.batch, "kRowEach": slicing.row_each}
    return _sliced(kernels.SPMM_SLICED, values, slicing)


def _choose_spmm_tensor(
    problem: Problem, m: int, k: int, permuted: bool, device: Device
) -> Choice | None:
    """Tensor cores multiply a tile of W that is spread over shared memory; half types only."""
    if problem.dtype not in kernels.HALVES or problem.n > 64 or k % 8 != 0:
        return None
    made = []
    for pair in (False, True):
        batch_tiles = 4 if pair else 1 if problem.n <= 8 else 2
        sizes = (m, k, problem.nnz, problem.n, batch_tiles, pair, device.multiprocessors)
        tiling = _tensor.spmm_tiling(*sizes)
        steps = 4 if tiling.width <= 4 * _tensor.STEP else 8
        if tiling.width > (4 if pair else 8) * _tensor.STEP:
            continue
        if pair and (problem.n <= 16 or device.shared_bytes < _tensor.CLUSTER_BYTES):
            continue
        if tiling.shared_bytes > device.shared_bytes:
            continue
        values = {"T": problem.dtype, "kPermuted": permuted, "kBatchTiles": batch_tiles}
        kernel = kernels.SPMM_TENSOR_PAIR if pair else kernels.SPMM_TENSOR
        reason = (
            f"tensor cores: 16 rows at a time are spread over shared memory; a block holds "
            f"{8 * batch_tiles} batch rows{' of half of X' if pair else ''}"
        )
        made.append(Choice(kernel, {**values, "kSteps": steps}, reason, None, tiling.microseconds))
    return min(made, key=lambda choice: choice.microseconds or 0.0, default=None)


def _choose_sddmm_tensor(problem: Problem, device: Device) -> Choice | None:
    """Tensor cores compute dense tiles, of which the entries are taken; half types only."""
    if problem.dtype not in kernels.HALVES or problem.n > 64:
        return None
    if problem.m % 2 or problem.k % 4 or problem.k > 65535:
        return None
    steps = 1 if problem.n <= 16 else 2 if problem.n <= 32 else 4
    sizes = (problem.m, problem.k, problem.nnz, steps, device.multiprocessors)
    tiling = _tensor.sddmm_tiling(*sizes)
    if tiling.shared_bytes > device.shared_bytes:
        return None
    reason = (
        f"tensor cores: tiles of 16 rows and {tiling.width} columns, dense, of which entries are"
    )
    values = {"T": problem.dtype, "kBatchSteps": steps}
    return Choice(kernels.SDDMM_TENSOR, values, reason, None, tiling.microseconds)


def _sliced(kernel: Kernel, values: dict[str, Any], slicing: Slicing) -> Choice:
    reason = (
        f"X is cut into slices of at most {slicing.width} columns, {slicing.slices} in all; "
        f"a block holds {slicing.batch} batch rows of one"
    )
    return Choice(kernel, values, reason, slicing, slicing.microseconds)


def _resident(
    problem: Problem, m: int, k: int, permuted: bool, device: Device
) -> tuple[float, int]:
    """Time of the resident kernel, and the batch rows a block holds; 0 where not even 4 fit."""
    fitting = device.shared_bytes // (4 * (k + 1))
    sizes = (m, k, problem.nnz, problem.n, permuted)
    return min(
        (
            (_cost.resident_microseconds(*sizes, batch, device.multiprocessors), batch)
            for batch in (4, 8)
            if batch <= fitting
        ),
        default=(math.inf, 0),
    )


def plan(problem: Problem, device: int) -> Plan:
    """The launches that solve ``problem`` on CUDA device ``device``, compiled and ready.

    Pointers go to `snack_cupy._jit.launch` in this order, 0 for what is absent:

    - ``spmm``: row_offsets, columns, 0, values, dense, bias, out
    - ``spmm_transposed``: col_offsets, rows, permutation, values, dense, 0, out
    - ``sddmm``: row_offsets, columns, left, right, out
    - ``spmm`` by "snack_coo": rows, columns, 0, values, dense, bias, out

    and last the workspace, where ``plan.workspace`` is not 0: as many bytes on a 16-byte boundary,
    which the launches write before they read (the product of "sddmm" does with ``plan.product``).
    """
    return _plan(problem, device)


@functools.lru_cache(maxsize=4096)
def _plan(problem: Problem, device: int) -> Plan:
    facts = device_facts(device)
    choose = choose_sddmm if problem.op == "sddmm" else choose_spmm
    return _launches.of_choice(problem, choose(problem, facts), facts, device)


@functools.cache
def device_facts(device: int) -> Device:
    """The `Device` of one CUDA device."""
    attributes = _jit.require_cupy().cuda.Device(device).attributes
    return Device(attributes["MultiProcessorCount"], attributes["MaxSharedMemoryPerBlockOptin"])
