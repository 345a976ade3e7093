"""A choice made concrete: the functions, grids, sizes and pointers of its launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter

from snack_cupy import _cost, _tensor, kernels
from snack_cupy._check import fail
from snack_cupy._cost import WARPS, Slicing
from snack_cupy._plan import ITEM_BYTES, Choice, Device, Plan, Problem, Step

BLOCK = 256
HAND = 4096  # bytes of a row that a warp of `scatter_rows` has in shared memory


def of_choice(problem: Problem, choice: Choice, facts: Device, device: int) -> Plan:
    """The `Plan` of a choice for CUDA device ``device``."""
    makers: dict[kernels.Kernel, Callable[[Problem, Choice, Device, int], Plan]] = {
        kernels.SNACK_COO: _snack_coo,
        kernels.SPMM_VECTOR: _vector,
        kernels.SDDMM_VECTOR: _vector,
        kernels.SPMM_VECTOR_HALF: _vector_half,
        kernels.SPMM_TENSOR: _tensor_product,
        kernels.SPMM_TENSOR_PAIR: _tensor_product,
        kernels.SDDMM_TENSOR: _tensor_sampled,
        kernels.SPMM_RESIDENT: _resident,
        kernels.SPMM_SLICED: _sliced,
        kernels.SDDMM_SLICED: _sddmm_sliced,
        kernels.SCATTER_ROWS: _product,
        kernels.GATHER_ENTRIES: _product,
    }
    return makers.get(choice.kernel, _plain)(problem, choice, facts, device)


def _plain(problem: Problem, choice: Choice, facts: Device, device: int) -> Plan:
    """The kernels without shared memory: all pointers, a warp for each piece of work."""
    if problem.op == "sddmm":
        sizes = (problem.m, problem.k, problem.n)
        return Plan((_step(choice, problem.m, sizes, device),), (choice,))
    m, k = _sides(problem)
    width = choice.values.get("kBatch") or 32 * choice.values["kVec"]
    warps = m * -(-problem.n // width)
    return Plan((_step(choice, warps, (m, k, problem.n), device),), (choice,))


def _vector(problem: Problem, choice: Choice, facts: Device, device: int) -> Plan:
    """A warp for each row as far as one wave has as many: 32 warps a multiprocessor.

    On an H200 at 4096 x 4096, sparsity .9: 4.1 microseconds with blocks of 16 warps, 4.3 with 32.
    Where values are gathered, large blocks share more of them in their cache.
    """
    m, k = _sides(problem)
    most = 32 if problem.op == "spmm_transposed" else 16
    warps = most if m > most * facts.multiprocessors else most // 2
    blocks = max(1, min(-(-m // warps), 32 // warps * facts.multiprocessors))
    function = choice.kernel.get(device, max_shared_bytes=facts.shared_bytes, **choice.values)
    return Plan((Step(function, (blocks,), (32 * warps,), (m, k), None, 4 * k),), (choice,))


def _vector_half(problem: Problem, choice: Choice, facts: Device, device: int) -> Plan:
    """A group of lanes for each row as far as one wave has as many."""
    lanes = choice.values["kLanes"]
    threads = 512 if problem.m * lanes > 256 * facts.multiprocessors else 256
    most = 1024 // threads * facts.multiprocessors
    blocks = max(1, min(-(-problem.m * lanes // threads), most))
    function = choice.kernel.get(device, max_shared_bytes=facts.shared_bytes, **choice.values)
    sizes = (problem.m, problem.k, problem.nnz)
    select = itemgetter(0, 1, 3, 4, 5, 6)
    step = Step(function, (blocks,), (threads,), sizes, select, 2 * problem.k)
    return Plan((step,), (choice,))


def _tensor_product(problem: Problem, choice: Choice, facts: Device, device: int) -> Plan:
    """A group of tiles of rows for each multiprocessor, or each cluster of two."""
    m, k = _sides(problem)
    tiling = _tensor.spmm_tiling(
        m,
        k,
        problem.nnz,
        problem.n,
        choice.values["kBatchTiles"],
        choice.kernel is kernels.SPMM_TENSOR_PAIR,
        facts.multiprocessors,
    )
    function = choice.kernel.get(device, max_shared_bytes=facts.shared_bytes, **choice.values)
    cut = (tiling.groups, tiling.width, tiling.tiles_per_group)
    sizes = (m, k, problem.n, problem.nnz, *cut)
    block = (32 * _tensor.ROWS,)
    step = Step(function, (tiling.blocks,), block, sizes, None, tiling.shared_bytes)
    return Plan((step,), (choice,))


def _tensor_sampled(problem: Problem, choice: Choice, facts: Device, device: int) -> Plan:
    """A group of tiles of rows for each multiprocessor and slice of columns."""
    steps = choice.values["kBatchSteps"]
    sizes = (problem.m, problem.k, problem.nnz, steps, facts.multiprocessors)
    tiling = _tensor.sddmm_tiling(*sizes)
    function = choice.kernel.get(device, max_shared_bytes=facts.shared_bytes, **choice.values)
    arguments = (problem.m, problem.k, problem.n, problem.nnz, tiling.groups, tiling.width)
    block = (32 * _tensor.ROWS,)
    step = Step(function, (tiling.blocks,), block, arguments, None, tiling.shared_bytes)
    return Plan((step,), (choice,))


def _resident(problem: Problem, choice: Choice, facts: Device, device: int) -> Plan:
    """One wave of blocks, if there are not more tiles of batch rows than multiprocessors."""
    batch = choice.values["kBatch"]
    tiles = -(-problem.n // batch)
    m, k = _sides(problem)
    warps = _cost.resident_warps(m, problem.n, batch, facts.multiprocessors)
    blocks = _cost.resident_blocks(m, problem.n, batch, facts.multiprocessors)
    function = choice.kernel.get(device, max_shared_bytes=facts.shared_bytes, **choice.values)
    sizes = (m, k, problem.n, problem.nnz, blocks)
    shared_bytes = 4 * batch * (k + 1)
    step = Step(function, (tiles * blocks,), (32 * warps,), sizes, None, shared_bytes)
    return Plan((step,), (choice,))


def _sliced(problem: Problem, choice: Choice, facts: Device, device: int) -> Plan:
    """For each chunk of the batch the products of all slices, then the sums over the slices."""
    slicing = _slicing_of(choice)
    m, k = _sides(problem)
    function = choice.kernel.get(device, max_shared_bytes=facts.shared_bytes, **choice.values)
    told = f"sums over {slicing.slices} slices"
    reduction = Choice(kernels.REDUCE_SLICES, {"T": problem.dtype}, told)
    steps, workspace = [], 0
    for first in range(0, problem.n, slicing.chunk):
        n = min(slicing.chunk, problem.n - first)
        tiles = -(-n // slicing.batch)
        item = ITEM_BYTES[problem.dtype]
        select = _Chunk(first * k * item, first * m * item)
        sizes = (m, k, n, slicing.row_blocks, slicing.rows, slicing.slices, slicing.width)
        grid = (slicing.row_blocks * slicing.slices * tiles,)
        step = Step(function, grid, (32 * WARPS,), sizes, select, slicing.shared_bytes)
        steps.append(step)
        if slicing.slices > 1:
            padded = tiles * slicing.batch
            workspace = max(workspace, 4 * slicing.slices * m * padded)
            reduce = reduction.kernel.get(device, **reduction.values)
            grid = (-(-m // 32) * -(-n // 32),)
            summed = (m, n, slicing.slices, padded)
            steps.append(Step(reduce, grid, (256,), summed, select.reduction))
    choices = (choice, reduction) if slicing.slices > 1 else (choice,)
    return Plan(tuple(steps), choices, workspace)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Picks the pointers of one chunk of the batch, which starts so many bytes into X and Y."""

    x_bytes: int
    y_bytes: int

    def __call__(self, pointers: tuple[int, ...]) -> tuple[int, ...]:
        offsets, columns, permutation, values, x, bias, y, *workspace = pointers
        partial = workspace[0] if workspace else 0
        x, y = self._moved(x, y)
        return offsets, columns, permutation, values, x, bias, y, partial

    def reduction(self, pointers: tuple[int, ...]) -> tuple[int, ...]:
        """bias, y and the workspace, for the kernel that adds the slices."""
        *_, x, bias, y, partial = pointers
        return bias, self._moved(x, y)[1], partial

    def _moved(self, x: int, y: int) -> tuple[int, int]:
        return (x + self.x_bytes, y + self.y_bytes) if self.x_bytes or self.y_bytes else (x, y)


