"""The short way through a layer's call: when it is taken, what it launches, what it gives.

Tensors of the CPU play CUDA tensors here: the code for CUDA gets their addresses, and its kernels
are run by `emulator`, or only noted.
"""

import emulator
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch_helpers import LAYOUTS, dense_matrix, integers, require_grad, seeded_layer

from snack_cupy import _jit, dispatch
from snack_cupy.torch import cuda, eager, products
from snack_cupy.torch.autograd import STALE

needs_emulator = pytest.mark.skipif(bool(emulator.missing()), reason=emulator.missing())


@pytest.fixture
def host_as_device(monkeypatch):
    """CPU tensors are taken for those of the current CUDA device; names of launched kernels."""
    launches = []

    def compile_instance(file, expression, device, max_shared_bytes=0):
        compiled = emulator.compile_instance(file, expression, device, max_shared_bytes)

        def function(*arguments):
            launches.append(expression.partition("<")[0].removeprefix("snack::"))
            compiled(*arguments)

        return function

    facts = dispatch.Device(multiprocessors=2, shared_bytes=64 * 1024)
    monkeypatch.setattr(_jit, "compile_instance", compile_instance)
    monkeypatch.setattr(dispatch, "device_facts", lambda device: facts)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(cuda, "_empty_strided", torch._C._dynamo.guards._empty_strided_cpu)
    monkeypatch.setattr(eager, "_CPU", None)
    monkeypatch.setattr(products, "cpu", cuda)
    clear()
    yield launches
    clear()


def clear():
    cuda._plans.clear()
    dispatch._plan.cache_clear()


@pytest.fixture
def short(monkeypatch):
    """Whether each call since went the short way."""
    taken, linear = [], eager.linear

    def noted(layer, x):
        y = linear(layer, x)
        taken.append(y is not None)
        return y

    monkeypatch.setattr(eager, "linear", noted)
    return taken


@pytest.fixture
def layer():
    """Integers, so that sums are exact; float64, so that few kernels have to be compiled."""
    layer = seeded_layer(sparsity=0.5, dtype=torch.float64)
    with torch.no_grad():
        for seed, parameter in enumerate(layer.parameters()):
            parameter.copy_(integers(parameter.shape, seed))
    return layer


@pytest.fixture
def x():
    return integers((6, 12), 5, torch.float64)


def dense_twin(layer):
    twin = nn.Linear(12, 7, dtype=torch.float64)
    with torch.no_grad():
        twin.weight.copy_(dense_matrix(layer))
        twin.bias.copy_(layer.bias)
    return twin


pytestmark = [needs_emulator, pytest.mark.usefixtures("host_as_device")]


# What is launched


def test_forward_is_its_kernels_and_nothing_else(layer, x, short, host_as_device):
    layer(x)
    host_as_device.clear()
    with torch.profiler.profile() as profile, torch.no_grad():
        y = layer(x)
    assert short == [True, True]
    assert host_as_device == ["spmm_csr_batch_major"]
    assert [event.key for event in profile.key_averages() if "aten" in event.key] == []
    assert torch.equal(y, dense_twin(layer)(x))


def test_backward_is_two_products_and_the_sum_of_the_bias(layer, x, short, host_as_device):
    gradient = integers((6, 7), 6, torch.float64)
    x.requires_grad_()
    layer(x).backward(gradient)
    host_as_device.clear()
    x.grad = layer.values.grad = layer.bias.grad = None
    y = layer(x)
    assert host_as_device == ["spmm_csr_batch_major"]
    with torch.profiler.profile() as profile:
        y.backward(gradient)
    assert short == [True, True]
    assert host_as_device[1:] == ["spmm_csr_batch_major", "sddmm_csr_batch_major"]
    names = {event.key for event in profile.key_averages() if event.key.startswith("aten")}
    assert names <= {"aten::sum", "aten::detach", "aten::as_strided", "aten::fill_"}
    assert not {"aten::clone", "aten::copy_", "aten::empty"} & names  # gradients are not copied


@pytest.mark.parametrize("asked", ["", "x", "values", "bias", "x values", "values bias"])
def test_gradients_that_are_not_asked_for_are_not_computed(layer, x, short, host_as_device, asked):
    x.requires_grad_("x" in asked)
    layer.values.requires_grad_("values" in asked)
    layer.bias.requires_grad_("bias" in asked)
    y = layer(x)
    assert short == [True]
    assert y.requires_grad == bool(asked)
    assert (layer.permutation is not None) == ("x" in asked)
    if asked:
        host_as_device.clear()
        y.sum().backward()
        expected = ["spmm_csr_batch_major"] * ("x" in asked)
        assert host_as_device == expected + ["sddmm_csr_batch_major"] * ("values" in asked)
    for name, tensor in (("x", x), ("values", layer.values), ("bias", layer.bias)):
        assert (tensor.grad is not None) == (name in asked)


# When the short way is taken


