"""`spmm` and `sddmm` on tensors: results, gradients, layouts, dtypes, refusals."""

import numpy as np
import pytest
import torch
from helpers import (
    PROBLEMS,
    assert_close,
    expected_sddmm,
    expected_spmm,
    make_topology,
    problem,
    problem_ids,
)
from torch import nn
from torch_helpers import (
    DTYPES,
    LAYOUTS,
    dense_sddmm,
    dense_spmm,
    double_operands,
    integers,
    operands,
    require_grad,
    to_numpy,
)

from snack_cupy import Topology, random
from snack_cupy.torch import sddmm, spmm

problems = pytest.mark.parametrize("p", PROBLEMS, ids=problem_ids(PROBLEMS))
dtypes = pytest.mark.parametrize("dtype", DTYPES)
layouts = pytest.mark.parametrize("layout", LAYOUTS)
SMALL = problem("empty_rows_and_columns")


def expected_bias_gradient(gradient):
    """The sum over the batch, as `assert_close` wants it."""
    ones = Topology.from_mask(np.ones((1, gradient.shape[0])))
    values = np.ones(gradient.shape[0], to_numpy(gradient).dtype)
    return (part[0] for part in expected_spmm(ones, values, to_numpy(gradient)))


@pytest.fixture
def topology():
    return random.random_topology((5, 7), density=0.4, seed=4)


@pytest.fixture
def doubles(topology):
    return double_operands(topology)


# Forward and backward


@problems
@dtypes
def test_spmm_forward_and_backward(p, dtype, rng):
    topology = make_topology(p)
    values, x, bias, gradient = operands(p, dtype, rng)
    arrays = [to_numpy(t) for t in (values, x, bias, gradient)]
    values, x, bias = require_grad(values, x, bias)
    y = spmm(topology, values, x, bias=bias)
    want = expected_spmm(topology, *arrays[:2], batch_major=True, bias=arrays[2])
    assert (y.dtype, tuple(y.shape)) == (DTYPES[dtype], (p.n, p.m))
    assert_close(to_numpy(y), *want)
    y.backward(gradient)
    dx = expected_spmm(topology, arrays[0], arrays[3], batch_major=True, transposed=True)
    assert_close(to_numpy(x.grad), *dx)
    dv = expected_sddmm(topology, arrays[3], arrays[1], batch_major=True)
    assert_close(to_numpy(values.grad), *dv)
    assert_close(to_numpy(bias.grad), *expected_bias_gradient(gradient))


@problems
@dtypes
def test_sddmm_forward_and_backward(p, dtype, rng):
    topology = make_topology(p)
    gradient, right, _, left = operands(p, dtype, rng)
    arrays = [to_numpy(t) for t in (left, right, gradient)]
    left, right = require_grad(left, right)
    s = sddmm(topology, left, right)
    assert (s.dtype, tuple(s.shape)) == (DTYPES[dtype], (p.nnz,))
    assert_close(to_numpy(s), *expected_sddmm(topology, *arrays[:2], batch_major=True))
    s.backward(gradient)
    dg = expected_spmm(topology, arrays[2], arrays[1], batch_major=True)
    assert_close(to_numpy(left.grad), *dg)
    dx = expected_spmm(topology, arrays[2], arrays[0], batch_major=True, transposed=True)
    assert_close(to_numpy(right.grad), *dx)


@pytest.mark.parametrize("lead", [(), (1,), (4,), (2, 3), (2, 0, 3), (1, 1, 2, 2)], ids=str)
def test_spmm_leading_axes(topology, lead):
    values, x, bias = integers(topology.nnz, 1), integers((*lead, 7), 2), integers(5, 3)
    want = [*require_grad(values, x, bias)]
    got = [*require_grad(values, x, bias)]
    y, y_dense = spmm(topology, *got[:2], bias=got[2]), dense_spmm(topology, *want)
    assert y.shape == (*lead, 5)
    assert torch.equal(y, y_dense)
    gradient = integers(y.shape, 4)
    y.backward(gradient)
    y_dense.backward(gradient)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("lead", [(4,), (2, 3), (2, 0, 3), (1, 1, 2, 2)], ids=str)
def test_sddmm_leading_axes(topology, lead):
    left, right = integers((*lead, 5), 1), integers((*lead, 7), 2)
    got, want = require_grad(left, right), require_grad(left, right)
    s, s_dense = sddmm(topology, *got), dense_sddmm(topology, *want)
    assert torch.equal(s, s_dense)
    gradient = integers(topology.nnz, 3)
    s.backward(gradient)
    s_dense.backward(gradient)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.grad, b.grad)


def test_sddmm_of_vectors(topology):
    left, right = integers(5, 1), integers(7, 2)
    want = dense_sddmm(topology, left[None], right[None])
    assert torch.equal(sddmm(topology, left, right), want)


# Layouts


