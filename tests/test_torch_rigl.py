"""`RigL` through an ordinary optimiser: what it looks at, and that it keeps nothing else."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_helpers import assert_same, dense_matrix, integers, make_mlp, positions, train_step

from snack_cupy import dst
from snack_cupy.torch import RigL, SnackLinear, to_array

X, TARGET = integers((6, 20), 1), integers((6, 8), 2)


def make_layer(sparsity=0.7, seed=3, **keywords):
    generator = torch.Generator().manual_seed(seed)
    return SnackLinear(20, 8, sparsity=sparsity, generator=generator, bias=False, **keywords)


def stepped(layer, method, passes, optimizer=None):
    """One observed step; returns what the layer was before the update that follows it."""
    optimizer = optimizer or torch.optim.SGD(layer.parameters(), lr=0)
    method.attach(layer, optimizer)
    before = copy.deepcopy(layer)
    passes(layer, optimizer)
    optimizer.step()
    return before


def wanted(before, fraction, left, right):
    """Positions after an update by hand, and the values there."""
    n = round(fraction * before.nnz)
    change = dst.restructure(
        before.topology.copy(),
        to_array(before.values),
        n=n,
        growth=dst.GradientGrowth(to_array(left), to_array(right)),
        key=0,
    )
    return change[0].tolist(), change[1].tolist(), change[2].apply(to_array(before.values)).tolist()


def assert_grew_by(layer, before, left, right, fraction=0.3):
    topology = layer.topology
    got = topology.row_offsets.tolist(), topology.columns.tolist(), layer.values.tolist()
    assert got == wanted(before, fraction, left, right)
    assert positions(layer).tolist() != positions(before).tolist()


def weighted(y, dy):
    """A loss whose gradient with respect to y is dy."""
    return (y * dy).sum()


def test_rigl_grows_where_the_dense_gradient_is_largest():
    layer = make_layer()
    dy = integers((6, 8), 5)
    before = stepped(layer, RigL(0.3, 1), lambda m, _: weighted(m(X), dy).backward())
    assert_grew_by(layer, before, dy, X)
    # The same by the gradient of a dense weight, without any function of the library.
    dense = before.to_dense()
    weighted(dense(X), dy).backward()
    score = dense.weight.grad.abs().flatten()
    keep = torch.ones(before.nnz, dtype=torch.bool)
    n = round(0.3 * before.nnz)
    keep[before.values.abs().argsort(stable=True)[:n]] = False
    kept = positions(before)[keep]
    score[kept] = -1
    grown = score.argsort(descending=True, stable=True)[:n]
    assert positions(layer).tolist() == sorted([*kept.tolist(), *grown.tolist()])


@pytest.mark.parametrize("set_to_none", [True, False])
def test_rigl_counts_accumulated_passes_as_one_batch(set_to_none):
    layer, dy = make_layer(), integers((6, 8), 5)

    def passes(model, optimizer):
        weighted(model(-X), 2 * dy[torch.randperm(6)]).backward()  # cleared before it counts
        optimizer.zero_grad(set_to_none=set_to_none)
        for part in (slice(0, 2), slice(2, 6)):
            weighted(model(X[part]), dy[part]).backward()

    before = stepped(layer, RigL(0.3, 1), passes)
    assert_grew_by(layer, before, dy, X)


def test_rigl_counts_every_use_of_a_layer_in_one_pass():
    layer, dy = make_layer(), integers((6, 8), 5)

    def passes(model, _):
        (weighted(model(X[:2]), dy[:2]) + weighted(model(X[2:]), dy[2:])).backward()

    method = RigL(0.3, 1)
    method.attach(layer, torch.optim.SGD(layer.parameters(), lr=0))
    passes(layer, None)
    (record,) = method._records.values()
    left, right = record.operands()
    assert torch.equal(left.T @ right, dy.T @ X)


def test_rigl_takes_inputs_of_any_shape_that_are_overwritten_later():
    layer, dy, x = make_layer(), integers((2, 3, 8), 5), X.reshape(2, 3, 20).clone()

    def passes(model, _):
        weighted(model(x), dy).backward()
        x.zero_()

    before = stepped(layer, RigL(0.3, 1), passes)
    assert_grew_by(layer, before, dy.reshape(6, 8), X)


@pytest.mark.parametrize("reentrant", [True, False])
def test_rigl_under_activation_checkpointing(reentrant):
    layer, dy, x = make_layer(), integers((6, 8), 5), X.clone().requires_grad_()

    def passes(model, _):
        weighted(checkpoint(model, x, use_reentrant=reentrant), dy).backward()

    before = stepped(layer, RigL(0.3, 1), passes)
    assert_grew_by(layer, before, dy, X)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_rigl_in_other_dtypes(dtype):
    layer, dy = make_layer(dtype=dtype), integers((6, 8), 5, dtype)
    before = stepped(layer, RigL(0.3, 1), lambda m, _: weighted(m(X.to(dtype)), dy).backward())
    n = round(0.3 * before.nnz)
    change = dst.restructure(
        before.topology.copy(),
        before.values.detach().double().numpy(),
        n=n,
        growth=dst.GradientGrowth(dy.double().numpy(), X.double().numpy()),
        key=0,
    )
    assert layer.topology.columns.tolist() == change[1].tolist()


def test_rigl_under_autocast():
    layer, dy = make_layer(), integers((6, 8), 5)

    def passes(model, _):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(X)
        weighted(y, dy.to(y.dtype)).backward()

    before = stepped(layer, RigL(0.3, 1), passes)
    assert_grew_by(layer, before, dy, X)


# When


def test_rigl_updates_on_schedule_and_keeps_nothing_between():
    model = make_mlp(sparsity=0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    method = RigL(dst.cosine(0.3, stop=12), update_every=3, start=2, stop=12)
    method.attach(model, optimizer)
    layers = [model[0], model[2]]
    seen = []
    for step in range(1, 16):
        due = step in (5, 8, 11)
        assert [bool(layer._forward_hooks) for layer in layers] == [due, due]
        before = [positions(layer).tolist() for layer in layers]
        train_step(model, optimizer, X / 8, TARGET / 8)
        if [positions(layer).tolist() for layer in layers] != before:
            seen.append(step)
    assert seen == [5, 8, 11]
    assert (method.step, method.updates) == (15, 3)
    assert [layer.nnz for layer in layers] == [160, 64]
    assert method._records is None


def test_rigl_leaves_a_layer_without_gradients_as_it_is():
    model = nn.ModuleList([make_layer(seed=1), make_layer(seed=2), make_layer(seed=3)])
    model[2].values.requires_grad_(False)
    optimizer = torch.optim.SGD(model[:2].parameters(), lr=0)
    method = RigL(0.3, 1).attach(model, optimizer)
    before = [positions(layer).tolist() for layer in model]
    (model[0](X) + model[2](X)).square().sum().backward()
    optimizer.step()
    changed = [positions(layer).tolist() != old for layer, old in zip(model, before, strict=True)]
    assert changed == [True, False, False]
    assert method.updates == 1
    optimizer.zero_grad()
    optimizer.step()  # without any gradient nothing happens
    assert (method.step, method.updates) == (2, 1)


def test_rigl_does_not_advance_where_the_scaler_skips():
    layer = make_layer()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    method = RigL(0.3, 1).attach(layer, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(layer(X).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        if method.updates == 2:
            assert torch.isfinite(dense_matrix(layer)).all()
    assert (method.step, method.updates) == (2, 2)


def test_rigl_by_hand():
    layer, dy = make_layer(), integers((6, 8), 5)
    method = RigL(0.3, update_every=100)
    method.attach(layer, torch.optim.SGD(layer.parameters(), lr=0))
    weighted(layer(X), dy).backward()
    with pytest.raises(ValueError, match=r"RigL.update: a layer must have shown gradients since"):
        method.update()
    method.observe()
    layer.values.grad = None
    weighted(layer(X), dy).backward()
    before = copy.deepcopy(layer)
    method.update()
    assert_grew_by(layer, before, dy, X)
    assert method.updates == 1
    assert not layer._forward_hooks


def test_rigl_detach_removes_its_hooks():
    layer = make_layer()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0)
    method = RigL(0.3, 1).attach(layer, optimizer)
    assert layer._forward_hooks
    method.detach()
    assert not layer._forward_hooks
    assert not layer.values._post_accumulate_grad_hooks
    layer(X).sum().backward()
    optimizer.step()
    assert method.step == 0
    for call in (method.observe, method.update):
        with pytest.raises(ValueError, match=r"^RigL\.\w+: RigL must be attached, got no optimi"):
            call()


def test_rigl_lets_an_observed_layer_be_copied():
    layer, dy = make_layer(), integers((6, 8), 5)

    def passes(model, _):
        weighted(model(X), dy).backward()
        other = copy.deepcopy(layer)
        weighted(other(2 * X), dy.flip(0)).backward()  # not what the update looks at

    before = stepped(layer, RigL(0.3, 1), passes)
    assert_grew_by(layer, before, dy, X)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)], ids=str)
def test_rigl_resumes_bit_identically(order):
    def run(model, optimizer, steps):
        for _ in range(steps):
            train_step(model, optimizer, X / 8, TARGET / 8)

    model = make_mlp(sparsity=0.8)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    method = RigL(0.3, update_every=3).attach(model, optimizer)
    run(model, optimizer, 5)
    states = copy.deepcopy([thing.state_dict() for thing in (model, optimizer, method)])
    run(model, optimizer, 6)
    fresh = make_mlp(sparsity=0.8, seed=9)
    resumed = torch.optim.Adam(fresh.parameters(), lr=0.01)
    again = RigL(0.3, update_every=3).attach(fresh, resumed)
    for i in order:
        (fresh, resumed, again)[i].load_state_dict(states[i])
    run(fresh, resumed, 6)
    assert_same(fresh.state_dict(), model.state_dict())
    assert again.state_dict() == method.state_dict() == {"step": 11, "updates": 3, "seed": 0}


def test_rigl_refuses_what_set_refuses():
    with pytest.raises(ValueError, match=r"^RigL: drop_fraction must be in \[0, 1\], got 1.5"):
        RigL(1.5)
    with pytest.raises(ValueError, match=r"^RigL.attach: model must contain a SnackLinear, got L"):
        RigL().attach(nn.Linear(3, 3), torch.optim.SGD([torch.ones(1)]))
    with pytest.raises(ValueError, match=r"^RigL.load_state_dict: state must hold 'step'"):
        RigL().load_state_dict({})


def test_rigl_restructure_of_a_layer_takes_a_gradient():
    layer, dy = make_layer(), integers((6, 8), 5)
    before = copy.deepcopy(layer)
    layer.restructure(0.3, gradient=(dy, X))
    assert_grew_by(layer, before, dy, X)
    with pytest.raises(ValueError, match=r"^restructure: left must have shape \(6, 8\), got"):
        layer.restructure(0.3, gradient=(X, dy))
