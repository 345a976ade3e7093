"""Checkpoints and copies of a layer: what is stored, what loads, what a failed load leaves."""

import copy
import io
import pickle

import pytest
import torch
from helpers import PROBLEMS, problem_ids
from torch import nn
from torch_helpers import (
    DTYPES,
    assert_same,
    integers,
    make_layer,
    make_mlp,
    positions,
    seeded_layer,
    snapshot,
    train_step,
)

from snack_cupy.torch import SnackLinear, bridge


def through_file(thing, **options):
    """What torch.load makes of what torch.save wrote."""
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, **options)


def storages(module):
    """Addresses of all memory that a module holds."""
    tensors = (*module.parameters(), *module.buffers())
    return {t.untyped_storage().data_ptr() for t in tensors if t.numel()}


# What a checkpoint holds


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", [12, 70_000], ids=["16_bits", "32_bits"])
def test_state_dict_keys_and_dtypes(features, dtype):
    layer = seeded_layer(features, 7, sparsity=0.999 if features > 12 else 0.5, dtype=DTYPES[dtype])
    layer(torch.ones(1, features, dtype=DTYPES[dtype], requires_grad=True))
    state = layer.state_dict()
    assert {name: (t.dtype, tuple(t.shape)) for name, t in state.items()} == {
        "values": (DTYPES[dtype], (layer.nnz,)),
        "bias": (DTYPES[dtype], (7,)),
        "row_offsets": (torch.int32, (8,)),
        "columns": (torch.int32, (layer.nnz,)),
    }
    assert state["columns"].tolist() == layer.topology.col.tolist()
    assert state["row_offsets"].tolist() == layer.topology.row_offsets.tolist()


def test_state_dict_without_bias():
    assert seeded_layer(bias=False).state_dict().keys() == {"values", "row_offsets", "columns"}


def test_checkpoint_is_small():
    layer = seeded_layer(1000, 1000, sparsity=0.99)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    # Value and column of each connection, offset and bias of each row; the file format on top.
    assert len(file.getvalue()) < layer.nnz * 8 + 1000 * 8 + 4096


# Loading


@pytest.mark.parametrize("p", PROBLEMS[:-2], ids=problem_ids(PROBLEMS[:-2]))
def test_load_of_any_topology(p):
    layer = make_layer(p, "float64")
    fresh = SnackLinear(p.k, p.m, sparsity=0.3, dtype=torch.float64)
    values, bias = fresh.values, fresh.bias
    result = fresh.load_state_dict(through_file(layer.state_dict(), weights_only=True))
    assert str(result) == "<All keys matched successfully>"
    assert fresh.values is values
    assert fresh.bias is bias
    assert_same(fresh.state_dict(), layer.state_dict())
    x = torch.randn(3, p.k, dtype=torch.float64)
    x, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, want = fresh(x), layer(other)
    assert torch.equal(y, want)
    y.sum().backward()
    want.sum().backward()
    assert torch.equal(x.grad, other.grad)
    assert torch.equal(values.grad, layer.values.grad)


@pytest.mark.parametrize("sparsity", [0.5, 0.25], ids=["same_nnz", "other_nnz"])
def test_load_after_use_rebuilds_what_is_derived(sparsity):
    layer, source = seeded_layer(sparsity=0.5), seeded_layer(seed=2, sparsity=sparsity)
    x = integers((3, 12)).requires_grad_()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    train_step(layer, optimizer, x, torch.zeros(3, 7))
    version = layer.values._version
    layer.load_state_dict(source.state_dict())
    assert layer.values._version > version
    assert layer.topology.equals(source.topology)
    assert layer.values.grad is None or layer.values.grad.shape == layer.values.shape
    got, want = (torch.autograd.grad(m(x).sum(), (x, m.values)) for m in (layer, source))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("sparsity", [0.5, 0.25], ids=["same_nnz", "other_nnz"])
