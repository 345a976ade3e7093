"""`spmm` and `sddmm` on CUDA tensors: results and gradients of every problem, dtype and layout."""

import pytest
from helpers import (
    DTYPES,
    EMPTY,
    PROBLEMS,
    assert_close,
    expected_sddmm,
    expected_spmm,
    make_topology,
    problem,
    problem_ids,
)

problems = pytest.mark.parametrize("p", PROBLEMS, ids=problem_ids(PROBLEMS))
dtypes = pytest.mark.parametrize("dtype", DTYPES)
layouts = pytest.mark.parametrize("layout", ["transposed", "sliced", "offset"])


@pytest.fixture
def topology(cp):
    return make_topology(problem("odd_sizes")).to_device("cuda")


@problems
@dtypes
def test_spmm_forward_and_backward(torch, snack, torch_helpers, p, dtype, rng):
    host = make_topology(p)
    values, x, bias, gradient = torch_helpers.operands(p, dtype, rng, "cuda")
    arrays = [torch_helpers.to_numpy(t) for t in (values, x, bias, gradient)]
    values, x, bias = torch_helpers.require_grad(values, x, bias)
    y = snack.spmm(host.to_device("cuda"), values, x, bias=bias)
    assert (y.device, y.dtype) == (values.device, values.dtype)
    y.backward(gradient)
    got = [torch_helpers.to_numpy(t) for t in (y, x.grad, values.grad)]
    assert_close(got[0], *expected_spmm(host, *arrays[:2], batch_major=True, bias=arrays[2]))
    dx = expected_spmm(host, arrays[0], arrays[3], batch_major=True, transposed=True)
    assert_close(got[1], *dx)
    assert_close(got[2], *expected_sddmm(host, arrays[3], arrays[1], batch_major=True))
    torch.testing.assert_close(bias.grad, gradient.sum(0), rtol=0, atol=0)


@problems
@dtypes
def test_sddmm_forward_and_backward(torch, snack, torch_helpers, p, dtype, rng):
    host = make_topology(p)
    gradient, right, _, left = torch_helpers.operands(p, dtype, rng, "cuda")
    arrays = [torch_helpers.to_numpy(t) for t in (left, right, gradient)]
    left, right = torch_helpers.require_grad(left, right)
    s = snack.sddmm(host.to_device("cuda"), left, right)
    s.backward(gradient)
    got = [torch_helpers.to_numpy(t) for t in (s, left.grad, right.grad)]
    assert_close(got[0], *expected_sddmm(host, *arrays[:2], batch_major=True))
    assert_close(got[1], *expected_spmm(host, arrays[2], arrays[1], batch_major=True))
    dx = expected_spmm(host, arrays[2], arrays[0], batch_major=True, transposed=True)
    assert_close(got[2], *dx)


@pytest.mark.parametrize("name", EMPTY)
def test_nothing_to_multiply_gives_bias_and_zeros(torch, snack, torch_helpers, name):
    p = problem(name)
    layer = torch_helpers.make_layer(p, device="cuda")
    x = torch.randn(p.n, p.k, device="cuda", requires_grad=True)
    y = layer(x)
    assert torch.equal(y, layer.bias.expand(p.n, p.m))
    y.sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))
    assert torch.equal(layer.values.grad, torch.zeros_like(layer.values))
    assert torch.equal(layer.bias.grad, torch.full_like(layer.bias, p.n))


@pytest.mark.parametrize("lead", [(), (1,), (4,), (2, 3), (2, 0, 3), (1, 1, 2, 2)], ids=str)
def test_leading_axes(torch, snack, torch_helpers, topology, lead):
    (m, k), nnz = topology.shape, topology.nnz
    values, x = torch_helpers.integers(nnz, 1), torch_helpers.integers((*lead, k), 2)
    gradient = torch_helpers.integers((*lead, m), 3)
    host, results = topology.to_device("cpu"), []
    for device, structure in (("cuda", topology), ("cpu", host)):
        v, z = torch_helpers.require_grad(values.to(device), x.to(device))
        y = snack.spmm(structure, v, z)
        grads = torch.autograd.grad(y, (v, z), gradient.to(device))
        s = snack.sddmm(structure, gradient.to(device), z)
        results.append([t.cpu() for t in (y, *grads, s)])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@layouts
