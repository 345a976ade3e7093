"""gradcheck and gradgradcheck in float64 on the GPU."""

import pytest
from helpers import Problem, make_topology, problem_ids

SMALL = (
    Problem("one_element", 1, 1, 1, 1),
    Problem("no_entries", 3, 4, 2, 0),
    Problem("batch_0", 4, 3, 0, 6),
    Problem("empty_rows_and_columns", 6, 8, 3, 7, "holes"),
    Problem("every_entry", 3, 5, 4, 15),
    Problem("odd_sizes", 7, 9, 5, 20),
)
problems = pytest.mark.parametrize("p", SMALL, ids=problem_ids(SMALL))


@pytest.fixture
def checks(torch):
    return torch.autograd.gradcheck, torch.autograd.gradgradcheck


@problems
def test_spmm(snack, torch_helpers, checks, p, rng):
    topology = make_topology(p).to_device("cuda")
    values, x, bias, _ = torch_helpers.operands(p, "float64", rng, "cuda")
    inputs = torch_helpers.require_grad(values, x, bias)
    for check in checks:
        assert check(lambda v, x, b: snack.spmm(topology, v, x, bias=b), inputs)


@problems
def test_sddmm(snack, torch_helpers, checks, p, rng):
    topology = make_topology(p).to_device("cuda")
    _, right, _, left = torch_helpers.operands(p, "float64", rng, "cuda")
    inputs = torch_helpers.require_grad(left, right)
    for check in checks:
        assert check(lambda a, b: snack.sddmm(topology, a, b), inputs)


def test_layer(torch, torch_helpers, checks, rng):
    p = SMALL[-1]
    layer = torch_helpers.make_layer(p, "float64", "cuda")
    x = torch_helpers.operands(p, "float64", rng, "cuda")[1].requires_grad_()

    def run(x, values, bias):
        return torch.func.functional_call(layer, {"values": values, "bias": bias}, (x,))

    for check in checks:
        assert check(run, (x, layer.values, layer.bias))


def test_gradient_penalty_equals_that_of_the_cpu(torch, torch_helpers):
    results = []
    for device in ("cuda", "cpu"):
        layer = torch_helpers.seeded_layer(sparsity=0.5, dtype=torch.float64).to(device)
        x = torch_helpers.X.double().to(device).requires_grad_()
        y = layer(x).tanh().sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        loss = (gradient.norm(dim=1) - 1).square().sum() + y
        results.append([t.cpu() for t in torch.autograd.grad(loss, tuple(layer.parameters()))])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)
