"""`SET` through an ordinary optimiser: when it updates, what it leaves alone, how it resumes."""

import copy

import pytest
import torch
from torch import nn
from torch_helpers import (
    OPTIMIZERS,
    assert_same,
    by_position,
    integers,
    make_mlp,
    positions,
    snapshot,
    train_step,
)

from snack_cupy import dst, random
from snack_cupy.torch import SET

X, TARGET = integers((6, 20), 1) / 8, integers((6, 8), 2) / 8


def run(model, optimizer, steps):
    for _ in range(steps):
        train_step(model, optimizer, X, TARGET)


def structures(model):
    return [positions(layer).tolist() for layer in (model[0], model[2])]


@pytest.fixture
def model():
    return make_mlp(sparsity=0.5)


@pytest.fixture
def optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


# When


def test_set_updates_on_schedule(model, optimizer):
    method = SET(0.3, update_every=3, start=2, stop=12).attach(model, optimizer)
    seen = []
    for step in range(1, 16):
        before = structures(model)
        run(model, optimizer, 1)
        assert method.step == step
        if structures(model) != before:
            seen.append(step)
    assert seen == [5, 8, 11]
    assert method.updates == 3


def test_set_follows_a_drop_fraction_that_depends_on_the_step(model, optimizer, monkeypatch):
    seen = []
    for layer in (model[0], model[2]):
        monkeypatch.setattr(
            layer, "restructure", lambda fraction, **kw: seen.append(fraction), raising=True
        )
    schedule = dst.cosine(0.4, stop=8)
    SET(schedule, update_every=2).attach(model, optimizer)
    run(model, optimizer, 8)
    assert seen == [schedule(step) for step in (2, 4, 6, 8) for _ in range(2)]


def test_set_keeps_nnz_and_everything_in_place(model, optimizer):
    run(model, optimizer, 1)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    addresses = {name: t.data_ptr() for name, t in tensors.items()}
    nnz = [layer.nnz for layer in (model[0], model[2])]
    before = structures(model)
    SET(0.3, update_every=2).attach(model, optimizer)
    run(model, optimizer, 8)
    assert [layer.nnz for layer in (model[0], model[2])] == nnz
    assert all(tensors[name].data_ptr() == address for name, address in addresses.items())
    assert all(a != b for a, b in zip(before, structures(model), strict=True))


def test_set_update_now(model, optimizer):
    method = SET(0.3, update_every=1000).attach(model, optimizer)
    before = structures(model)
    method.update()
    assert (method.step, method.updates) == (0, 1)
    assert structures(model) != before


def test_set_is_what_restructure_does_with_its_keys(model, optimizer):
    SET(0.3, update_every=1, seed=11).attach(model, optimizer)
    twin = copy.deepcopy(model)
    run(model, optimizer, 1)
    run(twin, torch.optim.Adam(twin.parameters(), lr=0.01), 1)
    for name in ("0", "2"):
        twin[int(name)].restructure(0.3, key=random.key(11, name, 1))
    assert_same(model.state_dict(), twin.state_dict())


def test_set_gives_equal_layers_different_keys():
    layer = make_mlp((16, 16), sparsity=0.5)[0]
    model = nn.Sequential(layer, nn.ReLU(), copy.deepcopy(layer))
    SET(0.5, update_every=1).attach(model, torch.optim.SGD(model.parameters(), lr=0.0)).update()
    assert structures(model)[0] != structures(model)[1]


def test_set_finds_nested_layers_once():
    inner = make_mlp((20, 20), sparsity=0.5)[0]
    model = nn.Sequential(inner, nn.ModuleDict({"again": inner, "fc": make_mlp()}))
    method = SET().attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert sorted(method._layers) == ["0", "1.fc.0", "1.fc.2"]


# With optimisers, schedulers, scalers


