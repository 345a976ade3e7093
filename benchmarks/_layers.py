"""One layer in three forms that compute the same function: sparse, dense, dense under a mask."""

import torch
from torch import nn
from torch.nn import functional

from benchmarks._matrix import Matrix, Problem, judge, reference
from benchmarks._providers import OURS
from snack_cupy.torch import SnackLinear

DENSE, MASKED = "dense", "dense_mask"
METHODS = (OURS, DENSE, MASKED)


class MaskedLinear(nn.Module):
    """A dense weight that is multiplied by a mask at each forward."""

    def __init__(self, weight: torch.Tensor, mask: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(weight.new_zeros(weight.shape[0]))
        self.register_buffer("mask", mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product and the bias."""
        return functional.linear(x, self.weight * self.mask, self.bias)


def make_layer(method: str, matrix: Matrix) -> nn.Module:
    """The layer whose weight is ``matrix``, with a bias of zeros; ``matrix`` is left alone."""
    m, k = matrix.topology.shape
    if method == OURS:
        layer: nn.Module = SnackLinear(
            k, m, topology=matrix.topology, device=matrix.device, dtype=matrix.dtype
        )
        layer.values.data.copy_(matrix.values)
    elif method == DENSE:
        layer = nn.Linear(k, m, device=matrix.device, dtype=matrix.dtype)
        layer.weight.data.zero_()[matrix.row, matrix.col] = matrix.values
    else:
        weight = torch.zeros((m, k), dtype=matrix.dtype, device=matrix.device)
        mask = torch.zeros_like(weight)
        weight[matrix.row, matrix.col] = matrix.values
        mask[matrix.row, matrix.col] = 1.0
        layer = MaskedLinear(weight, mask)
    layer.bias.data.zero_()
    return layer


class Training:
    """A layer, its optimiser, and one input with the gradient of the output."""

    def __init__(
        self, method: str, matrix: Matrix, x: torch.Tensor, dy: torch.Tensor, optimizer: str
    ) -> None:
        self.matrix, self.x, self.dy = matrix, x.detach().requires_grad_(), dy
        self.layer = make_layer(method, matrix)
        self.leaves = [self.x, *self.layer.parameters()]
        self.optimizer = torch.optim.Adam(
            self.layer.parameters(),
            lr=1e-5,
            fused=optimizer == "fused",
            foreach=optimizer == "foreach",
            capturable=matrix.device.type == "cuda",
        )

    def forward_backward(self) -> torch.Tensor:
        """The output; gradients of the input and of all parameters are new ones."""
        for leaf in self.leaves:
            leaf.grad = None
        with torch.enable_grad():
            y = self.layer(self.x)
            y.backward(self.dy)
        return y.detach()

    def step(self) -> None:
        """Forward, backward, and a step of the optimiser."""
        self.forward_backward()
        self.optimizer.step()

    def infer(self) -> torch.Tensor:
        """Forward without gradients: they are off, as everywhere in the benchmarks."""
        return self.layer(self.x)

    def check(self) -> None:
        """Raise where the output or a gradient is not what float64 says."""
        y = self.forward_backward()
        if isinstance(self.layer, SnackLinear):
            weight_gradient = self.layer.values.grad
        else:
            weight_gradient = self.layer.weight.grad[self.matrix.row, self.matrix.col]
        for op, got in (("fwd", y), ("dx", self.x.grad), ("dw", weight_gradient)):
            expected = reference(Problem(op, self.matrix, self.x.detach(), self.dy))
            verdict = judge(got, expected)
            if not verdict.right:
                raise ArithmeticError(f"wrong {op}: {verdict.max_error:.2g} of the magnitude")