def test_results_are_those_of_the_long_way(layer, x, monkeypatch):
    results = []
    for way in (eager.linear, lambda layer, x: None):
        monkeypatch.setattr(eager, "linear", way)
        (z,) = require_grad(x)
        y = layer(z)
        results.append([y, *torch.autograd.grad(y.tanh().sum(), (z, layer.values, layer.bias))])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_do_not_matter(layer, x, short, layout):
    want = dense_twin(layer)(x)
    assert torch.equal(layer(LAYOUTS[layout](x)), want)
    assert torch.equal(layer(x.expand(2, 6, 12)[1]), want)
    assert short == [True, True]


def test_an_empty_batch(layer, x, short, host_as_device):
    (z,) = require_grad(x[:0])
    y = layer(z)
    assert y.shape == (0, 7)
    y.sum().backward()
    assert short == [True]
    assert host_as_device == []
    assert z.grad.shape == (0, 12)
    assert not layer.values.grad.any()
    assert not layer.bias.grad.any()


@pytest.mark.parametrize("shape", [(12,), (1, 2, 3, 12), (2, 0, 12)], ids=str)
def test_any_number_of_axes(layer, shape, short):
    x, x_dense = require_grad(*[integers(shape, 3, torch.float64)] * 2)
    y, y_dense = layer(x), dense_twin(layer)(x_dense)
    assert torch.equal(y, y_dense)
    assert all(short)
    y.sum().backward()
    y_dense.sum().backward()
    assert torch.equal(x.grad, x_dense.grad)


def test_wrong_inputs_go_the_long_way_and_are_refused(layer, x, short):
    for wrong in ([1.0], x[:, 1:], x.float(), x.long(), x[0, 0]):
        with pytest.raises((TypeError, ValueError), match=r"^SnackLinear: x must"):
            layer(wrong)
    assert not any(short)


def test_a_bias_of_another_length_is_refused(layer, x, short):
    layer.bias = nn.Parameter(layer.bias.detach()[1:])
    with pytest.raises(ValueError, match=r"^SnackLinear: bias must have shape \(7,\)"):
        layer(x)
    assert short == [False]


def test_a_lazily_negated_input(layer, x, short):
    lazy = torch.complex(x, -x).conj().imag
    assert lazy.is_neg()
    assert torch.equal(layer(lazy), dense_twin(layer)(x))
    assert short == [False]


def test_a_lazily_negated_gradient(layer, x):
    gradient = integers((6, 7), 6, torch.float64)
    lazy = torch.complex(gradient, -gradient).conj().imag
    layer(x).backward(lazy)
    want = dense_twin(layer)
    want(x).backward(gradient)
    assert torch.equal(layer.bias.grad, want.bias.grad)
    assert torch.equal(
        dense_matrix(layer, layer.values.grad),
        want.weight.grad * (dense_matrix(layer, torch.ones_like(layer.values)) != 0),
    )


def test_without_bias_and_in_inference_mode(x, short):
    layer = seeded_layer(sparsity=0.5, dtype=torch.float64, bias=False)
    with torch.inference_mode():
        y = layer(x)
    assert y.is_inference()
    assert short == [True]
    torch.testing.assert_close(y.clone(), x @ dense_matrix(layer).T)


class Subclass(torch.Tensor):
    pass


