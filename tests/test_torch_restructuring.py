"""Updates of a layer: all that is kept per connection follows, in place where nnz is unchanged."""

import numpy as np
import pytest
import torch
from torch_helpers import (
    DTYPES,
    OPTIMIZERS,
    TARGET,
    UPDATES,
    X,
    assert_same,
    by_position,
    per_connection,
    positions,
    seeded_layer,
    snapshot,
    train_step,
    trained,
)

from snack_cupy import dst
from snack_cupy.dst import Remap
from snack_cupy.torch import SnackLinear, remap_optimizer_state

optimizers = pytest.mark.parametrize("optimizer_name", OPTIMIZERS)

CONSTANT = [name for name in UPDATES if name.startswith("restructure")]
RESIZING = [name for name in UPDATES if not name.startswith("restructure")]
updates = pytest.mark.parametrize("update", UPDATES)


# What follows


@updates
@optimizers
def test_everything_follows_the_connections(update, optimizer_name):
    layer, optimizer = trained(optimizer_name)
    before = {k: by_position(layer, v) for k, v in per_connection(layer, optimizer).items()}
    scalars = {k: v for k, v in snapshot(layer, optimizer).items() if k == "step"}
    old = positions(layer)
    remap = UPDATES[update](layer, optimizer=optimizer, key=5)
    after = {k: by_position(layer, v) for k, v in per_connection(layer, optimizer).items()}
    assert after.keys() == before.keys()
    new = positions(layer)
    survivors = set(old) & set(new)
    for name, held in after.items():
        assert len(held) == layer.nnz == remap.nnz_new
        for position, value in held.items():
            assert value == (before[name][position] if position in survivors else 0.0), name
    assert all(torch.equal(v, optimizer.state[layer.values][k]) for k, v in scalars.items())
    assert (remap.kept, remap.grown) == (len(survivors), layer.nnz - len(survivors))
    kept = remap.new_to_old >= 0
    assert np.array_equal(old[remap.new_to_old[kept]], new[kept])


