"""Products by the dense form of the matrix: exact, bounded, and as PyTorch's settings have it."""

import numpy as np
import pytest
from gpu_arrays import put
from helpers import DTYPES, assert_exact, exact_pair

import snack_cupy
from snack_cupy import Topology, _cost, _product, dispatch, ops

SHAPE = (300, 520)
BATCH = 64


@pytest.fixture
def host(rng):
    return Topology.from_mask(rng.random(SHAPE) < 0.1)


@pytest.fixture
def always(monkeypatch):
    """Wherever it is allowed the dense form is expected to be faster."""
    monkeypatch.setattr(_cost, "product_microseconds", lambda *sizes: 0.0)
    dispatch._plan.cache_clear()
    yield
    dispatch._plan.cache_clear()


@pytest.fixture
def torch(cp):
    torch = pytest.importorskip("torch")
    from snack_cupy.torch import cuda

    cuda._plans.clear()
    yield torch
    cuda._plans.clear()


def dense_form(host, values):
    dense = np.zeros(host.shape)
    dense[host.row, host.col] = values
    return dense


@pytest.mark.parametrize("batch_major", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_product_of_arrays(cp, rng, host, always, dtype, batch_major):
    topology = host.to_device("cuda")
    values, x = exact_pair(rng, host.nnz, (BATCH, SHAPE[1]), dtype)
    dy = np.sign(rng.standard_normal((BATCH, SHAPE[0]))).astype(DTYPES[dtype])
    bias = (np.arange(SHAPE[0]) % 5).astype(DTYPES[dtype])
    wide = dense_form(host, values)
    y = x.astype(np.float64) @ wide.T + bias
    dx, dw = dy.astype(np.float64) @ wide, dy.astype(np.float64).T @ x.astype(np.float64)
    turn = (lambda a: a) if batch_major else (lambda a: np.ascontiguousarray(a.T))
    given, keywords = put(values), {"batch_major": batch_major}
    x, dy = put(turn(x)), put(turn(dy))
    problem = ops.problem_of("spmm", topology, BATCH, dtype, batch_major)
    assert dispatch.plan(problem, 0).product
    assert_exact(snack_cupy.spmm(topology, given, x, **keywords), turn(y - bias))
    assert_exact(snack_cupy.spmm(topology, given, x, bias=put(bias), **keywords), turn(y))
    assert_exact(snack_cupy.spmm_transposed(topology, given, dy, **keywords), turn(dx))
    assert_exact(snack_cupy.sddmm(topology, dy, x, **keywords), dw[host.row, host.col])


def test_product_has_a_limit(cp, host, always, monkeypatch):
    topology = host.to_device("cuda")
    nbytes = 2 * SHAPE[0] * SHAPE[1]
    for limit, product in ((nbytes, True), (nbytes - 1, False), (0, False)):
        monkeypatch.setattr(_product, "_limit", limit)
        problem = ops.problem_of("spmm", topology, BATCH, "float16", True)
        assert dispatch.plan(problem, 0).product is product


def test_product_is_not_captured_by_cupy(cp, rng, host, always):
    topology = host.to_device("cuda")
    values, x = (put(a) for a in exact_pair(rng, host.nnz, (BATCH, SHAPE[1]), "float32"))
    want = snack_cupy.spmm(topology, values, x, batch_major=True)
    out = cp.empty_like(want)
    stream = cp.cuda.Stream(non_blocking=True)
    problem = ops.problem_of("spmm", topology, BATCH, "float32", True, scratch=0)
    dispatch.plan(problem, 0)
    with stream:
        stream.begin_capture()
        snack_cupy.spmm(topology, values, x, batch_major=True, out=out)
        graph = stream.end_capture()
        graph.launch()
        stream.synchronize()
    assert_exact(out, want.get())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_product_of_a_layer(torch, rng, host, always, dtype):
    from snack_cupy.torch import SnackLinear

    layer = SnackLinear.from_dense(torch.nn.Linear(SHAPE[1], SHAPE[0]), sparsity=0.9)
    layer = layer.cuda().to(getattr(torch, dtype))
    x = torch.randn(BATCH, SHAPE[1], device="cuda", dtype=layer.values.dtype, requires_grad=True)
    y = layer(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    wide = dense_form(layer.topology.to_device("cpu"), layer.values.detach().cpu().double())
    wide = torch.from_numpy(wide).cuda()
    inputs, grad = x.detach().double(), dy.double()
    row, col = (
        torch.as_tensor(a.get()).long().cuda() for a in (layer.topology.row, layer.topology.col)
    )
    tolerance = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    for got, want in (
        (y, inputs @ wide.T + layer.bias.double()),
        (x.grad, grad @ wide),
        (layer.values.grad, (grad.T @ inputs)[row, col]),
    ):
        assert (got.double() - want).abs().max() <= tolerance * want.abs().max()


def test_product_in_a_graph(torch, host, always):
    from snack_cupy.torch import SnackLinear

    layer = SnackLinear(SHAPE[1], SHAPE[0], sparsity=0.9, device="cuda", dtype=torch.float16)
    x = torch.randn(BATCH, SHAPE[1], device="cuda", dtype=torch.float16)
    with torch.no_grad():
        layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        x.mul_(2)
        layer.values.mul_(0.5)
        graph.replay()
        assert torch.equal(y, layer(x))


def test_tf32_only_where_pytorch_allows_it(torch, host, always):
    from snack_cupy.torch import SnackLinear, scratch

    matmul = torch.backends.cuda.matmul
    layer = SnackLinear(SHAPE[1], SHAPE[0], sparsity=0.9, device="cuda")
    x = torch.randn(BATCH, SHAPE[1], device="cuda")
    dense = layer.to_dense()
    before = matmul.fp32_precision
    try:
        results = {}
        for precision in ("ieee", "tf32"):
            matmul.fp32_precision = precision
            assert scratch.tf32_allowed() is (precision == "tf32")
            with torch.no_grad():
                results[precision] = layer(x)
                assert torch.equal(results[precision], dense(x))
        assert not torch.equal(*results.values())
    finally:
        matmul.fp32_precision = before


def test_autocast_leaves_the_precision_of_the_product_alone(torch, host, always):
    from snack_cupy.torch import SnackLinear

    layer = SnackLinear(SHAPE[1], SHAPE[0], sparsity=0.9, device="cuda")
    x = torch.randn(BATCH, SHAPE[1], device="cuda")
    with torch.no_grad(), torch.autocast("cuda", torch.float16):
        y = layer(x)
    assert y.dtype is torch.float16
    with torch.no_grad():
        half = layer.half()(x.half())
    assert torch.equal(y, half)