@layouts
@dtypes
@pytest.mark.parametrize("what", ["x", "values", "gradient"])
def test_spmm_layout_does_not_matter(layout, dtype, what):
    topology = make_topology(SMALL)
    shapes = {"values": (SMALL.nnz,), "x": (SMALL.n, SMALL.k), "gradient": (SMALL.n, SMALL.m)}
    tensors = {n: integers(s, len(n), DTYPES[dtype]) for n, s in shapes.items()}
    if what == "values" and layout == "transposed":
        layout = "sliced"  # a vector is its own transpose
    results = []
    for change in (lambda t: t, LAYOUTS[layout]):
        held = {**tensors, what: change(tensors[what])}
        x, values = held["x"].requires_grad_(), held["values"].requires_grad_()
        y = spmm(topology, values, x)
        results.append([y, *torch.autograd.grad(y, (x, values), held["gradient"])])
    for got, want in zip(results[1], results[0], strict=True):
        assert torch.equal(got, want)


def test_spmm_of_expanded_tensors(topology):
    row, entry = integers((1, 7), 1).requires_grad_(), integers((1,), 2).requires_grad_()
    results = []
    for change in (lambda t: t, torch.Tensor.contiguous):
        x, values = change(row.expand(6, 7)), change(entry.expand(topology.nnz))
        y = spmm(topology, values, x)
        gradient = change(torch.tensor(3.0).expand(6, 5))
        results.append([y, *torch.autograd.grad(y, (row, entry), gradient)])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@layouts
def test_sddmm_layout_does_not_matter(topology, layout):
    left, right = integers((4, 5), 1), integers((4, 7), 2)
    want = sddmm(topology, left, right)
    assert torch.equal(sddmm(topology, LAYOUTS[layout](left), LAYOUTS[layout](right)), want)
    expanded = integers((1, 7), 3).expand(4, 7)
    want = sddmm(topology, left, expanded.contiguous())
    assert torch.equal(sddmm(topology, left, expanded), want)


def test_spmm_of_a_lazily_negated_view(topology):
    x = torch.complex(integers((3, 7), 1), integers((3, 7), 2)).conj().imag
    assert x.is_neg()
    values = integers(topology.nnz, 3)
    assert torch.equal(spmm(topology, values, x), spmm(topology, values, x.clone()))


# Which gradients are asked for


@pytest.mark.parametrize("asked", ["x", "values", "bias", "x_values", "x_bias", "values_bias"])
def test_spmm_computes_only_the_gradients_asked_for(topology, doubles, asked):
    tensors = dict(zip(("values", "x", "bias"), doubles, strict=False))
    want = dense_spmm(topology, *doubles[:3])
    wanted = {n: t for n, t in tensors.items() if n in asked.split("_")}
    want = torch.autograd.grad(want, list(wanted.values()), doubles[3])
    held = {n: t.detach().requires_grad_(n in wanted) for n, t in tensors.items()}
    y = spmm(topology, held["values"], held["x"], bias=held["bias"])
    y.backward(doubles[3])
    for name, expected in zip(wanted, want, strict=True):
        torch.testing.assert_close(held[name].grad, expected)
    for name, tensor in held.items():
        assert (tensor.grad is None) == (name not in wanted)


def test_spmm_without_gradients_makes_no_graph(topology, doubles):
    values, x, bias, _ = (t.detach() for t in doubles)
    assert not spmm(topology, values, x, bias=bias).requires_grad
    with torch.no_grad():
        assert not spmm(topology, doubles[0], doubles[1], bias=doubles[2]).requires_grad
    with torch.inference_mode():
        y = spmm(topology, values, x, bias=bias)
    assert y.is_inference()
    torch.testing.assert_close(y.clone(), dense_spmm(topology, values, x, bias))


def test_spmm_gradient_of_x_alone_builds_the_column_view_late(topology, doubles):
    values, x, _, _ = doubles
    spmm(topology, values, x.detach()).sum().backward()
    assert topology._transposed is None
    spmm(topology, values, x).sum().backward()
    assert topology._transposed is not None


# Autocast


@pytest.mark.parametrize("autocast", ["float16", "bfloat16"])
@pytest.mark.parametrize("x_dtype", DTYPES)
@dtypes
def test_autocast_gives_the_dtype_of_linear(topology, dtype, x_dtype, autocast):
    weight = nn.Linear(7, 5, dtype=DTYPES[dtype])
    values = torch.randn(topology.nnz, dtype=DTYPES[dtype], requires_grad=True)
    bias = torch.zeros(5, dtype=DTYPES[dtype], requires_grad=True)
    x = torch.randn(3, 7, dtype=DTYPES[x_dtype])
    with torch.autocast("cpu", dtype=DTYPES[autocast]):
        try:
            want = weight(x).dtype
        except RuntimeError:  # float64 with another dtype: nn.Linear refuses as well
            with pytest.raises(TypeError, match="spmm: x must have the dtype of values"):
                spmm(topology, values, x, bias=bias)
            return
        y = spmm(topology, values, x, bias=bias)
    assert y.dtype == want
    y.sum().backward()
    assert values.grad.dtype == bias.grad.dtype == DTYPES[dtype]


def test_autocast_computes_in_half_precision(topology):
    x, values = torch.randn(3, 7), torch.randn(topology.nnz)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = spmm(topology, values, x)
        with torch.autocast("cpu", enabled=False):
            full = spmm(topology, values, x)
    assert full.dtype == torch.float32
    assert torch.equal(y, spmm(topology, values.bfloat16(), x.bfloat16()))


