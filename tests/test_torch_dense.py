"""A sparse layer and dense weights: what `weight` tells, `from_dense`, `to_dense`."""

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
)

from snack_cupy import Topology
from snack_cupy.torch import SnackLinear, SparseWeight

dtypes = pytest.mark.parametrize("dtype", DTYPES)


# The weight property


def test_weight_tells_facts_without_a_dense_matrix():
    layer = SnackLinear(40_000, 30_000, sparsity=0.999999, dtype=torch.float16)
    weight = layer.weight
    assert isinstance(weight, SparseWeight)
    assert (weight.shape, weight.size(), weight.size(1)) == ((30_000, 40_000),) * 2 + (40_000,)
    assert (weight.dtype, weight.device) == (torch.float16, torch.device("cpu"))
    assert (weight.ndim, weight.dim(), weight.numel()) == (2, 2, 1_200_000_000)
    assert weight.requires_grad
    assert not weight.is_cuda
    layer.requires_grad_(False)
    assert not layer.weight.requires_grad


def test_weight_repr():
    text = repr(seeded_layer(sparsity=0.5).weight)
    assert text == "SparseWeight(shape=(7, 12), nnz=42, dtype=torch.float32, device='cpu')"


USES = {
    "add": lambda w: w + 1,
    "radd": lambda w: 1 + w,
    "matmul": lambda w: w @ torch.ones(12),
    "rmatmul": lambda w: torch.ones(7) @ w,
    "neg": lambda w: -w,
    "compare": lambda w: w > 0,
    "getitem": lambda w: w[0],
    "setitem": lambda w: w.__setitem__(0, 1.0),
    "iter": lambda w: list(w),
    "t": lambda w: w.t(),
    "T": lambda w: w.T,
    "data": lambda w: w.data,
    "grad": lambda w: w.grad,
    "method": lambda w: w.abs(),
    "function": lambda w: torch.norm(w),
    "linear": lambda w: nn.functional.linear(torch.ones(12), w),
    "init": lambda w: nn.init.xavier_uniform_(w),
    "numpy": lambda w: np.asarray(w),
}


@pytest.mark.parametrize("use", USES)
def test_weight_refuses_to_compute(use):
    weight = seeded_layer().weight
    message = r"^weight\..*: a sparse layer stores no dense weight; use layer.values \(nnz,\)"
    with pytest.raises(TypeError, match=message):
        USES[use](weight)


def test_weight_has_no_other_attributes_and_is_no_tensor():
    weight = seeded_layer().weight
    with pytest.raises(AttributeError, match="SparseWeight has no attribute 'nonsense'"):
        _ = weight.nonsense
    assert not isinstance(weight, torch.Tensor)


def test_weight_cannot_be_assigned():
    layer = seeded_layer()
    with pytest.raises(KeyError, match="attribute 'weight' already exists"):
        layer.weight = nn.Parameter(torch.ones(7, 12))
    with pytest.raises(AttributeError):
        layer.weight = torch.ones(7, 12)
    assert dict(layer.named_parameters()).keys() == {"values", "bias"}


# From and to dense


@dtypes
def test_from_dense_keeps_the_largest(dtype):
    dense = nn.Linear(9, 6, dtype=DTYPES[dtype])
    layer = SnackLinear.from_dense(dense, sparsity=0.7)
    kept = dense.weight.detach().abs().flatten()[positions(layer)]
    order = dense.weight.detach().abs().flatten().sort(descending=True).values
    assert torch.equal(kept.sort(descending=True).values, order[: layer.nnz])
    assert torch.equal(layer.values, dense.weight.detach().flatten()[positions(layer)])
    assert torch.equal(layer.bias, dense.bias)


