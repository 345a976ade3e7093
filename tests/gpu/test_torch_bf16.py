"""float16 and bfloat16 on the GPU: against float64, under autocast, and without ml_dtypes."""

import sys

import pytest
from helpers import assert_close, assert_rms, expected_sddmm, expected_spmm, problem

HALVES = ("float16", "bfloat16")
halves = pytest.mark.parametrize("dtype", HALVES)
BIG = problem("many_blocks")


@halves
@pytest.mark.parametrize("name", ["many_blocks", "one_long_row", "constant_fan_in"])
def test_layer_against_float64(torch, torch_helpers, dtype, name, rng):
    p = problem(name)
    layer = torch_helpers.make_layer(p, dtype, "cuda")
    _, x, _, gradient = torch_helpers.operands(p, dtype, rng, "cuda")
    x.requires_grad_()
    y = layer(x)
    y.backward(gradient)
    host = layer.topology.to_device("cpu")
    values, bias, z, g = map(torch_helpers.to_numpy, (layer.values, layer.bias, x, gradient))
    want = expected_spmm(host, values, z, batch_major=True, bias=bias)
    assert_close(torch_helpers.to_numpy(y), *want)
    dx = expected_spmm(host, values, g, batch_major=True, transposed=True)
    assert_close(torch_helpers.to_numpy(x.grad), *dx)
    dv = expected_sddmm(host, g, z, batch_major=True)
    assert_close(torch_helpers.to_numpy(layer.values.grad), *dv)


@halves
def test_layer_errs_no_more_than_dense(torch, torch_helpers, dtype, rng):
    layer = torch_helpers.make_layer(BIG, dtype, "cuda")
    _, x, _, gradient = torch_helpers.operands(BIG, dtype, rng, "cuda")
    dense, exact = layer.to_dense(), layer.to_dense().double()
    results = []
    for module, kind in ((layer, x.dtype), (dense, x.dtype), (exact, torch.float64)):
        z = x.to(kind).detach().requires_grad_()
        y = module(z)
        (dx,) = torch.autograd.grad(y, z, gradient.to(kind))
        results.append([torch_helpers.to_numpy(t) for t in (y, dx)])
    for got, same_type, want in zip(*results, strict=True):
        assert_rms(got, want, same_type)


@halves
@pytest.mark.parametrize("master", ["float32", *HALVES, "float64"])
def test_autocast_gives_the_dtypes_of_linear(torch, torch_helpers, dtype, master):
    kind = torch_helpers.DTYPES[master]
    layer = torch_helpers.seeded_layer(sparsity=0.5, dtype=kind, device="cuda")
    dense = layer.to_dense()
    x = torch_helpers.X.to("cuda", kind).requires_grad_()
    with torch.autocast("cuda", dtype=torch_helpers.DTYPES[dtype]):
        y, y_dense = layer(x), dense(x)
    assert y.dtype == y_dense.dtype
    y.sum().backward()
    assert layer.values.grad.dtype == layer.bias.grad.dtype == x.grad.dtype == kind


@halves
def test_training_under_autocast_with_a_scaler(torch, snack, torch_helpers, dtype):
    model = torch_helpers.make_mlp(sparsity=0.5, device="cuda")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    method = snack.SET(0.3, update_every=2).attach(model, optimizer)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == "float16")
    x = torch_helpers.integers((6, 20), 1, device="cuda") / 8
    target = torch_helpers.integers((6, 8), 2, device="cuda") / 8
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch_helpers.DTYPES[dtype]):
            loss = (model(x).float() - target).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    assert model[0].values.dtype == torch.float32
    assert method.updates > 10
    assert losses[-1] < losses[0]


def test_bfloat16_needs_no_ml_dtypes(torch, torch_helpers, monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)  # importing it fails
    layer = torch_helpers.seeded_layer(sparsity=0.5, dtype=torch.bfloat16, device="cuda")
    optimizer = torch.optim.Adam(layer.parameters())
    x = torch_helpers.X.to("cuda", torch.bfloat16).requires_grad_()
    torch_helpers.train_step(layer, optimizer, x, torch_helpers.TARGET.to("cuda", torch.bfloat16))
    for update in torch_helpers.UPDATES.values():
        update(torch_helpers.seeded_layer(sparsity=0.5, device="cuda").bfloat16(), key=1)
    layer.restructure(0.5, optimizer=optimizer, key=1)
    layer.load_state_dict(layer.state_dict())
    layer.from_dense(layer.to_dense(), sparsity=0.5)
