"""The operands of one measurement, and what float64 says the results are.

A result is right if each element is within 32 rounding errors of its sum of magnitudes, plus what
its own dtype and, in half types, partial sums in it lose. On normally distributed inputs an exact
float32 kernel stays far below that, and one that multiplies in TF32 exceeds it.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from benchmarks._machine import synchronize, topology_on
from snack_cupy.topology import Topology
from snack_cupy.torch import to_tensor

CHUNK_BYTES = 2**30
SUM_ERRORS = 32
EPS_SUM = 2.0**-24
EPS_OUT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
TINY = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133}
EPS_TF32 = 2.0**-9  # two operands cut to 10 bits


class Matrix:
    """A sparse (m, k) matrix of normal values, with the dense forms that rivals need."""

    def __init__(self, topology: Topology, dtype: torch.dtype, device: torch.device) -> None:
        self.topology = topology
        self.dtype, self.device = dtype, device
        generator = torch.Generator(device).manual_seed(1)
        self.values = torch.randn(topology.nnz, device=device, generator=generator).to(dtype)
        self.row = to_tensor(topology.row).to(torch.int64)
        self.col = to_tensor(topology.col).to(torch.int64)
        self.offsets = to_tensor(topology.row_offsets)
        synchronize(device)  # before CuPy, on its own stream, reuses what the copies read

    @functools.cached_property
    def weight(self) -> torch.Tensor:
        """The matrix as a dense one."""
        return self._dense(self.values)

    @functools.cached_property
    def mask(self) -> torch.Tensor:
        """1 where there is an entry, in the matrix's dtype, as a mask is usually kept."""
        return self._dense(torch.ones_like(self.values))

    def _dense(self, values: torch.Tensor) -> torch.Tensor:
        dense = torch.zeros(self.topology.shape, dtype=self.dtype, device=self.device)
        dense[self.row, self.col] = values
        return dense

    def chunks(self) -> Iterator[tuple[slice, slice, torch.Tensor]]:
        """Rows, entries and dense float64 rows, as many at a time as memory is allowed."""
        m, k = self.topology.shape
        step = max(1, CHUNK_BYTES // (8 * k))
        starts = [*range(0, m, step), m]
        bounds = self.offsets[starts].tolist()
        for i, (first, last) in enumerate(itertools.pairwise(starts)):
            rows, entries = slice(first, last), slice(bounds[i], bounds[i + 1])
            dense = torch.zeros(last - first, k, dtype=torch.float64, device=self.device)
            dense[self.row[entries] - first, self.col[entries]] = self.values[entries].double()
            yield rows, entries, dense


def random_matrix(
    device: torch.device, shape: tuple[int, int], sparsity: float, dtype: torch.dtype
) -> Matrix:
    """A matrix of a random topology."""
    return Matrix(topology_on(device, shape, sparsity), dtype, device)


def random_operand(
    device: torch.device, batch: int, features: int, dtype: torch.dtype, seed: int
) -> torch.Tensor:
    """Normal numbers, shape (batch, features)."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(batch, features, device=device, generator=generator).to(dtype)


class Problem(NamedTuple):
    """One operation on a matrix W (m, k), x (batch, k) and the output gradient dy (batch, m).

    ``op`` is "fwd" (``x @ W.T``), "dx" (``dy @ W``) or "dw" (the entries of ``dy.T @ x`` W has).
    """

    op: str
    matrix: Matrix
    x: torch.Tensor
    dy: torch.Tensor

    @property
    def batch(self) -> int:
        """Rows of x."""
        return self.x.shape[0]


class Reference(NamedTuple):
    """The result in float64, the same sum over absolute values, and the number of summands."""

    want: torch.Tensor
    magnitude: torch.Tensor
    products: torch.Tensor | float


def reference(problem: Problem) -> Reference:
    """What float64 says the result is."""
    matrix, x, dy = problem.matrix, problem.x.double(), problem.dy.double()
    m, k = matrix.topology.shape
    shape = {"fwd": (problem.batch, m), "dx": (problem.batch, k), "dw": (matrix.topology.nnz,)}
    want = torch.zeros(shape[problem.op], dtype=torch.float64, device=matrix.device)
    magnitude = torch.zeros_like(want)
    for rows, entries, dense in matrix.chunks():
        if problem.op == "fwd":
            want[:, rows] = x @ dense.T
            magnitude[:, rows] = x.abs() @ dense.abs().T
        elif problem.op == "dx":
            want += dy[:, rows] @ dense
            magnitude += dy[:, rows].abs() @ dense.abs()
        else:
            row, col = matrix.row[entries] - rows.start, matrix.col[entries]
            want[entries] = (dy[:, rows].T @ x)[row, col]
            magnitude[entries] = (dy[:, rows].abs().T @ x.abs())[row, col]
    if problem.op == "dw":
        return Reference(want, magnitude, float(problem.batch))
    summed_over = matrix.row if problem.op == "fwd" else matrix.col
    return Reference(want, magnitude, torch.bincount(summed_over, minlength=want.shape[1]))


class Verdict(NamedTuple):
    """Largest error over the sum of magnitudes, RMS error over RMS result, and whether right."""

    max_error: float
    rms_error: float
    right: bool


def judge(got: torch.Tensor, expected: Reference, *, tf32: bool = False) -> Verdict:
    """Compare a result with its reference."""
    want, magnitude, products = expected
    if got.shape != want.shape:
        raise ValueError(f"result has shape {tuple(got.shape)}, not {tuple(want.shape)}")
    error = (got.double() - want).abs()
    bound = magnitude * (EPS_TF32 if tf32 else SUM_ERRORS * EPS_SUM)
    if eps := EPS_OUT.get(got.dtype, 0.0):
        partial = magnitude / torch.as_tensor(products, device=got.device).clamp(min=1).sqrt()
        bound = bound + eps * (want.abs() + 8 * partial) + TINY[got.dtype]
    relative = torch.where(error == 0, 0.0, error / magnitude)
    scale = want.square().mean().sqrt()
    return Verdict(
        float(relative.max()) if relative.numel() else 0.0,
        float(error.square().mean().sqrt() / scale) if relative.numel() else 0.0,
        bool((error <= bound).all()),  # a NaN is not within the bound
    )
