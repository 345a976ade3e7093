"""`SnackLinear` on the GPU: what it computes, stores and converts is what it does on the CPU."""

import copy

import pytest
from helpers import DTYPES, PROBLEMS, problem_ids

dtypes = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture
def layer(torch, torch_helpers):
    return torch_helpers.seeded_layer(sparsity=0.5, device="cuda")


@pytest.mark.parametrize("p", PROBLEMS, ids=problem_ids(PROBLEMS))
def test_layer_moves_between_devices(torch, torch_helpers, p):
    host = torch_helpers.make_layer(p)
    x = torch.randn(2, p.k)
    host(x.clone().requires_grad_())  # with the column-major view, which moves along
    moved = copy.deepcopy(host).to("cuda")
    assert {t.device.type for t in (*moved.parameters(), *moved.buffers())} == {"cuda"}
    assert moved.topology.device == "cuda:0"
    assert moved.topology.to_device("cpu").equals(host.topology)
    z = x.cuda().requires_grad_()
    moved(z).sum().backward()
    back = moved.cpu()
    torch_helpers.assert_same(back.state_dict(), host.state_dict())
    assert torch.equal(back.permutation, host.permutation)


def test_topology_and_values_of_a_cpu_generator_are_the_same(torch, torch_helpers):
    host = torch_helpers.seeded_layer(sparsity=0.5)
    device = torch_helpers.seeded_layer(sparsity=0.5, device="cuda")
    torch_helpers.assert_same(device.cpu().state_dict(), host.state_dict())


def test_given_topology_of_another_device(torch, snack, layer):
    host = snack.SnackLinear(12, 7, topology=layer.topology)
    assert (host.values.device.type, host.topology.device) == ("cpu", "cpu")
    again = snack.SnackLinear(12, 7, topology=host.topology, device="cuda")
    assert again.topology.device == "cuda:0"
    assert again.topology.equals(layer.topology)


def test_generator_of_the_gpu(torch, snack):
    layers = []
    for seed in (1, 1, 2):
        generator = torch.Generator("cuda").manual_seed(seed)
        layers.append(snack.SnackLinear(12, 7, device="cuda", generator=generator))
    assert torch.equal(layers[0].values, layers[1].values)
    assert layers[0].topology.equals(layers[1].topology)
    assert not layers[0].topology.equals(layers[2].topology)


def test_topology_is_made_of_the_buffers(torch, layer):
    topology = layer.topology
    assert topology is layer.topology
    assert topology.row_offsets.data.ptr == layer.row_offsets.data_ptr()
    assert topology.columns.data.ptr == layer.packed_columns.data_ptr()
    layer(torch.ones(1, 12, device="cuda", requires_grad=True))
    view = layer.topology.transposed
    for array, name in zip(view, ("col_offsets", "packed_rows", "permutation"), strict=True):
        assert array.data.ptr == getattr(layer, name).data_ptr()


def test_bridge_shares_memory_both_ways(torch, snack, cp):
    for dtype in (torch.float32, torch.float64, torch.float16, torch.int32, torch.uint8):
        tensor = torch.ones((3, 4), dtype=dtype, device="cuda").T[1:]
        array = snack.to_array(tensor)
        assert array.data.ptr == tensor.data_ptr()
        back = snack.to_tensor(array)
        assert (back.data_ptr(), back.stride()) == (tensor.data_ptr(), tensor.stride())
        assert back.dtype == dtype


@dtypes
def test_conversion_from_and_to_dense(torch, snack, torch_helpers, dtype):
    dense = torch.nn.Linear(33, 21, device="cuda", dtype=torch_helpers.DTYPES[dtype])
    layer = snack.SnackLinear.from_dense(dense, sparsity=0.7)
    host = snack.SnackLinear.from_dense(copy.deepcopy(dense).cpu(), sparsity=0.7)
    torch_helpers.assert_same(copy.deepcopy(layer).cpu().state_dict(), host.state_dict())
    back = layer.to_dense()
    assert back.weight.device == layer.values.device
    assert torch.equal(back.weight.cpu(), torch_helpers.dense_matrix(layer))
    again = snack.SnackLinear.from_dense(back, mask=back.weight != 0)
    torch_helpers.assert_same(again.state_dict(), layer.state_dict())