def test_from_dense_ties_keep_the_lower_index():
    dense = nn.Linear(5, 2, bias=False)
    with torch.no_grad():
        dense.weight.copy_(torch.tensor([[1.0, -2, 1, -1, 2], [1, 3, -1, 1, 1]]))
    layer = SnackLinear.from_dense(dense, sparsity=0.5)
    assert positions(layer).tolist() == [0, 1, 2, 4, 6]
    assert layer.values.tolist() == [1, -2, 1, 2, 3]
    assert layer.bias is None


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int64], ids=str)
def test_from_dense_by_a_mask(dtype):
    dense = nn.Linear(5, 3)
    mask = torch.tensor([[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], dtype=dtype)
    layer = SnackLinear.from_dense(dense, mask=mask)
    assert layer.topology.equals(Topology.from_mask(mask.numpy()))
    assert torch.equal(dense_matrix(layer), dense.weight.detach() * mask)


@pytest.mark.parametrize("empty", [False, True], ids=["ones", "zeros"])
def test_from_dense_by_an_extreme_mask(empty):
    dense = nn.Linear(5, 3)
    layer = SnackLinear.from_dense(dense, mask=torch.full((3, 5), not empty))
    assert layer.nnz == 15 * (not empty)
    x = integers((2, 5))
    want = dense.bias.expand(2, 3) if empty else dense(x)
    torch.testing.assert_close(layer(x), want)


def test_from_dense_takes_over_mode_and_frozen_parameters():
    dense = nn.Linear(5, 3).eval()
    dense.bias.requires_grad_(False)
    layer = SnackLinear.from_dense(dense, sparsity=0.5)
    assert not layer.training
    assert (layer.values.requires_grad, layer.bias.requires_grad) == (True, False)
    back = layer.to_dense()
    assert not back.training
    assert (back.weight.requires_grad, back.bias.requires_grad) == (True, False)
    dense.weight.requires_grad_(False)
    assert not SnackLinear.from_dense(dense, sparsity=0.5).to_dense().weight.requires_grad


def test_from_dense_shares_nothing():
    dense = nn.Linear(5, 3)
    layer = SnackLinear.from_dense(dense, mask=torch.ones(3, 5))
    weight = dense.weight.detach().clone()
    with torch.no_grad():
        layer.values.zero_()
        layer.bias.zero_()
    assert torch.equal(dense.weight, weight)
    assert dense.bias.any()


DENSE = nn.Linear(5, 3)
FROM_DENSE_WRONG = {
    "linear_type": (TypeError, "linear must be a torch.nn.Linear, got Identity", nn.Identity(), {}),
    "neither": (TypeError, "sparsity or mask must be given, .* got neither", DENSE, {}),
    "both": (
        TypeError,
        "sparsity or mask must be given, .* got both",
        DENSE,
        {"sparsity": 0.5, "mask": torch.ones(3, 5)},
    ),
    "sparsity": (ValueError, r"sparsity must be in \[0, 1\), got 1.5", DENSE, {"sparsity": 1.5}),
    "mask_type": (
        TypeError,
        "mask must be a tensor, got ndarray",
        DENSE,
        {"mask": np.ones((3, 5))},
    ),
    "mask_shape": (
        ValueError,
        r"mask must have shape \(3, 5\), got \(5, 3\)",
        DENSE,
        {"mask": torch.ones(5, 3)},
    ),
}


@pytest.mark.parametrize("case", FROM_DENSE_WRONG)
def test_from_dense_refuses(case):
    exception, message, linear, options = FROM_DENSE_WRONG[case]
    with pytest.raises(exception, match=r"^SnackLinear.from_dense: " + message):
        SnackLinear.from_dense(linear, **options)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("p", PROBLEMS[:-2], ids=problem_ids(PROBLEMS[:-2]))
@dtypes
def test_to_dense_and_back(p, dtype):
    layer = make_layer(p, dtype)
    dense = layer.to_dense()
    assert type(dense) is nn.Linear
    assert torch.equal(dense.weight, dense_matrix(layer))
    assert torch.equal(dense.bias, layer.bias)
    if p.m * p.k:
        mask = dense_matrix(layer, torch.ones(p.nnz))
        again = SnackLinear.from_dense(dense, mask=mask)
        assert_same(again.state_dict(), layer.state_dict())


def test_conversions_draw_no_random_numbers():
    dense = nn.Linear(5, 3)
    state = torch.get_rng_state()
    SnackLinear.from_dense(dense, sparsity=0.5).to_dense()
    assert torch.equal(torch.get_rng_state(), state)
