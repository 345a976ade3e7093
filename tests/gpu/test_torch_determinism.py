"""Two runs give the same bits, also where PyTorch is told to insist on it."""

import pytest


@pytest.fixture
def insist(torch):
    """``torch.use_deterministic_algorithms(True)`` during the test."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_forward_and_backward_repeat(torch, torch_helpers, dtype):
    kind = torch_helpers.DTYPES[dtype]
    layer = torch_helpers.seeded_layer(700, 300, sparsity=0.9, device="cuda", dtype=kind)
    x = torch.randn(70, 700, device="cuda", dtype=kind, requires_grad=True)
    gradient = torch.randn(70, 300, device="cuda", dtype=kind)
    runs = []
    for _ in range(5):
        y = layer(x)
        runs.append([y, *torch.autograd.grad(y, (x, layer.values, layer.bias), gradient)])
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


def test_training_with_updates_repeats(torch, snack, torch_helpers):
    results = []
    for _ in range(2):
        model = torch_helpers.make_mlp((120, 80, 40), sparsity=0.8, device="cuda")
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        snack.SET(0.3, update_every=5, seed=2).attach(model, optimizer)
        x = torch_helpers.integers((32, 120), 1, device="cuda") / 8
        target = torch_helpers.integers((32, 40), 2, device="cuda") / 8
        for _ in range(30):
            torch_helpers.train_step(model, optimizer, x, target)
        results.append(model.state_dict())
    torch_helpers.assert_same(*results)


def test_everything_runs_under_deterministic_algorithms(torch, snack, torch_helpers, insist):
    layer = torch_helpers.seeded_layer(sparsity=0.5, device="cuda")
    optimizer = torch.optim.Adam(layer.parameters())
    x = torch_helpers.X.cuda().requires_grad_()
    torch_helpers.train_step(layer, optimizer, x, torch_helpers.TARGET.cuda())
    for update in torch_helpers.UPDATES.values():
        update(torch_helpers.seeded_layer(sparsity=0.5, device="cuda"), key=1)
    layer.restructure(0.5, optimizer=optimizer, key=1)
    snack.SnackLinear.from_dense(layer.to_dense(), sparsity=0.5)
    layer.load_state_dict(layer.state_dict())


def test_atomic_kernel_is_refused_under_deterministic_algorithms(
    torch, snack, torch_helpers, insist
):
    layer = torch_helpers.seeded_layer(sparsity=0.5, device="cuda")
    x = torch_helpers.X.cuda()
    with pytest.raises(RuntimeError, match='kernel "snack_coo" sums with atomics'):
        snack.spmm(layer.topology, layer.values.detach(), x, kernel="snack_coo")
    snack.spmm(layer.topology, layer.values.detach(), x, kernel="csr")