@pytest.mark.parametrize("variant", ["for_loop", "foreach", "fused"])
@pytest.mark.parametrize("optimizer_name", ["sgd_momentum", "adam", "adam_amsgrad", "adamw"])
def test_set_with_variants_of_optimizers(optimizer_name, variant):
    options = {"for_loop": {"foreach": False}}.get(variant, {variant: True})
    results = []
    for kw in ({"foreach": False}, options):
        model = make_mlp(sparsity=0.5, dtype=torch.float64)
        optimizer = OPTIMIZERS[optimizer_name](model.parameters(), **kw)
        SET(0.3, update_every=2, seed=3).attach(model, optimizer)
        for _ in range(6):
            train_step(model, optimizer, X.double(), TARGET.double())
        results.append((structures(model), model[0].values.detach()))
    assert results[0][0] == results[1][0]
    torch.testing.assert_close(results[0][1], results[1][1])


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
def test_set_moves_the_optimizer_state(model, optimizer_name):
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    run(model, optimizer, 2)
    layer, state = model[0], optimizer.state[model[0].values]
    names = [k for k, v in state.items() if isinstance(v, torch.Tensor) and v.dim() == 1]
    before = {name: by_position(layer, state[name]) for name in names}
    method = SET(0.5).attach(model, optimizer)
    method.update()
    for name in names:
        for position, value in by_position(layer, state[name]).items():
            assert value == before[name].get(position, 0.0)


def test_set_with_a_closure(model, optimizer):
    method = SET(0.3, update_every=1).attach(model, optimizer)

    def closure():
        optimizer.zero_grad()
        loss = (model(X) - TARGET).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert (method.step, method.updates) == (3, 3)


