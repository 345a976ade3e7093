"""Devices: the right one is entered and left, and arguments on different ones are refused."""

import pytest


@pytest.fixture
def layer(torch_helpers):
    return torch_helpers.seeded_layer(sparsity=0.5, device="cuda")


class Recorder:
    """In the place of ``torch.cuda.device``: notes what is entered and left, and why."""

    def __init__(self, events):
        self.events = events

    def __call__(self, device):
        self.device = device
        return self

    def __enter__(self):
        self.events.append(("enter", self.device))

    def __exit__(self, kind, *error):
        self.events.append(("exit", kind))


@pytest.fixture
def elsewhere(torch, monkeypatch):
    """Events of the guard and the launches, while another device seems to be current."""
    from snack_cupy import _jit

    events, launch = [], _jit.launch

    def noted(plan, pointers, stream):
        events.append("launch")
        launch(plan, pointers, stream)

    monkeypatch.setattr(_jit, "launch", noted)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 7)
    monkeypatch.setattr(torch.cuda, "device", Recorder(events))
    return events


GUARDED = [("enter", 0), "launch", ("exit", None)]


def test_another_current_device_is_left_and_restored(torch, torch_helpers, layer, elsewhere):
    from snack_cupy.torch import ops

    x, gradient = torch_helpers.X.cuda(), torch_helpers.TARGET.cuda()
    rows = (layer.row_offsets, layer.packed_columns)
    host = torch_helpers.seeded_layer(sparsity=0.5)
    columns = [t.cuda() for t in ops.transpose(host.row_offsets, host.packed_columns, 12)]
    with torch.no_grad():
        y = ops.spmm(x, layer.values, layer.bias, *rows)
        z = ops.spmm_transposed(gradient, layer.values, *columns)
        s = ops.sddmm(gradient, x, *rows)
    assert elsewhere == GUARDED * 3
    torch.testing.assert_close(y.cpu(), host(torch_helpers.X))
    matrix = torch_helpers.dense_matrix(host)
    torch.testing.assert_close(z.cpu(), torch_helpers.TARGET @ matrix)
    entries = (torch_helpers.TARGET.T @ torch_helpers.X).flatten()
    torch.testing.assert_close(s.cpu(), entries[torch_helpers.positions(host)])


def test_the_current_device_is_not_entered_again(
    torch, torch_helpers, layer, elsewhere, monkeypatch
):
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0)
    with torch.no_grad():
        layer(torch_helpers.X.cuda())
    assert elsewhere == ["launch"]


def test_a_failing_launch_leaves_the_device(torch, torch_helpers, layer, elsewhere, monkeypatch):
    from snack_cupy import _jit

    def fail(plan, pointers, stream):
        raise MemoryError("no launch")

    monkeypatch.setattr(_jit, "launch", fail)
    with pytest.raises(MemoryError, match="no launch"), torch.no_grad():
        layer(torch_helpers.X.cuda())
    assert elsewhere == [("enter", 0), ("exit", MemoryError)]


def test_every_gpu_computes(torch, torch_helpers):
    host = torch_helpers.seeded_layer(sparsity=0.5)
    want = torch.autograd.grad(host(torch_helpers.X).sum(), host.values)[0]
    for index in reversed(range(torch.cuda.device_count())):
        layer = torch_helpers.seeded_layer(sparsity=0.5, device=f"cuda:{index}")
        x = torch_helpers.X.to(f"cuda:{index}").requires_grad_()
        layer(x).sum().backward()
        torch.testing.assert_close(layer.values.grad.cpu(), want)
        layer.restructure(0.5, key=1)
        assert layer.topology.device == f"cuda:{index}"
        assert torch.cuda.current_device() == 0


def test_array_scope_restores_what_was_current(torch, cp):
    from snack_cupy.torch import bridge

    stream = torch.cuda.Stream()
    state = cp.cuda.get_current_stream().ptr, cp.cuda.Device().id, cp.cuda.get_allocator()
    with pytest.raises(MemoryError), torch.cuda.stream(stream):
        with bridge.array_scope(torch.device("cuda")):
            assert cp.cuda.get_current_stream().ptr == stream.cuda_stream
            held = torch.cuda.memory_allocated()
            array = cp.zeros(1 << 20, cp.uint8)
            assert torch.cuda.memory_allocated() - held == array.nbytes
            raise MemoryError
    del array
    assert (cp.cuda.get_current_stream().ptr, cp.cuda.Device().id) == state[:2]
    assert cp.cuda.get_allocator() == state[2]


def test_arguments_on_different_devices_are_refused(torch, snack, torch_helpers, layer):
    x = torch_helpers.X
    with pytest.raises(
        ValueError, match=r"^SnackLinear: x must be on the device of values \(cuda:0\)"
    ):
        layer(x)
    with pytest.raises(
        ValueError, match=r"^SnackLinear: x must be on the device of values \(cpu\)"
    ):
        layer.cpu()(x.cuda())
    topology = layer.topology
    values = layer.values.detach()
    with pytest.raises(ValueError, match=r"^spmm: values must be on the topology's device \(cpu\)"):
        snack.spmm(topology, values.cuda(), x.cuda())
    topology = topology.to_device("cuda")
    with pytest.raises(
        ValueError, match=r"^spmm: values must be on the topology's device \(cuda:0\)"
    ):
        snack.spmm(topology, values, x)
    with pytest.raises(ValueError, match=r"^spmm: x must be on the device of values \(cuda:0\)"):
        snack.spmm(topology, values.cuda(), x)
    with pytest.raises(ValueError, match=r"^spmm: bias must be on the device of values"):
        snack.spmm(topology, values.cuda(), x.cuda(), bias=torch.ones(7))
    with pytest.raises(ValueError, match=r"^sddmm: right must be on the device of left"):
        snack.sddmm(topology, torch_helpers.TARGET.cuda(), x)


def test_import_creates_no_context(torch):
    import subprocess
    import sys

    code = (
        "import sys, snack_cupy, snack_cupy.torch, torch; "
        "snack_cupy.torch.SnackLinear(8, 4)(torch.ones(2, 8)).sum().backward(); "
        "assert not torch.cuda.is_initialized() and 'cupy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