class Functions(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Operations(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return (
            torch.zeros(6, 7, dtype=torch.float64)
            if "spmm" in self.seen[-1]
            else function(*args, **(kwargs or {}))
        )


def test_a_dispatch_mode_sees_the_operation(layer, x, short):
    with Operations() as mode, torch.no_grad():
        layer(x)
    assert mode.seen[-1] == "snack_cupy.spmm.default"
    assert short == [False]


@pytest.mark.parametrize(
    "make",
    [lambda x: x.as_subclass(Subclass), lambda x: nn.Parameter(x)],
    ids=["other", "parameter"],
)
def test_subclasses_of_tensors(layer, x, short, monkeypatch, make):
    monkeypatch.undo()  # the dispatcher takes tensors for what they are
    y = layer(make(x))
    torch.testing.assert_close(y.as_subclass(torch.Tensor), dense_twin(layer)(x))


def test_parametrised_bias(layer, x, short):
    class Twice(nn.Module):
        def forward(self, bias):
            return 2 * bias

    want = layer(x) + layer.bias
    nn.utils.parametrize.register_parametrization(layer, "bias", Twice())
    assert torch.equal(layer(x), want)
    nn.utils.parametrize.remove_parametrizations(layer, "bias")
    assert torch.equal(layer(x), want)
    assert short == [True, False, True]


def test_functional_call(layer, x):
    with torch.no_grad():
        want = 3 * (layer(x) - layer.bias)
    given = {"values": 3 * layer.values, "bias": torch.zeros_like(layer.bias)}
    assert torch.equal(torch.func.functional_call(layer, given, (x,)), want)
    assert torch.equal(torch.func.functional_call(layer, given, (x,)), want)


def test_hooks_of_modules_and_tensors(layer, x, short):
    events = []
    layer.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    layer.register_forward_hook(lambda module, args, y: y + 1)
    layer.register_full_backward_hook(lambda module, dx, dy: events.append((dx[0], dy[0])))
    layer.values.register_hook(lambda gradient: 3 * gradient)
    layer.values.register_post_accumulate_grad_hook(lambda values: events.append(values.grad))
    (z,) = require_grad(x)
    y = layer(z)
    want = dense_twin(layer)
    assert torch.equal(y, want(2 * x) + 1)
    y.sum().backward()
    assert short == [True]
    assert torch.equal(z.grad, 2 * want.weight.sum(0).expand(6, 12))
    assert len(events) == 2


def test_autocast_goes_the_long_way(short, monkeypatch):
    monkeypatch.undo()
    layer, x = seeded_layer(sparsity=0.5), integers((6, 12), 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


def test_transforms_are_refused(layer, x):
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.vmap(layer)(x[:, None])
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda z: layer(z).sum())(x)


@pytest.mark.parametrize("frozen", [False, True], ids=["training", "frozen"])
def test_forward_mode_goes_the_long_way_and_is_refused(layer, x, short, frozen):
    layer.requires_grad_(not frozen)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="forward mode AD"):
            layer(dual)
    assert short == [False]


def test_forward_mode_of_a_backward_is_refused(layer, x, short):
    y = layer(x.requires_grad_())
    assert short == [True]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y))
        with pytest.raises(NotImplementedError, match="forward mode AD"):
            torch.autograd.grad(y, (x, layer.values), dual)


def test_traced_layers_hold_the_operation(layer, x, short, monkeypatch):
    monkeypatch.undo()
    with torch.no_grad():
        traced = torch.jit.trace(layer, (x,), check_trace=False)
    assert "snack_cupy::spmm" in str(traced.graph)
    assert torch.equal(traced(x + 1), dense_twin(layer)(x + 1))


# Backward


@pytest.mark.parametrize("update", ["restructure", "prune", "grow"])
def test_an_update_between_forward_and_backward_raises(layer, x, short, update):
    y = layer(require_grad(x)[0])
    getattr(layer, update)(0.5)
    with pytest.raises(RuntimeError, match=STALE):
        y.sum().backward()
    layer(x).sum().backward()  # a new forward is fine
    assert short == [True, True]


def test_values_changed_between_forward_and_backward_raise(layer, x):
    y = layer(require_grad(x)[0])
    with torch.no_grad():
        layer.values.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_backward_twice_needs_a_retained_graph(layer, x):
    y = layer(x).sum()
    first = torch.autograd.grad(y, layer.values, retain_graph=True)
    assert torch.equal(first[0], torch.autograd.grad(y, layer.values)[0])
    with pytest.raises(RuntimeError, match="a second time"):
        y.backward()


def test_second_derivative(layer, x, short):
    (z,) = require_grad(x / 8)
    twin = dense_twin(layer)
    results = []
    for each, weight in ((layer, layer.values), (twin, twin.weight)):
        (first,) = torch.autograd.grad(each(z).tanh().sum(), z, create_graph=True)
        gradients = torch.autograd.grad(first.square().sum(), (z, weight, each.bias))
        results.append(gradients)
    assert short == [True]
    kept = dense_matrix(layer, torch.ones_like(layer.values)) != 0
    sparse, dense = results
    torch.testing.assert_close(sparse[0], dense[0])
    torch.testing.assert_close(dense_matrix(layer, sparse[1]), dense[1] * kept)
    torch.testing.assert_close(sparse[2], dense[2])


def test_gradcheck_and_gradgradcheck(layer, x, short):
    (z,) = require_grad(x)

    def product(z, values, bias):
        return layer(z)

    inputs = (z, layer.values, layer.bias)
    assert torch.autograd.gradcheck(product, inputs)
    assert torch.autograd.gradgradcheck(product, inputs)
    assert all(short)


def test_checkpointing_and_saved_tensor_hooks(layer, x, short):
    (z,) = require_grad(x)
    want = torch.autograd.grad(layer(z).tanh().sum(), (z, layer.values))
    y = checkpoint(layer, z, use_reentrant=False).tanh().sum()
    for got, expected in zip(torch.autograd.grad(y, (z, layer.values)), want, strict=True):
        assert torch.equal(got, expected)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        layer(z)
    assert len(packed) == 2  # x and values; index tensors are the layer's own
    assert all(short)


def test_an_output_without_gradient_in_a_larger_graph(layer, x):
    """A gradient that is zero may arrive as None."""

    class Drop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, dy):
            return None

    (z,) = require_grad(x)
    (Drop.apply(layer(z)).sum() + z.sum()).backward()
    assert torch.equal(z.grad, torch.ones_like(z))
    assert layer.values.grad is None
