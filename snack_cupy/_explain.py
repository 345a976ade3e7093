"""`explain`: which kernels one size gets on a GPU, why, and how far that is from the limit."""

from __future__ import annotations

from typing import NamedTuple

from snack_cupy import _check, dispatch, kernels
from snack_cupy._check import fail
from snack_cupy._plan import ITEM_BYTES, Choice, Problem
from snack_cupy.ops import problem_of
from snack_cupy.topology import Topology, check_topology

# Of an H200: bytes a microsecond from its memory, and from all shared memories, float32
# multiply-adds a microsecond, and what a launch costs in a CUDA graph.
MEMORY = 4.3e6
SHARED = 33.0e6
MULTIPLY_ADDS = 33.0e6
LAUNCH = 0.94


class Explanation(NamedTuple):
    """What one operation does and costs; times are microseconds on an H200.

    ``nbytes`` is what has to be read and written once, ``flop`` counts a multiply-add as two.
    ``limit`` is the least time of any kernel like the one chosen, ``expected`` what this one is
    expected to take (None where it was not fitted).
    """

    op: str
    kernel: str
    reason: str
    nbytes: int
    flop: int
    limit: float
    expected: float | None

    def __str__(self) -> str:
        expected = "not estimated" if self.expected is None else f"{self.expected:.1f} us"
        return (
            f"{self.op}: {self.kernel}\n"
            f"  why       {self.reason}\n"
            f"  moves     {self.nbytes:,} bytes\n"
            f"  computes  {self.flop:,} flop\n"
            f"  takes     {expected} on an H200; not less than {self.limit:.1f} us"
        )


class Explanations(tuple[Explanation, ...]):
    """The `Explanation` of each operation; printed, one below the other."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self))


def explain(
    topology: Topology,
    batch: int,
    dtype: str = "float32",
    *,
    batch_major: bool = True,
    training: bool = True,
    tf32: bool = False,
) -> Explanations:
    """Which kernels run for one size, why, and what is expected of them.

    Nothing is computed and no GPU is needed: for a topology on the CPU, or where there is no GPU,
    it tells what an H200 would do.

    Parameters
    ----------
    topology : Topology
        Structure of W, shape (m, k).
    batch : int
        Rows of the dense operand (columns where ``batch_major`` is false), at least 1.
    dtype : str
        "float32", "float64", "float16" or "bfloat16".
    batch_major : bool
    training : bool
        Also the gradients, `spmm_transposed` and `sddmm`.
    tf32 : bool
        Whether products of dense float32 matrices may be rounded to TF32.

    Returns
    -------
    Explanations
        A tuple of one `Explanation` an operation, with the fields op, kernel, reason, nbytes, flop,
        limit and expected; ``print`` shows it as text.

    Raises
    ------
    TypeError
        ``topology`` is no Topology.
    ValueError
        The dtype is not supported, or the batch is less than 1.

    Notes
    -----
    The limit is the larger of the bytes at 4.3 TB/s and a launch. Without tensor cores it is also
    the multiply-adds at 33 T/s and, for sums in float32, the elements of the dense operand that
    entries need, at the 33 TB/s of all shared memories together.

    Source: Williams et al., "Roofline: An Insightful Visual Performance Model for Multicore
    Architectures", CACM 2009.

    Examples
    --------
    >>> from snack_cupy import explain
    >>> from snack_cupy.random import random_topology
    >>> topology = random_topology((4096, 4096), sparsity=0.9, seed=0)
    >>> print(explain(topology, 1, training=False))
    spmm: spmm_csr_vector
      why       one batch row: a warp per row, x in shared memory
      moves     10,115,488 bytes
      computes  3,355,444 flop
      takes     4.3 us on an H200; not less than 2.4 us
    """
    check_topology("explain", topology)
    _check.check_count("explain", "batch", batch, low=1, high=2**31 - 1)
    if dtype not in _check.VALUE_DTYPES:
        fail("explain", "dtype", f"be one of {_check.VALUE_DTYPES}", repr(dtype))
    device = dispatch.H200
    if topology.device != "cpu":
        device = dispatch.device_facts(int(topology.device.partition(":")[2]))
    made = []
    for op in ("spmm", "spmm_transposed", "sddmm") if training else ("spmm",):
        problem = problem_of(op, topology, batch, dtype, batch_major, tf32=tf32)
        choose = dispatch.choose_sddmm if op == "sddmm" else dispatch.choose_spmm
        made.append(_explanation(problem, choose(problem, device)))
    return Explanations(made)


def _explanation(problem: Problem, choice: Choice) -> Explanation:
    item = ITEM_BYTES[problem.dtype]
    rows = problem.k if problem.op == "spmm_transposed" else problem.m
    index = problem.row_index if problem.op == "spmm_transposed" else problem.index
    # Each entry: its value, its index, and where values are read through one the permutation.
    entry = item + (2 if index == "uint16" else 4) + (4 if problem.op == "spmm_transposed" else 0)
    dense = item * problem.n * (problem.m + problem.k)
    nbytes = problem.nnz * entry + 4 * (rows + 1) + dense
    products = problem.nnz * problem.n
    limit = max(nbytes / MEMORY, LAUNCH)
    if not (choice.product or choice.kernel in kernels.ON_TENSOR_CORES):
        limit = max(limit, products / MULTIPLY_ADDS)
        if problem.dtype != "float64":
            limit = max(limit, 4 * products / SHARED)
    expected = choice.microseconds
    flop = 2 * products
    return Explanation(problem.op, choice.kernel.name, choice.reason, nbytes, flop, limit, expected)