# Kernels


def test_spmm_kernel_by_name(topology, doubles):
    values, x, bias, _ = doubles
    want = dense_spmm(topology, values, x, bias)
    for kernel in ("csr", "snack_coo"):
        y = spmm(topology, values, x, bias=bias, kernel=kernel)
        torch.testing.assert_close(y, want)


def test_atomic_kernel_obeys_deterministic_algorithms(topology, doubles):
    values, x, _, _ = doubles
    torch.use_deterministic_algorithms(True)
    try:
        spmm(topology, values, x, kernel="csr").sum().backward()
        with pytest.raises(RuntimeError, match='kernel "snack_coo" sums with atomics'):
            spmm(topology, values, x, kernel="snack_coo")
    finally:
        torch.use_deterministic_algorithms(False)


# Refusals


V, X = torch.ones(14), torch.ones(2, 7)
SPMM_REFUSALS = {
    "topology_type": (
        TypeError,
        "topology must be a snack_cupy.Topology, got int",
        {"topology": 3},
    ),
    "values_type": (TypeError, "values must be a tensor, got list", {"values": [1.0]}),
    "values_dtype": (
        TypeError,
        "values must have a dtype of .*, got .*int64",
        {"values": V.long()},
    ),
    "values_length": (
        ValueError,
        r"values must have shape \(14,\), got \(13,\)",
        {"values": V[1:]},
    ),
    "values_ndim": (
        ValueError,
        r"values must have shape .*, got \(14, 1\)",
        {"values": V[:, None]},
    ),
    "values_device": (
        ValueError,
        r"values must be on the topology's device \(cpu\), got meta",
        {"values": V.to("meta")},
    ),
    "x_type": (TypeError, "x must be a tensor, got list", {"x": [1.0]}),
    "x_dtype": (
        TypeError,
        r"x must have the dtype of values \(torch.float32\), got torch.float64",
        {"x": X.double()},
    ),
    "x_features": (ValueError, r"x must have shape \(..., 7\), got \(2, 6\)", {"x": X[:, 1:]}),
    "x_ndim": (ValueError, r"x must have shape \(..., 7\), got \(\)", {"x": X[0, 0]}),
    "x_device": (
        ValueError,
        r"x must be on the device of values \(cpu\), got meta",
        {"x": X.to("meta")},
    ),
    "bias_type": (TypeError, "bias must be a tensor, got float", {"bias": 1.0}),
    "bias_shape": (
        ValueError,
        r"bias must have shape \(5,\), got \(4,\)",
        {"bias": torch.ones(4)},
    ),
    "bias_dtype": (
        TypeError,
        "bias must have the dtype of values .*, got torch.float16",
        {"bias": torch.ones(5).half()},
    ),
    "kernel_name": (ValueError, "kernel must be None or one of .*, got 'fast'", {"kernel": "fast"}),
    "kernel_dtype": (
        TypeError,
        'values must be float32 or float64 for kernel "snack_coo", got torch.float16',
        {"kernel": "snack_coo", "values": V.half(), "x": X.half()},
    ),
}


@pytest.mark.parametrize("case", SPMM_REFUSALS)
def test_spmm_refuses(case, topology):
    exception, message, changes = SPMM_REFUSALS[case]
    held = {"topology": topology, "values": V, "x": X, **changes}
    with pytest.raises(exception, match="^spmm: " + message):
        spmm(held.pop("topology"), held.pop("values"), held.pop("x"), **held)


L, R = torch.ones(2, 5), torch.ones(2, 7)
SDDMM_REFUSALS = {
    "topology_type": (
        TypeError,
        "topology must be a snack_cupy.Topology, got int",
        {"topology": 3},
    ),
    "left_type": (TypeError, "left must be a tensor, got list", {"left": [1.0]}),
    "left_dtype": (TypeError, "left must have a dtype of .*, got .*int64", {"left": L.long()}),
    "left_device": (ValueError, "left must be on the topology's device", {"left": L.to("meta")}),
    "left_features": (
        ValueError,
        r"left must have shape \(..., 5\), got \(2, 4\)",
        {"left": L[:, 1:]},
    ),
    "right_type": (TypeError, "right must be a tensor, got list", {"right": [1.0]}),
    "right_dtype": (TypeError, "right must have the dtype of left", {"right": R.double()}),
    "right_device": (ValueError, "right must be on the device of left", {"right": R.to("meta")}),
    "right_features": (
        ValueError,
        r"right must have shape \(..., 7\), got \(2, 6\)",
        {"right": R[:, 1:]},
    ),
    "leading_axes": (
        ValueError,
        r"right must have the leading axes of left \(2,\), got \(1,\)",
        {"right": R[1:]},
    ),
}


@pytest.mark.parametrize("case", SDDMM_REFUSALS)
def test_sddmm_refuses(case, topology):
    exception, message, changes = SDDMM_REFUSALS[case]
    held = {"topology": topology, "left": L, "right": R, **changes}
    with pytest.raises(exception, match="^sddmm: " + message):
        sddmm(**held)
