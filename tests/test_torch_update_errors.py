"""Updates that must not pass: stale graphs, state that cannot follow, wrong arguments."""

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch_helpers import (
    TARGET,
    UPDATES,
    X,
    assert_same,
    make_mlp,
    seeded_layer,
    snapshot,
    trained,
)

from snack_cupy import dst
from snack_cupy.torch import remap_optimizer_state, restructuring

updates = pytest.mark.parametrize("update", UPDATES)


# Between forward and backward

STALE = "modified by an inplace operation"
# Where sizes differ, checkpointing may notice first that the recomputed tensors do.
STALE_CHECKPOINT = STALE + "|Recomputed values for the following tensors have different metadata"


@updates
@pytest.mark.parametrize("frozen", [False, True], ids=["training", "frozen_values"])
def test_update_between_forward_and_backward_raises(update, frozen):
    layer = seeded_layer(sparsity=0.5)
    layer.values.requires_grad_(not frozen)
    x = X.clone().requires_grad_()
    y = layer(x)
    UPDATES[update](layer, key=5)
    with pytest.raises(RuntimeError, match=STALE):
        y.sum().backward()
    layer(x).sum().backward()


@updates
@pytest.mark.parametrize("which", [0, 2])
def test_update_under_checkpointing_raises(update, which):
    model = make_mlp((12, 14, 7), sparsity=0.5)
    y = checkpoint(model, X.clone().requires_grad_(), use_reentrant=False)
    UPDATES[update](model[which], key=5)
    with pytest.raises(RuntimeError, match=STALE_CHECKPOINT):
        y.sum().backward()


def test_checkpointing_without_update_gives_the_same_gradients():
    model = make_mlp((12, 14, 7), sparsity=0.5)
    results = []
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=False)):
        x = X.clone().requires_grad_()
        results.append(torch.autograd.grad(run(x).sum(), (x, *model.parameters())))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


# State

STRANGE = {
    "blocks": (
        torch.ones(3),
        r"optimizer state 'strange' must hold one entry per connection \(42\)",
    ),
    "matrix": (torch.ones(42, 2), r"or a scalar to follow an update, got \(42, 2\)"),
    "list": ([torch.ones(42)], "or a scalar to follow an update, got list"),
}


@updates
@pytest.mark.parametrize("case", STRANGE)
def test_state_that_cannot_follow_is_refused(update, case):
    layer, optimizer = trained()
    optimizer.state[layer.values]["strange"], message = STRANGE[case]
    before = snapshot(layer, optimizer)
    before.pop("strange")
    with pytest.raises(ValueError, match="^restructure: .*" + message):
        UPDATES[update](layer, optimizer=optimizer, key=5)
    after = snapshot(layer, optimizer)
    after.pop("strange")
    assert_same(after, before)


def test_lbfgs_is_refused_once_it_has_state():
    layer = seeded_layer(sparsity=0.5)
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = (layer(X) - TARGET).square().mean()
        loss.backward()
        return loss

    layer.restructure(0.4, optimizer=optimizer, key=5)
    optimizer.step(closure)
    before = snapshot(layer)
    with pytest.raises(
        ValueError, match=r"optimizer must keep its state per parameter .* got LBFGS"
    ):
        layer.restructure(0.4, optimizer=optimizer, key=5)
    assert_same(snapshot(layer), before)


# Refusals

WRONG = {
    "prune_fraction": (ValueError, r"prune: amount must be .* in \[0, 1\], got 1.5", "prune", 1.5),
    "prune_nan": (ValueError, "prune: amount must be .* got nan", "prune", float("nan")),
    "prune_negative": (ValueError, "prune: amount must be between 0 and 42, got -1", "prune", -1),
    "prune_many": (ValueError, "prune: amount must be between 0 and 42, got 43", "prune", 43),
    "prune_bool": (TypeError, "prune: amount must be an integer, got True", "prune", True),
    "prune_text": (TypeError, "prune: amount must be an integer, got '1'", "prune", "1"),
    "grow_many": (ValueError, "grow: amount must be between 0 and 42, got 43", "grow", 43),
    "restructure_above": (ValueError, r"drop_fraction must be in .* got 1.1", "restructure", 1.1),
    "restructure_nan": (ValueError, "drop_fraction must be .* got nan", "restructure", np.nan),
}


@pytest.mark.parametrize("case", WRONG)
def test_update_refuses_amounts(case):
    exception, message, method, amount = WRONG[case]
    layer, optimizer = trained()
    before = snapshot(layer, optimizer)
    with pytest.raises(exception, match=message):
        getattr(layer, method)(amount, optimizer=optimizer)
    assert_same(snapshot(layer, optimizer), before)


@pytest.mark.parametrize("update", UPDATES)
def test_update_refuses_what_is_no_optimizer(update):
    layer = seeded_layer(sparsity=0.5)
    before = snapshot(layer)
    message = "optimizer must be a torch.optim.Optimizer, got dict"
    with pytest.raises(TypeError, match=message):
        UPDATES[update](layer, optimizer={}, key=1)
    assert_same(snapshot(layer), before)
    remap = dst.Remap.identity(layer.nnz)
    with pytest.raises(TypeError, match=message):
        remap_optimizer_state({}, layer.values, remap)
    with pytest.raises(TypeError, match=r"remap must be a snack_cupy.dst.Remap, got ndarray"):
        remap_optimizer_state(torch.optim.SGD([layer.values]), layer.values, remap.new_to_old)


def test_update_refuses_other_arguments():
    layer, optimizer = trained()
    before = snapshot(layer, optimizer)
    with pytest.raises(ValueError, match=r"criterion must be one of .* got 'largest'"):
        layer.restructure(0.4, criterion="largest", optimizer=optimizer)
    with pytest.raises(ValueError, match=r"key must be between 0 and .* got -1"):
        layer.grow(3, key=-1, optimizer=optimizer)
    assert_same(snapshot(layer, optimizer), before)


@updates
def test_update_that_fails_late_changes_nothing(update, monkeypatch):
    layer, optimizer = trained()
    before = snapshot(layer, optimizer)

    def fail(layer, optimizer):
        raise MemoryError("no room")

    monkeypatch.setattr(restructuring, "_reserve", fail)
    with pytest.raises(MemoryError, match="no room"):
        UPDATES[update](layer, optimizer=optimizer, key=5)
    assert_same(snapshot(layer, optimizer), before)