@dtypes
@pytest.mark.parametrize("lead", [(), (1,), (5,), (2, 3), (2, 0, 3)], ids=str)
def test_layer_computes_what_linear_does(torch, torch_helpers, lead, dtype):
    kind = torch_helpers.DTYPES[dtype]
    layer = torch_helpers.seeded_layer(sparsity=0.5, dtype=kind, device="cuda")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch_helpers.integers(parameter.shape, 3))  # so that sums are exact
    dense = layer.to_dense()
    x = torch_helpers.integers((*lead, 12), 4, kind, "cuda") % 4
    x, x_dense = torch_helpers.require_grad(x, x)
    y, y_dense = layer(x), dense(x_dense)
    assert torch.equal(y, y_dense)
    gradient = torch_helpers.integers(y.shape, 5, kind, "cuda") % 3
    y.backward(gradient)
    y_dense.backward(gradient)
    assert torch.equal(x.grad, x_dense.grad)
    kept = torch.from_numpy(torch_helpers.positions(layer)).cuda()
    assert torch.equal(layer.values.grad, dense.weight.grad.flatten()[kept])
    assert torch.equal(layer.bias.grad, dense.bias.grad)


@pytest.mark.parametrize("sparsity", [0.5, 0.25], ids=["same_nnz", "other_nnz"])
def test_checkpoint_loads_across_devices_and_topologies(torch, torch_helpers, layer, sparsity):
    layer(torch.ones(1, 12, device="cuda", requires_grad=True))
    values = layer.values
    source = torch_helpers.seeded_layer(seed=2, sparsity=sparsity)
    layer.load_state_dict(source.state_dict())
    assert layer.values is values
    assert layer.packed_columns.is_cuda
    torch_helpers.assert_same(copy.deepcopy(layer).cpu().state_dict(), source.state_dict())
    x = torch_helpers.integers((3, 12), 1)
    z = x.cuda().requires_grad_()
    y = layer(z)
    y.sum().backward()
    torch.testing.assert_close(y.cpu(), source(x))
    column_sums = torch_helpers.dense_matrix(source).sum(0)
    torch.testing.assert_close(z.grad.cpu(), column_sums.expand(3, 12))
    host = torch_helpers.seeded_layer(seed=3, sparsity=0.9)
    host.load_state_dict(layer.state_dict())
    torch_helpers.assert_same(host.state_dict(), source.state_dict())


def test_malformed_checkpoint_changes_nothing(torch, torch_helpers, layer):
    before = torch_helpers.snapshot(layer)
    state = torch_helpers.seeded_layer(seed=2, sparsity=0.5, device="cuda").state_dict()
    state["columns"] = state["columns"].flip(0)
    with pytest.raises(RuntimeError, match="columns must strictly increase within each row"):
        layer.load_state_dict(state)
    torch_helpers.assert_same(torch_helpers.snapshot(layer), before)


def test_layer_made_under_a_device_context(torch, snack):
    with torch.device("cuda"):
        layer = snack.SnackLinear(8, 4)
    assert layer.values.is_cuda
    assert layer.weight.is_cuda
    assert layer.row_offsets.is_cuda


def test_compiled_layer_equals_eager(torch, torch_helpers):
    torch.compiler.reset()
    model = torch_helpers.make_mlp(sparsity=0.5, device="cuda")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch_helpers.integers((6, 20), 1, device="cuda").requires_grad_()
    for key in range(2):
        results = []
        for run in (compiled, model):
            y = run(x)
            results.append([y, *torch.autograd.grad(y.sum(), (x, *model.parameters()))])
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want)
        model[0].restructure(0.5, key=key)


def test_opcheck(torch, torch_helpers, layer):
    from snack_cupy.torch import ops

    x = torch_helpers.integers((6, 12), 1, device="cuda")
    gradient = torch_helpers.integers((6, 7), 2, device="cuda")
    values, rows = layer.values.detach(), (layer.row_offsets, layer.packed_columns)
    columns = ops.transpose(*rows, 12)
    for op, arguments in (
        (ops.transpose, (*rows, 12)),
        (ops.spmm, (x, values, layer.bias.detach(), *rows)),
        (ops.spmm_transposed, (gradient, values, *columns)),
        (ops.sddmm, (gradient, x, *rows)),
    ):
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))