def _sddmm_sliced(problem: Problem, choice: Choice, facts: Device, device: int) -> Plan:
    """One launch, and the sum over the chunks of the batch if there are several.

    Sums of chunks, and of the tiles before the last in the half types, wait in the workspace.
    """
    slicing = _slicing_of(choice)
    function = choice.kernel.get(device, max_shared_bytes=facts.shared_bytes, **choice.values)
    chunks = -(-problem.n // slicing.chunk)
    sizes = (
        problem.m,
        problem.k,
        problem.n,
        problem.nnz,
        slicing.row_blocks,
        slicing.rows,
        slicing.slices,
        slicing.width,
        slicing.chunk,
    )
    apart = chunks > 1 or (problem.dtype != "float32" and problem.n > slicing.batch)
    select = itemgetter(0, 1, 2, 3, 4, 5) if apart else itemgetter(0, 1, 2, 3, 4, 4)
    grid = (slicing.row_blocks * slicing.slices * chunks,)
    step = Step(function, grid, (32 * WARPS,), sizes, select, slicing.shared_bytes)
    workspace = 4 * problem.nnz * chunks if apart else 0
    if chunks == 1:
        return Plan((step,), (choice,), workspace)
    told = f"sums over {chunks} chunks of the batch"
    addition = Choice(kernels.ADD_CHUNKS, {"T": problem.dtype}, told)
    add = addition.kernel.get(device, **addition.values)
    grid = (-(-problem.nnz // BLOCK),)
    last = Step(add, grid, (BLOCK,), (problem.nnz, chunks), itemgetter(4, 5))
    return Plan((step, last), (choice, addition), workspace)


def _product(problem: Problem, choice: Choice, facts: Device, device: int) -> Plan:
    """A warp for each row or part of a row of the matrix, whose dense form is the workspace."""
    m, k = _sides(problem)
    nbytes = m * k * ITEM_BYTES[problem.dtype]
    if problem.op == "sddmm":
        step = _step(choice, m, (m, k), device, itemgetter(0, 1, 5, 4))
    else:
        pack = 16 // ITEM_BYTES[problem.dtype]
        parts = -(-k * ITEM_BYTES[problem.dtype] // HAND)
        width = -(-k // (pack * parts)) * pack
        function = choice.kernel.get(device, **choice.values)
        grid = (-(-m * parts // (BLOCK // 32)),)
        select = itemgetter(0, 1, 2, 3, 7)
        step = Step(function, grid, (BLOCK,), (m, k, parts, width), select, BLOCK // 32 * HAND)
    return Plan((step,), (choice,), nbytes, product=True)


def _snack_coo(problem: Problem, choice: Choice, facts: Device, device: int) -> Plan:
    fill = Choice(kernels.FILL_ROWS, {"T": problem.dtype}, "the atomics add to bias or zero")
    fill_warps = -(-problem.m * problem.n // 32)
    fill_step = _step(fill, fill_warps, (problem.m, problem.n), device, itemgetter(5, 6))
    blocks_per_row = -(-problem.nnz // BLOCK)
    sizes = (problem.m, problem.k, problem.nnz, blocks_per_row)
    warps = blocks_per_row * (BLOCK // 32) * problem.n
    scatter_step = _step(choice, warps, sizes, device, itemgetter(0, 1, 3, 4, 6))
    return Plan((fill_step, scatter_step), (fill, choice))


def _step(
    choice: Choice,
    warps: int,
    sizes: tuple[int, ...],
    device: int,
    select: Callable[[tuple[int, ...]], tuple[int, ...]] | None = None,
) -> Step:
    """A launch of ``warps`` warps in one-dimensional blocks."""
    blocks = -(-warps // (BLOCK // 32))
    if blocks >= 2**31:
        fail(choice.kernel.name, "problem", "need fewer than 2^31 thread blocks", blocks)
    function = choice.kernel.get(device, **choice.values)
    return Step(function, (blocks,), (BLOCK,), sizes, select)


def _sides(problem: Problem) -> tuple[int, int]:
    """Rows and columns of the matrix that is multiplied by."""
    transposed = problem.op == "spmm_transposed"
    return (problem.k, problem.m) if transposed else (problem.m, problem.k)


def _slicing_of(choice: Choice) -> Slicing:
    assert choice.slicing is not None
    return choice.slicing