def test_every_optimizer_state_is_covered():
    names = set()
    for name in OPTIMIZERS:
        layer, optimizer = trained(name)
        names |= optimizer.state[layer.values].keys()
    assert names >= {"step", "momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    assert names >= {"square_avg", "grad_avg", "sum"}


@updates
@pytest.mark.parametrize("dtype", DTYPES)
def test_updates_in_every_dtype(update, dtype):
    layer, optimizer = trained("sgd_momentum", dtype=dtype)
    before = by_position(layer, layer.values)
    UPDATES[update](layer, optimizer=optimizer, key=5)
    assert layer.values.dtype == DTYPES[dtype]
    for position, value in by_position(layer, layer.values).items():
        assert value == before.get(position, 0.0)
    train_step(
        layer, optimizer, X.to(DTYPES[dtype]).clone().requires_grad_(), TARGET.to(DTYPES[dtype])
    )


@updates
def test_topology_stays_canonical_and_the_product_right(update):
    layer, _ = trained()
    UPDATES[update](layer, key=5)
    topology = layer.topology
    assert (np.diff(topology.positions) > 0).all()
    assert (topology.nnz, topology.row_offsets[-1]) == (layer.nnz, layer.nnz)
    dense = layer.to_dense()
    x = X.clone().requires_grad_()
    torch.testing.assert_close(layer(x), dense(x))
    got, want = (torch.autograd.grad(m(x).sum(), x)[0] for m in (layer, dense))
    torch.testing.assert_close(got, want)


def test_prune_drops_the_smallest():
    layer = seeded_layer(sparsity=0.5)
    order = layer.values.detach().abs().sort(descending=True).values
    remap = layer.prune(10)
    assert (layer.nnz, remap.dropped) == (32, 10)
    assert torch.equal(layer.values.detach().abs().sort(descending=True).values, order[:32])


@pytest.mark.parametrize(
    ("amount", "left"), [(0, 42), (0.0, 42), (1, 41), (0.25, 32), (0.5, 21), (42, 0), (1.0, 0)]
)
def test_amounts_are_counts_or_fractions(amount, left):
    layer = seeded_layer(sparsity=0.5)
    layer.prune(amount)
    assert layer.nnz == left
    layer = seeded_layer(sparsity=0.5)
    layer.grow(amount)
    assert layer.nnz == 84 - left


def test_regrown_connections_survive():
    layer, optimizer = trained("adam")
    before = {k: by_position(layer, v) for k, v in per_connection(layer, optimizer).items()}
    layer.grow(42)  # full: what is dropped now can only grow again
    full = snapshot(layer)["values"]
    layer.values.grad = None
    remap = layer.restructure(0.5, key=3)
    assert remap.grown == 0
    assert torch.equal(layer.values, full)
    held = by_position(layer, layer.values)
    assert all(held[p] == v for p, v in before["values"].items())


def test_pruned_to_nothing_and_grown_again():
    layer, optimizer = trained("adam")
    layer.prune(1.0, optimizer=optimizer)
    x = X.clone().requires_grad_()
    output = layer(x)  # kept alive: its graph must not hinder what comes
    assert torch.equal(output, layer.bias.expand(6, 7))
    output.sum().backward()
    layer.grow(5, optimizer=optimizer, key=1)
    train_step(layer, optimizer, x, TARGET)
    assert layer.values.count_nonzero() > 0


# In place


@pytest.mark.parametrize("update", CONSTANT)
@optimizers
def test_constant_nnz_is_rewritten_in_place(update, optimizer_name):
    layer, optimizer = trained(optimizer_name)

    def held():
        state = {k: v for k, v in optimizer.state[layer.values].items() if v is not None}
        return {
            **dict(layer.named_parameters()),
            **dict(layer.named_buffers()),
            "grad": layer.values.grad,
            **{f"state.{k}": v for k, v in state.items()},
        }

    before = held()
    addresses = {k: v.data_ptr() for k, v in before.items() if isinstance(v, torch.Tensor)}
    topology = layer.topology
    UPDATES[update](layer, optimizer=optimizer, key=5)
    after = held()
    assert {"values", "grad", "row_offsets", "packed_columns", "permutation"} <= after.keys()
    assert all(after[k] is v for k, v in before.items() if isinstance(v, torch.Tensor))
    assert {k: after[k].data_ptr() for k in addresses} == addresses
    assert layer.topology is topology


@pytest.mark.parametrize("update", RESIZING)
def test_resizing_keeps_the_parameter(update):
    layer, optimizer = trained()
    values, bias = layer.values, layer.bias
    version = values._version
    UPDATES[update](layer, optimizer=optimizer, key=5)
    assert layer.values is values
    assert layer.bias is bias
    assert values._version > version
    assert values.grad.shape == values.shape
    assert optimizer.param_groups[0]["params"][0] is values


@pytest.mark.parametrize("update", RESIZING)
def test_training_goes_on_after_resizing_with_an_old_graph_alive(update):
    layer, optimizer = trained()
    x = X.clone().requires_grad_()
    loss = layer(x).square().mean()
    loss.backward()
    optimizer.step()
    UPDATES[update](layer, optimizer=optimizer, key=5)
    hooked = []
    layer.values.register_post_accumulate_grad_hook(lambda p: hooked.append(p.grad.shape))
    optimizer.zero_grad()
    new_loss = layer(x).square().mean()
    new_loss.backward()
    optimizer.step()
    assert hooked == [(layer.nnz,)]
    assert loss.grad_fn is not None


@updates
def test_frozen_layers_can_be_updated(update):
    layer = seeded_layer(sparsity=0.5).requires_grad_(False)
    UPDATES[update](layer, key=5)
    assert not layer.values.requires_grad
    torch.testing.assert_close(layer(X), layer.to_dense()(X))


# Optimisers


@updates
@optimizers
def test_update_before_the_first_step(update, optimizer_name):
    layer = seeded_layer(sparsity=0.5)
    optimizer = OPTIMIZERS[optimizer_name](layer.parameters())
    UPDATES[update](layer, optimizer=optimizer, key=5)
    train_step(layer, optimizer, X, TARGET)
    for name, tensor in per_connection(layer, optimizer).items():
        assert tensor.shape == (layer.nnz,), name


@optimizers
def test_grown_connections_move_at_the_next_step(optimizer_name):
    layer, optimizer = trained(optimizer_name)
    remap = layer.restructure(0.5, optimizer=optimizer, key=5)
    grown = torch.from_numpy(remap.new_to_old < 0)
    assert grown.any()
    assert not layer.values[grown].any()
    train_step(layer, optimizer, X, TARGET)
    moved = layer.values.grad != 0
    assert (layer.values[grown & moved] != 0).all()
    assert (grown & moved).any()


def test_dropped_connections_do_not_revive_by_weight_decay_or_momentum():
    layer, optimizer = trained("adamw")
    held = set(positions(layer))
    layer.prune(10, optimizer=optimizer)
    kept = set(positions(layer))
    for _ in range(3):
        train_step(layer, optimizer, X, TARGET)
    assert set(positions(layer)) == kept < held


def test_update_after_add_param_group():
    layer, optimizer = trained()
    other = seeded_layer(seed=2)
    optimizer.add_param_group({"params": other.parameters(), "lr": 0.5})
    other.restructure(0.3, optimizer=optimizer, key=1)
    layer.restructure(0.3, optimizer=optimizer, key=1)
    train_step(torch.nn.Sequential(layer), optimizer, X, TARGET)


def test_unknown_state_of_the_right_length_follows():
    layer, optimizer = trained()
    state = optimizer.state[layer.values]
    state["ema"] = layer.values.detach().clone()
    state["count"], state["flag"], state["one"] = 7, None, torch.ones(1)
    state["mask"] = layer.values.detach() > 0
    layer.restructure(0.4, optimizer=optimizer, key=5)
    assert torch.equal(state["ema"], layer.values)
    assert torch.equal(state["mask"], layer.values > 0)
    assert (state["count"], state["flag"], state["one"].tolist()) == (7, None, [1.0])


def test_remap_optimizer_state_alone():
    layer, optimizer = trained("adam")
    average = optimizer.state[layer.values]["exp_avg"]
    want = average.clone()[[2, 0]]
    remap = Remap(np.array([2, -1, 0], np.int32), nnz_old=42)
    remap_optimizer_state(optimizer, layer.values, remap)
    got = optimizer.state[layer.values]["exp_avg"]
    assert got.tolist() == [want[0], 0.0, want[1]]
    with pytest.raises(ValueError, match=r"one entry per connection \(42\).*got \(3,\)"):
        remap_optimizer_state(optimizer, layer.values, remap)


# Determinism


@updates
def test_updates_are_a_function_of_the_key(update):
    layers = [trained()[0] for _ in range(3)]
    for layer, key in zip(layers, (5, 5, 6), strict=True):
        UPDATES[update](layer, key=key)
    assert_same(snapshot(layers[0]), snapshot(layers[1]))
    if update not in ("restructure_nothing", "prune", "prune_all", "grow_all"):
        assert not layers[0].topology.equals(layers[2].topology)


def test_update_is_that_of_the_arrays():
    layer, _ = trained()
    values = layer.values.detach().numpy().copy()
    row_offsets, columns, remap = dst.restructure(layer.topology, values, 0.4, key=5)
    got = layer.restructure(0.4, key=5)
    assert np.array_equal(got.new_to_old, remap.new_to_old)
    assert np.array_equal(layer.topology.row_offsets, row_offsets)
    assert np.array_equal(layer.topology.columns, columns)


def test_update_while_the_gradient_is_populated():
    layer, optimizer = trained("sgd_momentum")
    layer.zero_grad()
    layer(X).square().mean().backward()
    layer.prune(0.5, optimizer=optimizer)
    layer(X).square().mean().backward()  # accumulates into what followed
    layer.restructure(0.5, optimizer=optimizer, key=1)
    optimizer.step()


def test_exact_nnz_after_many_updates():
    layer = SnackLinear(30, 20, sparsity=0.9)
    for key in range(50):
        layer.restructure(0.3, key=key)
        assert layer.nnz == layer.topology.nnz == 60
        assert (np.diff(layer.topology.positions) > 0).all()


def test_restructure_regrown_connections_survive_or_start_anew():
    def regrown(mode):
        layer = SnackLinear(8, 8, sparsity=0.2, generator=torch.Generator().manual_seed(0))
        before = layer.topology.positions.copy()
        remap = layer.restructure(0.9, regrown=mode, key=1)
        stays = np.isin(layer.topology.positions, before)
        return layer.values.detach().numpy(), stays, remap

    values, stays, remap = regrown("survive")
    assert remap.kept == stays.sum()
    assert (values[stays] != 0).all()
    values, stays, remap = regrown("reset")
    assert remap.kept < stays.sum()
    assert np.count_nonzero(values) == remap.kept
    layer = SnackLinear(8, 8)
    with pytest.raises(ValueError, match="regrown must be one of"):
        layer.restructure(0.5, regrown="maybe")
