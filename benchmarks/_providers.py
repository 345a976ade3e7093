"""What is timed for one problem: the public operations of this library, and the rivals' calls.

All take and give PyTorch's layout: x (batch, in), y (batch, out), rows contiguous. Whatever a rival
needs for that (a transpose, values in another order) happens inside its call, because a layer would
do it at every step; what depends on the topology alone is made ahead, for every provider.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from benchmarks._matrix import Problem
from snack_cupy.torch import sddmm, spmm

OURS = "snack_cupy"
RIVALS = ("dense", "dense_mask", "torch_csr", "cupyx_csr")


class Provider(NamedTuple):
    """``call`` is timed; ``result`` makes of what it returns the tensor that is checked."""

    call: Callable[[], Any]
    result: Callable[[Any], torch.Tensor] = lambda output: output


def ours(problem: Problem) -> Provider:
    """The library's public operation."""
    matrix, x, dy = problem.matrix, problem.x, problem.dy
    topology, values = matrix.topology, matrix.values
    if problem.op == "fwd":
        return Provider(lambda: spmm(topology, values, x))
    if problem.op == "dw":
        return Provider(lambda: sddmm(topology, dy, x))
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        y = spmm(topology, values, leaf)
    return Provider(lambda: torch.autograd.grad(y, leaf, dy, retain_graph=True)[0])


def dense(problem: Problem) -> Provider:
    """`nn.Linear`'s products; the whole weight gradient, for a dense layer needs it."""
    matrix, x, dy = problem.matrix, problem.x, problem.dy
    weight = matrix.weight
    if problem.op == "fwd":
        return Provider(lambda: functional.linear(x, weight))
    if problem.op == "dx":
        return Provider(lambda: dy @ weight)
    return Provider(lambda: dy.T @ x, lambda full: full[matrix.row, matrix.col])


def dense_mask(problem: Problem) -> Provider:
    """A dense weight times a mask at each step. Its dX is that of the dense layer."""
    matrix, x, dy = problem.matrix, problem.x, problem.dy
    weight, mask = matrix.weight, matrix.mask
    if problem.op == "fwd":
        return Provider(lambda: functional.linear(x, weight * mask))
    if problem.op == "dx":
        return dense(problem)
    return Provider(lambda: (dy.T @ x) * mask, lambda full: full[matrix.row, matrix.col])


def torch_csr(problem: Problem) -> Provider:
    """cuSPARSE (on the CPU: MKL) through torch.sparse's CSR tensors."""
    matrix, x, dy = problem.matrix, problem.x, problem.dy
    shape = matrix.topology.shape
    if problem.op == "dx":
        # The transposed structure is made ahead; its values follow at each step.
        order = torch.argsort(matrix.col, stable=True)
        rows = matrix.row[order].to(torch.int32)
        counts = torch.bincount(matrix.col, minlength=shape[1])
        offsets = functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)

        def call() -> torch.Tensor:
            values = matrix.values[order]
            transposed = torch.sparse_csr_tensor(
                offsets, rows, values, size=shape[::-1], check_invariants=False
            )
            return (transposed @ dy.T).T.contiguous()

        return Provider(call)
    columns = matrix.col.to(torch.int32)
    csr = torch.sparse_csr_tensor(
        matrix.offsets, columns, matrix.values, size=shape, check_invariants=False
    )
    if problem.op == "fwd":
        return Provider(lambda: (csr @ x.T).T.contiguous())
    return Provider(
        lambda: torch.sparse.sampled_addmm(csr, dy.T, x, beta=0.0), lambda out: out.values()
    )


def cupyx_csr(problem: Problem) -> Provider:
    """cuSPARSE through cupyx.scipy.sparse; it has no sampled product."""
    import cupy
    from cupyx import cusparse
    from cupyx.scipy import sparse

    matrix, x, dy = problem.matrix, problem.x, problem.dy
    stream = cupy.cuda.Stream.from_external(torch.cuda.current_stream())
    with stream:
        columns = matrix.col.to(torch.int32)
        arrays = (cupy.from_dlpack(t) for t in (matrix.values, columns, matrix.offsets))
        csr = sparse.csr_matrix(tuple(arrays), shape=matrix.topology.shape)
        backward = problem.op == "dx"
        right = cupy.from_dlpack(dy if backward else x).T

    def call() -> Any:
        with stream:
            out = cusparse.spmm(csr, right, transa=True) if backward else csr @ right
            return cupy.ascontiguousarray(out.T)

    return Provider(call, torch.from_dlpack)


def rivals(problem: Problem) -> dict[str, Callable[[Problem], Provider]]:
    """The rivals that have the operation in this dtype on this device, by name."""
    found: dict[str, Callable[[Problem], Provider]] = {"dense": dense}
    if problem.op != "dx":
        found["dense_mask"] = dense_mask
    half = problem.matrix.dtype is not torch.float32
    on_gpu = problem.matrix.device.type == "cuda"
    if not (half and (problem.op == "dw" or not on_gpu)):
        found["torch_csr"] = torch_csr
    if on_gpu and not half and problem.op != "dw":
        found["cupyx_csr"] = cupyx_csr
    return found
