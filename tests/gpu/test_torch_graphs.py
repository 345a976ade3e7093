"""CUDA graphs: forward, backward and whole steps are captured, and updates between replays seen."""

import pytest


@pytest.fixture
def layer(torch, torch_helpers):
    layer = torch_helpers.seeded_layer(40, 30, sparsity=0.5, device="cuda")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch_helpers.integers(parameter.shape, 3))
    return layer


def warm_up(torch, function):
    """As PyTorch asks: a few runs on a side stream before capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)


def test_forward_and_backward_are_captured_and_see_updates(torch, torch_helpers, layer):
    x = torch_helpers.integers((6, 40), 1, device="cuda").requires_grad_()
    gradient = torch_helpers.integers((6, 30), 2, device="cuda")

    def run():
        y = layer(x)
        return [y, *torch.autograd.grad(y, (x, layer.values, layer.bias), gradient)]

    warm_up(torch, run)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for seed in range(4):
        with torch.no_grad():
            x.copy_(torch_helpers.integers((6, 40), 10 + seed))
            gradient.copy_(torch_helpers.integers((6, 30), 20 + seed))
            layer.values.copy_(torch_helpers.integers(layer.values.shape, 30 + seed))
        if seed:
            before = torch_helpers.positions(layer)
            layer.restructure(0.5, key=seed)
            assert (before != torch_helpers.positions(layer)).any()
        graph.replay()
        for got, want in zip(captured, run(), strict=True):
            assert torch.equal(got, want)


def test_loading_a_checkpoint_between_replays_is_seen(torch, torch_helpers, layer):
    x = torch_helpers.integers((6, 40), 1, device="cuda").requires_grad_()

    def run():
        y = layer(x)
        return [y, *torch.autograd.grad(y.sum(), (x, layer.values))]

    warm_up(torch, run)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    layer.load_state_dict(torch_helpers.seeded_layer(40, 30, seed=2, sparsity=0.5).state_dict())
    graph.replay()
    for got, want in zip(captured, run(), strict=True):
        assert torch.equal(got, want)


def test_whole_training_steps_are_captured(torch, snack, torch_helpers):
    results = []
    for graphed in (True, False):
        model = torch_helpers.make_mlp(sparsity=0.5, device="cuda")
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, capturable=True, foreach=False)
        x = torch_helpers.integers((6, 20), 1, device="cuda")
        target = torch_helpers.integers((6, 8), 2, device="cuda")
        states = {k: v.clone() for k, v in model.state_dict().items()}

        def step(model=model, optimizer=optimizer, x=x, target=target):
            optimizer.zero_grad()
            (model(x) - target).square().mean().backward()
            optimizer.step()

        warm_up(torch, step)
        graph = torch.cuda.CUDAGraph()
        if graphed:
            with torch.cuda.graph(graph):
                step()
        with torch.no_grad():  # as before the warm-up
            model.load_state_dict(states)
            for state in optimizer.state.values():
                for tensor in state.values():
                    tensor.zero_()
        method = snack.SET(0.4, seed=1).attach(model, optimizer)
        for i in range(6):
            if graphed:
                graph.replay()
            else:
                step()
            if i % 2:
                method.step = i
                method.update()
        results.append(model.state_dict())
    torch_helpers.assert_same(*results)


def test_graphed_callables(torch, torch_helpers, layer):
    x = torch_helpers.integers((6, 40), 1, device="cuda").requires_grad_()
    layer(x).sum().backward()
    graphed = torch.cuda.make_graphed_callables(layer, (x.detach().clone().requires_grad_(),))
    for key in range(2):
        layer.zero_grad()
        z = x.detach().clone().requires_grad_()
        y = graphed(z)
        y.sum().backward()
        got = [y, z.grad, layer.values.grad, layer.bias.grad]
        assert torch.equal(y, layer.to_dense()(x))
        want = torch_helpers.dense_matrix(layer).sum(0).cuda().expand_as(x)
        assert torch.equal(got[1], want)
        assert torch.equal(got[3], torch.full_like(layer.bias, 6))
        layer.restructure(0.5, key=key)


def test_update_during_capture_raises(torch, torch_helpers, layer):
    x = torch_helpers.integers((6, 40), 1, device="cuda")
    warm_up(torch, lambda: layer(x))
    before = torch_helpers.snapshot(layer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for update in (layer.restructure, layer.prune, layer.grow):
            with pytest.raises(RuntimeError, match="update must not be captured in a CUDA graph"):
                update(0.5)
        y = layer(x)
    graph.replay()
    assert torch.equal(y, layer(x))
    torch_helpers.assert_same(torch_helpers.snapshot(layer), before)
