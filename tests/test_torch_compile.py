"""Under torch.compile: no graph break, the same results, updates seen, stale graphs refused."""

import shutil

import pytest
import torch
from torch_helpers import DTYPES, integers, make_mlp, seeded_layer

from snack_cupy.torch import bridge, ops

X, TARGET = integers((6, 20), 1), integers((6, 8), 2)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def model():
    return make_mlp(sparsity=0.5)


class Counter:
    """A backend that counts the graphs it is given; the rest is aot_eager's."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


def gradients(run, model, x):
    """The output and all gradients."""
    x = x.clone().requires_grad_()
    y = run(x)
    return [
        y,
        *torch.autograd.grad((y - TARGET[: len(y)]).square().mean(), (x, *model.parameters())),
    ]


def assert_all_close(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


# Compiled models


def test_compiled_model_has_no_graph_break_and_equals_eager(model):
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")  # never called before
    got = gradients(compiled, model, X)
    assert_all_close(got, gradients(model, model, X))
    assert model[0].permutation is not None


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("c++"), reason="TorchInductor needs a C++ compiler")
def test_compiled_by_inductor_equals_eager(model):
    compiled = torch.compile(model, fullgraph=True)
    assert_all_close(gradients(compiled, model, X), gradients(model, model, X))


def test_no_recompilation_at_a_constant_nnz_update(model):
    backend = Counter()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for _ in range(2):  # the first call builds the column-major views, the second finds them
        gradients(compiled, model, X)
    graphs = backend.graphs
    for key in range(3):
        for layer in (model[0], model[2]):
            layer.restructure(0.4, key=key)
        assert_all_close(gradients(compiled, model, X), gradients(model, model, X))
    assert backend.graphs == graphs


def test_recompilation_at_another_nnz(model):
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    output = gradients(compiled, model, X)  # its graph stays alive
    model[0].prune(0.5)
    assert_all_close(gradients(compiled, model, X), gradients(model, model, X))
    model[2].grow(0.5)
    assert_all_close(gradients(compiled, model, X), gradients(model, model, X))
    assert output[0].shape == (6, 8)


def test_dynamic_batch(model):
    backend = Counter()
    gradients(model, model, X)
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=True)
    for batch in (6, 5, 3):
        x = X[:batch].contiguous()
        assert_all_close(gradients(compiled, model, x), gradients(model, model, x))
    assert backend.graphs == 1


@pytest.mark.parametrize("frozen", [False, True], ids=["training", "frozen"])
def test_stale_compiled_graph_raises(model, frozen):
    model.requires_grad_(not frozen)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    y = compiled(X.clone().requires_grad_())
    model[2].restructure(0.4, key=1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_compiled_under_autocast(model):
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = compiled(X), model(X)
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want)


def test_compiled_without_gradients(model):
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(X), model(X))


def test_exported_model_equals_eager(model):
    exported = torch.export.export(model, (X,))
    names = {node.target for node in exported.graph.nodes if node.op == "call_function"}
    assert ops.spmm in names
    torch.testing.assert_close(exported.module()(X), model(X))


# The operations by themselves


def samples(layer):
    """Arguments of each operation, without gradients."""
    dtype = layer.values.dtype
    x, gradient = (
        integers((6, layer.in_features), 3, dtype),
        integers((6, layer.out_features), 4, dtype),
    )
    values, bias = layer.values.detach(), layer.bias.detach()
    rows = (layer.row_offsets, layer.packed_columns)
    columns = tuple(t.clone() for t in ops.transpose(*rows, layer.in_features))
    return {
        "spmm": (x, values, bias, *rows),
        "spmm_no_bias": (x, values, None, *rows, "csr"),
        "spmm_empty_batch": (x[:0], values, bias, *rows),
        "spmm_transposed": (gradient, values, *columns),
        "sddmm": (gradient, x, *rows),
        "transpose": (*rows, layer.in_features),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sample", samples(seeded_layer()))
def test_opcheck(sample, dtype):
    arguments = samples(seeded_layer(sparsity=0.5, dtype=DTYPES[dtype]))[sample]
    name = "transpose" if sample == "transpose" else sample.removesuffix("_no_bias")
    op = getattr(ops, name.removesuffix("_empty_batch"))
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


def test_opcheck_of_wide_indices():
    layer = seeded_layer(70_000, 3, sparsity=0.9995)
    for sample, arguments in samples(layer).items():
        op = getattr(ops, sample.removesuffix("_no_bias").removesuffix("_empty_batch"))
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


def test_transpose_is_the_topology_view():
    layer = seeded_layer(sparsity=0.5)
    view = layer.topology.transposed
    got = ops.transpose(layer.row_offsets, layer.packed_columns, 12)
    for tensor, array in zip(got, view, strict=True):
        assert bridge.index_to_array(tensor).tolist() == array.tolist()
