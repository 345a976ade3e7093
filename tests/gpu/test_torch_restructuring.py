"""Updates on the GPU: bit for bit those of the CPU, in place, with all optimiser variants."""

import copy

import pytest

UPDATES = (
    "restructure",
    "restructure_random",
    "restructure_all",
    "restructure_nothing",
    "prune",
    "prune_random",
    "prune_all",
    "grow",
    "grow_all",
)
OPTIMIZERS = ("sgd", "sgd_momentum", "adam", "adam_amsgrad", "adamw", "rmsprop", "adagrad")
updates = pytest.mark.parametrize("update", UPDATES)
optimizers = pytest.mark.parametrize("optimizer_name", OPTIMIZERS)


def test_all_updates_and_optimizers_are_listed(torch_helpers):
    assert tuple(torch_helpers.UPDATES) == UPDATES
    assert tuple(torch_helpers.OPTIMIZERS) == OPTIMIZERS


def twins(torch, torch_helpers, optimizer_name, dtype="float32"):
    """The same trained layer and optimiser on the CPU and on the GPU."""
    host, optimizer = torch_helpers.trained(optimizer_name, dtype=dtype)
    device = copy.deepcopy(host).cuda()
    device.values.grad = host.values.grad.cuda()
    other = torch_helpers.OPTIMIZERS[optimizer_name](device.parameters())
    other.load_state_dict(optimizer.state_dict())
    return (host, optimizer), (device, other)


def on_host(torch, held):
    return {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in held.items()}


@updates
@optimizers
def test_update_is_that_of_the_cpu(torch, torch_helpers, update, optimizer_name):
    (host, optimizer), (device, other) = twins(torch, torch_helpers, optimizer_name)
    want = torch_helpers.UPDATES[update](host, optimizer=optimizer, key=5)
    got = torch_helpers.UPDATES[update](device, optimizer=other, key=5)
    assert got.new_to_old.tolist() == want.new_to_old.tolist()
    snapshots = torch_helpers.snapshot(device, other), torch_helpers.snapshot(host, optimizer)
    torch_helpers.assert_same(on_host(torch, snapshots[0]), snapshots[1])


@updates
@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_update_is_that_of_the_cpu_in_every_dtype(torch, torch_helpers, update, dtype):
    (host, _), (device, _) = twins(torch, torch_helpers, "sgd", dtype)
    for layer in (host, device):
        torch_helpers.UPDATES[update](layer, key=5)
    torch_helpers.assert_same(
        on_host(torch, torch_helpers.snapshot(device)), torch_helpers.snapshot(host)
    )


@pytest.mark.parametrize("shape", [(1000, 300), (70_000, 3), (3, 70_000)], ids=str)
def test_update_of_a_larger_layer_is_that_of_the_cpu(torch, torch_helpers, shape):
    host = torch_helpers.seeded_layer(*shape, sparsity=0.95)
    device = copy.deepcopy(host).cuda()
    for key in range(3):
        for layer in (host, device):
            layer.restructure(0.3, key=key)
    torch_helpers.assert_same(on_host(torch, device.state_dict()), host.state_dict())


@optimizers
def test_constant_nnz_is_rewritten_in_place(torch, torch_helpers, optimizer_name):
    layer, optimizer = torch_helpers.trained(optimizer_name, device="cuda")

    def held():
        state = optimizer.state[layer.values]
        named = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
        return {**named, "grad": layer.values.grad, **{f"state.{k}": v for k, v in state.items()}}

    before = {k: v for k, v in held().items() if isinstance(v, torch.Tensor)}
    addresses = {k: v.data_ptr() for k, v in before.items()}
    topology = layer.topology
    layer.restructure(0.5, optimizer=optimizer, key=5)
    assert all(held()[k] is v for k, v in before.items())
    assert {k: v.data_ptr() for k, v in before.items()} == addresses
    assert layer.topology is topology


@pytest.mark.parametrize("update", ["prune", "prune_all", "grow", "grow_all"])
def test_training_goes_on_after_resizing(torch, torch_helpers, update):
    layer, optimizer = torch_helpers.trained(device="cuda")
    x, target = torch_helpers.X.cuda().requires_grad_(), torch_helpers.TARGET.cuda()
    loss = layer(x).square().mean()  # its graph stays alive
    loss.backward()
    values = layer.values
    torch_helpers.UPDATES[update](layer, optimizer=optimizer, key=5)
    assert layer.values is values
    torch_helpers.train_step(layer, optimizer, x, target)
    torch.testing.assert_close(layer(x), layer.to_dense()(x), rtol=1e-4, atol=1e-4)
    assert loss.grad_fn is not None


@updates
def test_update_between_forward_and_backward_raises(torch, torch_helpers, update):
    layer = torch_helpers.seeded_layer(sparsity=0.5, device="cuda")
    y = layer(torch_helpers.X.cuda().requires_grad_())
    torch_helpers.UPDATES[update](layer, key=5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


VARIANTS = {
    "for_loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "capturable": {"capturable": True},
}
PAIRS = [
    (name, variant)
    for name in ("sgd_momentum", "adam", "adam_amsgrad", "adamw")
    for variant in VARIANTS
    if (name, variant) != ("sgd_momentum", "capturable")  # SGD has no such variant
]


@pytest.mark.parametrize(("optimizer_name", "variant"), PAIRS)
def test_set_with_variants_of_optimizers(torch, snack, torch_helpers, optimizer_name, variant):
    model = torch_helpers.make_mlp(sparsity=0.5, device="cuda")
    optimizer = torch_helpers.OPTIMIZERS[optimizer_name](model.parameters(), **VARIANTS[variant])
    x = torch_helpers.integers((6, 20), 1, device="cuda") / 8
    target = torch_helpers.integers((6, 8), 2, device="cuda") / 8
    method = snack.SET(0.4, update_every=2, seed=3).attach(model, optimizer)
    losses = []
    for step in range(8):
        losses.append(torch_helpers.train_step(model, optimizer, x, target))
        assert method.updates == (step + 1) // 2
    assert (model[0].nnz, model[2].nnz) == (160, 64)
    assert losses[-1] < losses[0]
    layer, state = model[0], optimizer.state[model[0].values]
    names = [k for k, v in state.items() if isinstance(v, torch.Tensor) and v.dim() == 1]
    before = {n: torch_helpers.by_position(layer, state[n]) for n in names}
    method.update()
    for name in names:
        for position, value in torch_helpers.by_position(layer, state[name]).items():
            assert value == before[name].get(position, 0.0)


def test_set_restructures_as_on_the_cpu(torch, snack, torch_helpers):
    results = []
    for device in ("cpu", "cuda"):
        model = torch_helpers.make_mlp(sparsity=0.5).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        method = snack.SET(0.4, seed=3).attach(model, optimizer)
        for step in range(5):  # without training, so that rounding decides nothing
            method.step = step
            method.update()
        results.append(on_host(torch, model.state_dict()))
    torch_helpers.assert_same(*results)