@dtypes
@pytest.mark.parametrize("what", ["x", "values", "gradient"])
def test_layout_does_not_matter(torch, snack, torch_helpers, topology, layout, dtype, what):
    if what == "values" and layout == "transposed":
        layout = "sliced"  # a vector is its own transpose
    shapes = {"values": (topology.nnz,), "x": (5, topology.k), "gradient": (5, topology.m)}
    kind = torch_helpers.DTYPES[dtype]
    tensors = {n: torch_helpers.integers(s, 1, kind, "cuda") % 5 for n, s in shapes.items()}
    results = []
    for change in (lambda t: t, torch_helpers.LAYOUTS[layout]):
        held = {**tensors, what: change(tensors[what])}
        x, values = held["x"].requires_grad_(), held["values"].requires_grad_()
        y = snack.spmm(topology, values, x)
        grads = torch.autograd.grad(y, (x, values), held["gradient"])
        s = snack.sddmm(topology, held["gradient"], x)
        results.append([y, *grads, s])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


def test_expanded_tensors(torch, snack, torch_helpers, topology):
    row = torch_helpers.integers((1, topology.k), 1, device="cuda").requires_grad_()
    entry = torch_helpers.integers((1,), 2, device="cuda").requires_grad_()
    results = []
    for change in (lambda t: t, torch.Tensor.contiguous):
        x, values = change(row.expand(6, topology.k)), change(entry.expand(topology.nnz))
        y = snack.spmm(topology, values, x)
        gradient = change(torch.tensor(3.0, device="cuda").expand(6, topology.m))
        results.append([y, *torch.autograd.grad(y, (row, entry), gradient)])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("offset", [1, 2, 3, 4])
@dtypes
def test_any_alignment(torch, snack, torch_helpers, topology, dtype, offset):
    kind = torch_helpers.DTYPES[dtype]
    values = torch_helpers.integers(topology.nnz, 1, kind, "cuda")
    memory = torch_helpers.integers(8 * topology.k + offset, 2, kind, "cuda")
    x = memory[offset:].view(8, topology.k)
    assert torch.equal(snack.spmm(topology, values, x), snack.spmm(topology, values, x.clone()))


@pytest.mark.parametrize("asked", ["x", "values", "bias"])
def test_only_the_gradients_asked_for(torch, snack, torch_helpers, topology, asked):
    shapes = {"values": (topology.nnz,), "x": (5, topology.k), "bias": (topology.m,)}
    held = {n: torch_helpers.integers(s, 1, device="cuda") for n, s in shapes.items()}
    held[asked].requires_grad_()
    snack.spmm(topology, held["values"], held["x"], bias=held["bias"]).sum().backward()
    assert [n for n, t in held.items() if t.grad is not None] == [asked]


def test_coo_kernel(torch, snack, torch_helpers, topology):
    values = torch_helpers.integers(topology.nnz, 1, device="cuda").requires_grad_()
    x = torch_helpers.integers((5, topology.k), 2, device="cuda").requires_grad_()
    bias = torch_helpers.integers(topology.m, 3, device="cuda")
    results = []
    for kernel in ("snack_coo", "csr"):
        y = snack.spmm(topology, values, x, bias=bias, kernel=kernel)
        results.append([y, *torch.autograd.grad(y.sum(), (values, x))])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


def test_update_between_forward_and_backward_raises(torch, snack, topology):
    from snack_cupy import random

    values = torch.ones(topology.nnz, device="cuda", requires_grad=True)
    y = snack.spmm(topology, values, torch.ones(2, topology.k, device="cuda"))
    other = random.random_topology(topology.shape, nnz=topology.nnz, seed=5).to_device("cuda")
    topology.update(other.row_offsets, other.columns)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
