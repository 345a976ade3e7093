"""Derivatives of every order of `spmm` and `sddmm`, and backward after something has changed."""

import numpy as np
import pytest
import torch
from helpers import make_topology, problem
from torch.autograd import forward_ad
from torch_helpers import dense_spmm, double_operands, operands, require_grad

from snack_cupy import dst, random
from snack_cupy.torch import sddmm, spmm


@pytest.fixture
def topology():
    return random.random_topology((5, 7), density=0.4, seed=4)


@pytest.fixture
def doubles(topology):
    return double_operands(topology)


def test_spmm_gradcheck(topology, doubles):
    values, x, bias, _ = doubles
    assert torch.autograd.gradcheck(lambda v, x, b: spmm(topology, v, x, bias=b), (values, x, bias))
    assert torch.autograd.gradcheck(lambda v, x: spmm(topology, v, x), (values, x))


def test_spmm_gradgradcheck(topology, doubles):
    values, x, bias, _ = doubles

    def product(v, x, b):
        return spmm(topology, v, x, bias=b)

    assert torch.autograd.gradgradcheck(product, (values, x, bias))


def test_sddmm_gradcheck_and_gradgradcheck(topology, doubles):
    _, right, _, left = doubles
    left = left.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: sddmm(topology, a, b), (left, right))
    assert torch.autograd.gradgradcheck(lambda a, b: sddmm(topology, a, b), (left, right))


@pytest.mark.parametrize("name", ["no_entries", "no_rows", "no_columns", "batch_0", "one_element"])
def test_spmm_gradgradcheck_where_little_is(name, rng):
    p = problem(name)
    tensors = require_grad(*operands(p, "float64", rng)[:3])
    topology = make_topology(p)

    def product(v, x, b):
        return spmm(topology, v, x, bias=b)

    assert torch.autograd.gradcheck(product, tensors)
    assert torch.autograd.gradgradcheck(product, tensors)


def test_spmm_third_derivative(topology, doubles):
    values, x, _, _ = doubles

    def third(product):
        y = product(topology, values, x).pow(4).sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), values, create_graph=True)
        return torch.autograd.grad(second.pow(2).sum(), (x, values))

    for got, want in zip(third(spmm), third(dense_spmm), strict=True):
        torch.testing.assert_close(got, want)


def test_gradient_penalty_equals_the_dense_one(topology, doubles):
    values, x, bias, _ = doubles

    def penalty(product):
        y = product(topology, values, x, bias=bias).tanh().sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        loss = (gradient.norm(dim=1) - 1).square().sum() + y
        return torch.autograd.grad(loss, (values, x, bias))

    for got, want in zip(penalty(spmm), penalty(dense_spmm), strict=True):
        torch.testing.assert_close(got, want)


def test_backward_twice_with_retain_graph(topology, doubles):
    values, x, _, gradient = doubles
    y = spmm(topology, values, x)
    first = torch.autograd.grad(y, (values, x), gradient, retain_graph=True)
    second = torch.autograd.grad(y, (values, x), gradient)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


# Updates between forward and backward


def update(topology):
    row_offsets, columns, _ = dst.restructure(topology, np.ones(topology.nnz), 0.5, key=1)
    topology.update(row_offsets, columns)


STALE = "topology of a sparse layer was modified by an inplace operation between forward and backw"


def test_spmm_backward_after_an_update_raises(topology, doubles):
    values, x, _, gradient = doubles
    y = spmm(topology, values, x)
    update(topology)
    with pytest.raises(RuntimeError, match=STALE):
        y.backward(gradient)
    assert values.grad is None
    spmm(topology, values, x).backward(gradient)  # a new forward is fine


def test_spmm_backward_after_an_update_of_nnz_raises(topology, doubles):
    values, x, _, gradient = doubles
    y = spmm(topology, values, x)
    other = random.random_topology((5, 7), density=0.5, seed=9)
    topology.update(other.row_offsets, other.columns)
    with pytest.raises(RuntimeError, match=STALE):
        y.backward(gradient)


def test_sddmm_backward_after_an_update_raises(topology, doubles):
    _, right, _, left = doubles
    s = sddmm(topology, left, right)
    update(topology)
    with pytest.raises(RuntimeError, match=STALE):
        s.sum().backward()


def test_second_backward_after_an_update_raises(topology, doubles):
    values, x, _, _ = doubles
    (first,) = torch.autograd.grad(spmm(topology, values, x).sum(), x, create_graph=True)
    update(topology)
    with pytest.raises(RuntimeError, match=STALE):
        first.sum().backward()


def test_backward_after_values_changed_raises(topology, doubles):
    values, x, _, gradient = doubles
    y = spmm(topology, values, x)
    with torch.no_grad():
        values.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(gradient)


# Forward mode: there is none, and a product without a tangent would be a wrong derivative


@pytest.mark.parametrize("recording", [True, False], ids=["grad", "no_grad"])
def test_forward_mode_is_refused(topology, doubles, recording):
    values, x, _, gradient = (tensor.detach() for tensor in doubles)
    with torch.set_grad_enabled(recording), forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="forward mode AD"):
            spmm(topology, values, dual)
        with pytest.raises(NotImplementedError, match="forward mode AD"):
            sddmm(topology, gradient, dual)
        torch.testing.assert_close(spmm(topology, values, x), dense_spmm(topology, values, x))


def test_forward_mode_of_a_backward_is_refused(topology, doubles):
    values, x, _, gradient = doubles
    y = spmm(topology, values, x)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(gradient, torch.ones_like(gradient))
        with pytest.raises(NotImplementedError, match="forward mode AD"):
            torch.autograd.grad(y, x, dual)