def test_set_with_a_learning_rate_scheduler(model, optimizer):
    method = SET(0.3, update_every=2).attach(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for _ in range(4):
        run(model, optimizer, 1)
        scheduler.step()
    assert (method.step, method.updates) == (4, 2)


def test_set_does_not_advance_where_the_scaler_skips(model, optimizer):
    method = SET(0.3, update_every=1).attach(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(model(X).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert (method.step, method.updates) == (2, 2)


# Resuming


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
@pytest.mark.parametrize(
    "drop_fraction", [0.3, dst.cosine(0.4, stop=20)], ids=["constant", "cosine"]
)
def test_set_resumes_bit_identically(model, optimizer, drop_fraction, order):
    method = SET(drop_fraction, update_every=3, seed=5).attach(model, optimizer)
    run(model, optimizer, 5)
    states = copy.deepcopy([thing.state_dict() for thing in (model, optimizer, method)])
    run(model, optimizer, 6)

    fresh = make_mlp(sparsity=0.8, seed=9)
    resumed = torch.optim.Adam(fresh.parameters(), lr=0.01)
    again = SET(drop_fraction, update_every=3).attach(fresh, resumed)
    for i in order:
        (fresh, resumed, again)[i].load_state_dict(states[i])
    run(fresh, resumed, 6)
    assert_same(fresh.state_dict(), model.state_dict())
    assert again.state_dict() == method.state_dict() == {"step": 11, "updates": 3, "seed": 5}


def test_set_is_deterministic():
    results = []
    for seed in (1, 1, 2):
        model = make_mlp(sparsity=0.5)
        optimizer = torch.optim.Adam(model.parameters())
        SET(0.3, update_every=2, seed=seed).attach(model, optimizer)
        torch.manual_seed(seed)  # which must not matter
        run(model, optimizer, 6)
        results.append(model.state_dict())
    assert_same(results[0], results[1])
    assert not torch.equal(results[0]["0.columns"], results[2]["0.columns"])


# Attaching


def test_set_detach_stops_it(model, optimizer):
    method = SET(0.3, update_every=1).attach(model, optimizer)
    run(model, optimizer, 2)
    method.detach()
    before = structures(model)
    run(model, optimizer, 2)
    assert structures(model) == before
    assert (method.step, method.updates) == (2, 2)
    method.detach()  # twice does no harm
    method.attach(model, optimizer)
    run(model, optimizer, 1)
    assert method.step == 3


def test_set_attach_returns_itself_and_leaves_the_optimizer_unwrapped(model, optimizer):
    method = SET()
    step = type(optimizer).step
    assert method.attach(model, optimizer) is method
    assert type(optimizer).step is step


def test_set_attach_refuses(model, optimizer):
    method = SET()
    with pytest.raises(ValueError, match=r"^SET.attach: model must contain a SnackLinear, got L"):
        method.attach(nn.Linear(3, 3), optimizer)
    with pytest.raises(TypeError, match=r"^SET.attach: optimizer must be a torch.optim.Optim"):
        method.attach(model, None)
    method.attach(model, optimizer)
    with pytest.raises(ValueError, match=r"^SET.attach: SET must be attached to one optimizer at"):
        method.attach(model, optimizer)
    run(model, optimizer, 1)
    assert method.step == 1


def test_set_update_refuses_without_an_optimizer():
    with pytest.raises(ValueError, match=r"^SET.update: SET must be attached, got no optimizer"):
        SET().update()


WRONG = {
    "drop_fraction": (ValueError, r"^SET: drop_fraction must be in \[0, 1\], got 1.5", (1.5,)),
    "drop_fraction_nan": (ValueError, "^SET: drop_fraction must be .* got nan", (float("nan"),)),
    "drop_fraction_type": (TypeError, "^SET: drop_fraction must be a number .* got 'a'", ("a",)),
    "update_every": (ValueError, "update_every must be between 1 and .* got 0", (0.3, 0)),
    "start": (ValueError, "start must be between 0 and .* got -1", (0.3, 1, -1)),
    "stop": (ValueError, "stop must be between 5 and .* got 4", (0.3, 1, 5, 4)),
    "seed": (TypeError, "seed must be an integer, got 'a'", (0.3, 1, 0, None, "a")),
}


@pytest.mark.parametrize("case", WRONG)
def test_set_refuses(case):
    exception, message, arguments = WRONG[case]
    with pytest.raises(exception, match=message):
        SET(*arguments)


WRONG_STATE = {
    "missing": (ValueError, "state must hold 'updates', got", {"step": 1, "seed": 0}),
    "step": (ValueError, "step must be between 0 and .* got -1", {"step": -1}),
    "updates": (TypeError, "updates must be an integer, got 1.0", {"updates": 1.0}),
    "seed": (TypeError, "seed must be an integer, got None", {"seed": None}),
}


@pytest.mark.parametrize("case", WRONG_STATE)
def test_set_load_refuses_and_changes_nothing(case):
    exception, message, changes = WRONG_STATE[case]
    method = SET(seed=4)
    state = {"step": 7, "updates": 2, "seed": 3, **changes} if case != "missing" else changes
    with pytest.raises(exception, match=message):
        method.load_state_dict(state)
    assert method.state_dict() == {"step": 0, "updates": 0, "seed": 4}


# Failures


def test_set_changes_no_layer_where_one_cannot_follow(model, optimizer):
    method = SET(0.3).attach(model, optimizer)
    run(model, optimizer, 2)
    optimizer.state[model[2].values]["strange"] = torch.ones(3)
    before = [snapshot(layer) for layer in (model[0], model[2])]
    with pytest.raises(ValueError, match="optimizer state 'strange' must hold one entry per"):
        method.update()
    for layer, held in zip((model[0], model[2]), before, strict=True):
        assert_same(snapshot(layer), held)
    assert method.updates == 0


@pytest.mark.parametrize("fraction", [1.5, float("nan"), None], ids=str)
def test_set_changes_no_layer_where_the_fraction_is_wrong(model, optimizer, fraction):
    method = SET(lambda step: fraction).attach(model, optimizer)
    before = structures(model)
    with pytest.raises((ValueError, TypeError), match="drop_fraction"):
        method.update()
    assert structures(model) == before
    assert method.updates == 0