def test_load_between_forward_and_backward_raises(sparsity):
    layer = seeded_layer(sparsity=0.5)
    y = layer(torch.ones(2, 12, requires_grad=True))
    layer.load_state_dict(seeded_layer(seed=2, sparsity=sparsity).state_dict())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_load_of_the_same_nnz_is_in_place():
    layer = seeded_layer(sparsity=0.5)
    layer(torch.ones(2, 12, requires_grad=True))
    tensors = [*layer.parameters(), *layer.buffers()]
    addresses = [t.data_ptr() for t in tensors]
    source = seeded_layer(seed=2, sparsity=0.5)
    layer.load_state_dict(source.state_dict())
    assert [t.data_ptr() for t in (*layer.parameters(), *layer.buffers())] == addresses
    view = source.topology.transposed
    assert layer.permutation.tolist() == view.permutation.tolist()
    assert bridge.index_to_array(layer.packed_rows).tolist() == view.rows.tolist()


def test_load_converts_the_dtype_as_linear_does():
    layer, source = seeded_layer(dtype=torch.float64), seeded_layer(seed=2)
    layer.load_state_dict(source.state_dict())
    assert layer.values.dtype == torch.float64
    assert torch.equal(layer.values, source.values.double())


def test_load_of_64_bit_indices():
    layer, source = seeded_layer(sparsity=0.5), seeded_layer(seed=2, sparsity=0.25)
    state = {
        k: v.long() if not v.is_floating_point() else v for k, v in source.state_dict().items()
    }
    for assign in (False, True):
        layer.load_state_dict(state, assign=assign)
        assert layer.row_offsets.dtype == torch.int32
        assert_same(layer.state_dict(), source.state_dict())


def test_load_by_assignment():
    source = seeded_layer(sparsity=0.25)
    layer = SnackLinear(12, 7, sparsity=0.5, device="meta")
    layer.load_state_dict(source.state_dict(), assign=True)
    assert layer.values.data_ptr() == source.values.data_ptr()
    assert isinstance(layer.values, nn.Parameter)
    x = integers((3, 12)).requires_grad_()
    got, want = (torch.autograd.grad(m(x).sum(), (x, m.values)) for m in (layer, source))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_load_into_a_model_and_its_optimizer_in_either_order():
    x, target = integers((4, 20)), integers((4, 8))
    trained = make_mlp(sparsity=0.5)
    optimizer = torch.optim.Adam(trained.parameters())
    for _ in range(3):
        train_step(trained, optimizer, x, target)
    trained[0].prune(0.5, optimizer=optimizer)
    states = copy.deepcopy((trained.state_dict(), optimizer.state_dict()))
    train_step(trained, optimizer, x, target)
    for first in (0, 1):
        model = make_mlp(sparsity=0.9, seed=5)
        resumed = torch.optim.Adam(model.parameters())
        for i in (first, 1 - first):
            (model, resumed)[i].load_state_dict(copy.deepcopy(states[i]))
        train_step(model, resumed, x, target)
        assert_same(model.state_dict(), trained.state_dict())


# Reports of loading


def test_load_reports_what_linear_would():
    model = nn.ModuleDict({"fc": seeded_layer()})
    state = model.state_dict()
    result = model.load_state_dict({}, strict=False)
    assert sorted(result.missing_keys) == sorted(state)
    result = model.load_state_dict({**state, "fc.other": torch.ones(1), "x": 1}, strict=False)
    assert (result.missing_keys, sorted(result.unexpected_keys)) == ([], ["fc.other", "x"])
    with pytest.raises(
        RuntimeError, match=r'Missing key\(s\) in state_dict: "fc.values", "fc.bias", '
    ):
        model.load_state_dict({})
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "fc.other"'):
        model.load_state_dict({**state, "fc.other": torch.ones(1)})


def test_load_without_bias_is_a_missing_key():
    layer, source = seeded_layer(), seeded_layer(seed=2, bias=False)
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "bias"'):
        layer.load_state_dict(source.state_dict())
    result = layer.load_state_dict(source.state_dict(), strict=False)
    assert result.missing_keys == ["bias"]
    assert torch.equal(layer.values, source.values)
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "bias"'):
        seeded_layer(bias=False).load_state_dict(layer.state_dict())


def changed(name, change):
    return lambda state: state.update({name: change(state[name])})


def out_of_range(columns):
    columns = columns.clone()
    columns[3] = 12
    return columns


