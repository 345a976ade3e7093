"""`SnackLinear`: construction, initial values, and the place of nn.Linear."""

import copy
import re
import sys

import numpy as np
import pytest
import torch
from helpers import PROBLEMS, problem_ids
from torch import nn
from torch_helpers import (
    DTYPES,
    assert_same,
    dense_matrix,
    integers,
    make_layer,
    positions,
    seeded_layer,
    snapshot,
)

from snack_cupy import Topology, explain, random
from snack_cupy.torch import SnackLinear

dtypes = pytest.mark.parametrize("dtype", DTYPES)
HALVES = {(1, 1): 0, (3, 1): 2, (1, 5): 2, (7, 1): 4, (3, 3): 4, (3, 5): 8, (9, 1): 4, (11, 1): 6}


# Construction


@pytest.mark.parametrize("shape", HALVES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_nnz_rounds_halves_to_even(shape):
    assert SnackLinear(*shape, sparsity=0.5).nnz == HALVES[shape]


@pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.35, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("shape", [(45, 58), (64, 32), (7, 5), (0, 4), (4, 0)], ids=str)
def test_nnz_is_exact(shape, sparsity):
    k, m = shape
    layer = SnackLinear(k, m, sparsity=sparsity)
    assert layer.nnz == round((1 - sparsity) * m * k)
    assert layer.nnz == layer.topology.nnz == len(layer.values)
    if m * k:
        dense = nn.Linear(k, m)
        assert SnackLinear.from_dense(dense, sparsity=sparsity).nnz == layer.nnz
        assert layer.sparsity == pytest.approx(1 - layer.nnz / (m * k), abs=0)


def test_layer_has_the_names_of_linear():
    layer = SnackLinear(12, 7, sparsity=0.5)
    assert (layer.in_features, layer.out_features) == (12, 7)
    assert dict(layer.named_parameters()).keys() == {"values", "bias"}
    assert layer.values.shape == (42,)
    assert layer.bias.shape == (7,)
    assert layer.values.requires_grad
    assert SnackLinear(12, 7, bias=False).bias is None


@dtypes
def test_layer_dtype(dtype):
    layer = SnackLinear(12, 7, dtype=DTYPES[dtype])
    assert layer.values.dtype == layer.bias.dtype == DTYPES[dtype]
    assert (layer.row_offsets.dtype, layer.packed_columns.dtype) == (torch.int32, torch.uint8)
    assert SnackLinear(70_000, 2, sparsity=0.999).packed_columns.dtype == torch.int32


def test_layer_follows_the_default_dtype_and_device():
    torch.set_default_dtype(torch.float64)
    try:
        assert SnackLinear(4, 3).values.dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        layer = SnackLinear(4, 3)
    assert {t.device.type for t in (*layer.parameters(), *layer.buffers())} == {"meta"}


def test_layer_on_meta_tells_shapes():
    layer = SnackLinear(12, 7, device="meta")
    x = torch.empty(2, 3, 12, device="meta", requires_grad=True)
    y = layer(x)
    assert (y.shape, y.device.type) == ((2, 3, 7), "meta")
    y.sum().backward()
    assert x.grad.shape == x.shape


def test_topology_depends_on_the_generator_only():
    one, two = seeded_layer(seed=5), seeded_layer(seed=5, dtype=torch.float64)
    other = seeded_layer(seed=6)
    assert one.topology.equals(two.topology)
    assert torch.equal(one.values.double(), two.values.float().double())
    assert not one.topology.equals(other.topology)


def test_topology_from_the_default_generator():
    torch.manual_seed(3)
    one = SnackLinear(12, 7)
    torch.manual_seed(3)
    two = SnackLinear(12, 7)
    assert_same(snapshot(one), snapshot(two))
    assert not one.topology.equals(SnackLinear(12, 7).topology)


def test_given_topology_is_copied():
    topology = random.random_topology((7, 12), density=0.5, seed=1)
    layer = SnackLinear(12, 7, topology=topology, sparsity=0.99)
    assert layer.topology.equals(topology)
    topology.columns[...] = 0
    assert not layer.topology.equals(topology)


WRONG = {
    "in_features_negative": (
        ValueError,
        "in_features must be between 0 and .*, got -1",
        (-1, 4),
        {},
    ),
    "in_features_type": (TypeError, "in_features must be an integer, got 4.0", (4.0, 4), {}),
    "out_features_bool": (TypeError, "out_features must be an integer, got True", (4, True), {}),
    "sparsity_one": (
        ValueError,
        r"sparsity must be in \[0, 1\), got 1.0",
        (4, 4),
        {"sparsity": 1.0},
    ),
    "sparsity_negative": (
        ValueError,
        "sparsity must be in .* got -0.1",
        (4, 4),
        {"sparsity": -0.1},
    ),
    "sparsity_nan": (ValueError, "sparsity must be .* got nan", (4, 4), {"sparsity": float("nan")}),
    "sparsity_type": (TypeError, "sparsity must be a number .* got '1'", (4, 4), {"sparsity": "1"}),
    "dtype": (TypeError, "dtype must be one of .* got torch.int32", (4, 4), {"dtype": torch.int32}),
    "topology_type": (TypeError, "topology must be a .* got int", (4, 4), {"topology": 3}),
    "topology_shape": (
        ValueError,
        r"topology must have shape \(4, 5\), got \(5, 4\)",
        (5, 4),
        {"topology": Topology.from_mask(np.ones((5, 4)))},
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_layer_refuses(case):
    exception, message, arguments, options = WRONG[case]
    with pytest.raises(exception, match="^SnackLinear: " + message):
        SnackLinear(*arguments, **options)


# Initial values


@dtypes
def test_initial_values_lie_within_the_bound_of_their_row(dtype):
    counts = np.array([0, 1, 2, 4, 64, 7])
    mask = np.arange(64) < counts[:, None]
    topology = Topology.from_mask(mask)
    layer = SnackLinear(64, 6, topology=topology, dtype=DTYPES[dtype])
    bound = torch.tensor(counts.clip(1) ** -0.5).to(DTYPES[dtype])
    assert (layer.values.abs() <= bound[topology.row]).all()
    assert (layer.bias.abs() <= bound).all()
    assert layer.bias[0] == 0  # a row without connections gives nothing
    assert layer.values.unique().numel() > 30


def test_initial_values_are_uniform():
    layer = SnackLinear(200, 200, sparsity=0.5)
    scaled = (
        layer.values.detach()
        * torch.from_numpy(layer.topology.fan_in).sqrt()[
            torch.from_numpy(layer.topology.row).long()
        ]
    )
    # 20,000 numbers uniform on [-1, 1]: mean 0 and variance 1/3, each within 6 standard errors.
    assert abs(scaled.mean()) < 6 * (1 / 3 / 20_000) ** 0.5
    assert abs(scaled.square().mean() - 1 / 3) < 6 * (4 / 45 / 20_000) ** 0.5
    assert scaled.abs().max() > 0.999


def test_reset_parameters_draws_anew_and_keeps_the_topology():
    layer = seeded_layer()
    before = snapshot(layer)
    layer.reset_parameters(torch.Generator().manual_seed(9))
    assert not torch.equal(layer.values, before["values"])
    assert torch.equal(layer.row_offsets, before["row_offsets"])
    first = layer.values.detach().clone()
    layer.reset_parameters(torch.Generator().manual_seed(9))
    assert torch.equal(layer.values, first)


def test_to_empty_then_reset_needs_the_topology_of_a_checkpoint():
    layer = SnackLinear(12, 7, sparsity=0.5, device="meta").to_empty(device="cpu")
    source = seeded_layer(sparsity=0.25)
    layer.load_state_dict(source.state_dict())
    x = integers((3, 12))
    assert torch.equal(layer(x), source(x))


# In the place of nn.Linear


@dtypes
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("lead", [(), (1,), (5,), (2, 3), (2, 0, 3), (1, 2, 1, 3)], ids=str)
def test_layer_computes_what_linear_does(lead, bias, dtype):
    layer = seeded_layer(sparsity=0.5, bias=bias, dtype=DTYPES[dtype])
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(integers(parameter.shape, 3))  # so that sums are exact
    dense = layer.to_dense()
    x = integers((*lead, 12), 4, DTYPES[dtype]) % 4
    x, x_dense = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, y_dense = layer(x), dense(x_dense)
    assert torch.equal(y, y_dense)
    gradient = integers(y.shape, 5, DTYPES[dtype]) % 3
    y.backward(gradient)
    y_dense.backward(gradient)
    assert torch.equal(x.grad, x_dense.grad)
    assert torch.equal(layer.values.grad, dense.weight.grad.flatten()[positions(layer)])
    assert not bias or torch.equal(layer.bias.grad, dense.bias.grad)


@pytest.mark.parametrize("p", PROBLEMS[1:4], ids=problem_ids(PROBLEMS[1:4]))
def test_layer_without_anything_gives_its_bias(p):
    layer = make_layer(p)
    x = torch.randn(2, p.k, requires_grad=True)
    y = layer(x)
    assert torch.equal(y, layer.bias.expand(2, p.m))
    y.sum().backward()
    assert torch.equal(x.grad, torch.zeros(2, p.k))
    assert layer.values.grad.shape == (0,)
    assert torch.equal(layer.bias.grad, torch.full((p.m,), 2.0))


def test_layer_with_frozen_values():
    layer = seeded_layer(sparsity=0.5).requires_grad_(False)
    x = torch.ones(2, 12, requires_grad=True)
    layer(x).sum().backward()
    assert layer.values.grad is None
    torch.testing.assert_close(x.grad, dense_matrix(layer).sum(0).expand(2, 12))
    assert not layer(x.detach()).requires_grad


def test_layer_refuses_other_inputs():
    layer = seeded_layer()
    with pytest.raises(
        ValueError, match=r"^SnackLinear: x must have shape \(..., 12\), got \(2, 7\)"
    ):
        layer(torch.ones(2, 7))
    with pytest.raises(ValueError, match=r"^SnackLinear: x must have shape \(..., 12\), got \(\)"):
        layer(torch.tensor(1.0))
    message = r"^SnackLinear: x must have the dtype of values \(torch.float32\), got torch.int64"
    with pytest.raises(TypeError, match=message):
        layer(torch.ones(2, 12, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"^SnackLinear: x must be on the device of values"):
        layer(torch.ones(2, 12, device="meta"))
    with pytest.raises(TypeError, match=r"^SnackLinear: x must be a tensor, got ndarray"):
        layer(np.ones((2, 12), np.float32))


def test_layer_repr():
    text = repr(seeded_layer(64, 32))
    assert text == (
        "SnackLinear(in_features=64, out_features=32, bias=True, nnz=205, sparsity=0.8999)"
    )
    assert re.search("bias=False, nnz=0, sparsity=1", repr(SnackLinear(0, 4, bias=False)))


@dtypes
def test_layer_to_dtype_keeps_the_topology(dtype):
    layer = seeded_layer(sparsity=0.5)
    x = integers((3, 12)).requires_grad_()
    layer(x)  # with the column-major view, which must move along
    moved = copy.deepcopy(layer).to(DTYPES[dtype])
    assert moved.values.dtype == DTYPES[dtype]
    assert moved.row_offsets.dtype == torch.int32
    assert moved.topology.equals(layer.topology)
    assert torch.equal(moved.values, layer.values.to(DTYPES[dtype]))
    moved(x.to(DTYPES[dtype])).sum().backward()
    assert x.grad is not None


def test_layer_half_and_double():
    assert seeded_layer().half().values.dtype == torch.float16
    assert seeded_layer().bfloat16().values.dtype == torch.bfloat16
    assert seeded_layer().double().float().values.dtype == torch.float32


@pytest.mark.parametrize("autocast", ["float16", "bfloat16"])
@dtypes
def test_layer_autocast_gives_the_dtype_of_linear(dtype, autocast):
    layer, dense = seeded_layer(dtype=DTYPES[dtype]), nn.Linear(12, 7, dtype=DTYPES[dtype])
    x = torch.ones(3, 12, dtype=DTYPES[dtype], requires_grad=True)
    with torch.autocast("cpu", dtype=DTYPES[autocast]):
        y = layer(x)
        assert y.dtype == dense(x).dtype
    y.sum().backward()
    assert layer.values.grad.dtype == layer.bias.grad.dtype == x.grad.dtype == DTYPES[dtype]


def test_bfloat16_needs_no_ml_dtypes(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)  # importing it fails
    layer = seeded_layer(sparsity=0.5, dtype=torch.bfloat16)
    layer(torch.ones(3, 12, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    layer.restructure(0.5, key=1)
    layer.prune(5)
    layer.grow(5)
    layer.load_state_dict(layer.state_dict())
    SnackLinear.from_dense(layer.to_dense(), sparsity=0.5)


def test_explain_is_that_of_the_topology():
    layer = seeded_layer(64, 32, dtype=torch.float16)
    assert layer.explain(8) == explain(layer.topology, 8, "float16")
