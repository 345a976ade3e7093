"""Every launch goes to PyTorch's current stream, in the threads of backward too, and to no other.

The current stream is kept busy, then inputs are written on it, then the layer is called. On any
other stream the kernels would read the old inputs.
"""

import pytest

CYCLES = 200_000_000  # about 100 ms


@pytest.fixture
def layer(torch, torch_helpers):
    layer = torch_helpers.seeded_layer(40, 30, sparsity=0.5, device="cuda")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch_helpers.integers(parameter.shape, 3))
    return layer


@pytest.fixture
def tensors(torch_helpers):
    """Old and new inputs, old and new gradients."""
    shapes = {"x": (6, 40), "gradient": (6, 30)}
    return {
        age: {n: torch_helpers.integers(s, seed, device="cuda") for n, s in shapes.items()}
        for seed, age in enumerate(("old", "new"))
    }


def call(torch, layer, x, gradient):
    """The output and the gradients of x, values and bias."""
    x = x.detach().requires_grad_()
    y = layer(x)
    return [y, *torch.autograd.grad(y, (x, layer.values, layer.bias), gradient)]


def assert_equal(torch, got, want):
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_forward_and_backward_follow_the_current_stream(torch, layer, tensors):
    old, new = tensors["old"], tensors["new"]
    want = call(torch, layer, **new)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(torch, layer, **old)  # the allocator's blocks of this stream are there from now on
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(CYCLES)
        for name, tensor in old.items():
            tensor.copy_(new[name])
        got = call(torch, layer, **old)
        assert not stream.query()  # all of it was only queued
    stream.synchronize()
    assert_equal(torch, got, want)


def test_backward_follows_the_stream_of_the_forward(torch, layer, tensors):
    x, gradient = tensors["old"]["x"].requires_grad_(), tensors["old"]["gradient"]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = layer(x)
    torch.cuda.synchronize()
    want = torch.autograd.grad(y, (x, layer.values), tensors["new"]["gradient"], retain_graph=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(CYCLES)
        gradient.copy_(tensors["new"]["gradient"])
    # Called on the default stream, which has not waited: autograd runs it on the forward's stream.
    got = torch.autograd.grad(y, (x, layer.values), gradient)
    torch.cuda.synchronize()
    assert_equal(torch, got, want)


def test_calls_do_not_wait_for_another_stream(torch, layer, tensors):
    want = call(torch, layer, **tensors["new"])
    busy, stream = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream())
        call(torch, layer, **tensors["new"])
    torch.cuda.synchronize()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(5 * CYCLES)
    with torch.cuda.stream(stream):
        got = call(torch, layer, **tensors["new"])
    stream.synchronize()
    assert not busy.query()
    busy.synchronize()
    assert_equal(torch, got, want)


def test_column_view_is_built_on_the_current_stream(torch, torch_helpers, tensors):
    layers = [torch_helpers.seeded_layer(40, 30, sparsity=0.5, device="cuda") for _ in range(2)]
    want = call(torch, layers[0], **tensors["new"])
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        columns = layers[1].packed_columns.clone()
        layers[1].packed_columns.zero_()
        torch.cuda._sleep(CYCLES)
        layers[1].packed_columns.copy_(columns)
        got = call(torch, layers[1], **tensors["new"])
    stream.synchronize()
    assert_equal(torch, got, want)


@pytest.mark.parametrize("update", ["restructure", "prune", "grow"])
def test_updates_follow_the_current_stream(torch, torch_helpers, update):
    layers = [torch_helpers.seeded_layer(40, 30, sparsity=0.5, device="cuda") for _ in range(2)]
    torch_helpers.UPDATES[update](layers[0], key=5)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream), torch.no_grad():
        values = layers[1].values.clone()
        layers[1].values.zero_()
        torch.cuda._sleep(CYCLES)
        layers[1].values.copy_(values)
        torch_helpers.UPDATES[update](layers[1], key=5)
    stream.synchronize()
    torch_helpers.assert_same(layers[1].state_dict(), layers[0].state_dict())


def test_stream_is_taken_at_each_call(torch, layer, tensors, monkeypatch):
    from snack_cupy import _jit

    seen, launch = [], _jit.launch

    def noted(plan, pointers, stream):
        seen.append(stream)
        launch(plan, pointers, stream)

    monkeypatch.setattr(_jit, "launch", noted)
    for stream in (torch.cuda.Stream(), torch.cuda.default_stream(), torch.cuda.Stream()):
        seen.clear()
        with torch.cuda.stream(stream):
            call(torch, layer, **tensors["new"])
        assert seen == [stream.cuda_stream] * 3


def test_threads_that_never_used_cuda_launch(torch, layer, tensors):
    from concurrent.futures import ThreadPoolExecutor

    want = call(torch, layer, **tensors["new"])
    for _ in range(3):
        with ThreadPoolExecutor(1) as pool:
            got = pool.submit(call, torch, layer, **tensors["new"]).result()
        assert_equal(torch, got, want)


def test_threads_do_not_mix_their_launches(torch, layer, tensors):
    from concurrent.futures import ThreadPoolExecutor

    torch.cuda.synchronize()
    wants = {age: call(torch, layer, **held) for age, held in tensors.items()}
    torch.cuda.synchronize()

    def run(age):
        return age, [call(torch, layer, **tensors[age]) for _ in range(100)]

    with ThreadPoolExecutor(4) as pool:
        for age, results in pool.map(run, ["old", "new"] * 4):
            for got in results:
                assert_equal(torch, got, wants[age])