MALFORMED = {
    "no_values": ("state_dict must hold all of .*values", lambda s: s.pop("values")),
    "no_row_offsets": (r"only \['values', 'columns'\]", lambda s: s.pop("row_offsets")),
    "no_columns": (r"only \['values', 'row_offsets'\]", lambda s: s.pop("columns")),
    "values_length": (r"values must have shape \(42,\), got", changed("values", lambda v: v[1:])),
    "values_ndim": (r"values must have shape \(42,\), got", changed("values", lambda v: v[None])),
    "values_type": ("values must be a tensor, got list", changed("values", torch.Tensor.tolist)),
    "bias_shape": (r"bias must have shape \(7,\), got \(6,\)", changed("bias", lambda b: b[1:])),
    "bias_type": ("bias must be a tensor, got ndarray", changed("bias", torch.Tensor.numpy)),
    "row_offsets_length": (
        r"row_offsets must have shape \(8,\), got \(7,\)",
        changed("row_offsets", lambda r: r[1:]),
    ),
    "row_offsets_decrease": (
        "row_offsets must not decrease",
        changed("row_offsets", lambda r: r[[0, 2, 1, 3, 4, 5, 6, 7]]),
    ),
    "row_offsets_dtype": (
        "row_offsets must have an integer dtype, got float32",
        changed("row_offsets", torch.Tensor.float),
    ),
    "columns_range": (r"hold indices in \[0, 12\), got 12", changed("columns", out_of_range)),
    "columns_negative": (r"hold indices in \[0, 12\), got -", changed("columns", lambda c: c - 1)),
    "columns_order": ("columns must strictly increase", changed("columns", lambda c: c.flip(0))),
    "columns_dtype": ("columns must have an integer", changed("columns", torch.Tensor.double)),
    "columns_device": ("meta", changed("columns", lambda c: c.to("meta"))),
}  # fmt: skip


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not_strict"])
@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_checkpoint_changes_nothing(case, strict):
    message, spoil = MALFORMED[case]
    layer = seeded_layer(sparsity=0.5)
    x = integers((3, 12)).requires_grad_()
    layer(x).sum().backward()
    topology, before = layer.topology, snapshot(layer)
    state = seeded_layer(seed=2, sparsity=0.5).state_dict()
    spoil(state)
    with pytest.raises(RuntimeError, match="(?s)loading state_dict for SnackLinear.*" + message):
        layer.load_state_dict(state, strict=strict)
    assert_same(snapshot(layer), before)
    assert layer.topology is topology


def test_malformed_checkpoint_names_the_layer():
    model = nn.Sequential(nn.ReLU(), seeded_layer())
    state = model.state_dict()
    state["1.columns"] = state["1.columns"].flip(0)
    with pytest.raises(RuntimeError, match=r"1: Topology: columns must strictly increase"):
        model.load_state_dict(state)


# Copies


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "torch_save": lambda m: through_file(m, weights_only=False),
}


@pytest.mark.parametrize("kind", COPIES)
def test_copies_are_equal_and_share_nothing(kind):
    model = make_mlp(sparsity=0.5)
    x = integers((3, 20)).requires_grad_()
    model(x).sum().backward()
    _ = model[0].topology  # cached views must not travel
    twin = COPIES[kind](model)
    assert_same(twin.state_dict(), model.state_dict())
    assert not storages(model) & storages(twin)
    before = snapshot(model[0])
    twin[0].restructure(0.5, key=1)
    assert_same(snapshot(model[0]), before)
    assert twin[0].topology.equals(twin[0].topology.copy())
    assert bridge.address(twin[0].topology.columns) == twin[0].packed_columns.data_ptr()
    got, want = (torch.autograd.grad(m(x).sum(), x)[0] for m in (COPIES[kind](model), model))
    assert torch.equal(got, want)


def test_copy_with_share_memory():
    layer = seeded_layer(sparsity=0.5).share_memory()
    assert all(t.is_shared() for t in (*layer.parameters(), *layer.buffers()))
    layer.restructure(0.5, key=1)
    assert positions(layer).tolist() == layer.topology.positions.tolist()
