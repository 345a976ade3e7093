"""Bad input to the operations: one exception that names operation, argument, rule and value."""

import numpy as np
import pytest

from snack_cupy import Topology, _check, sddmm, spmm, spmm_transposed, warmup

OPS = {"spmm": spmm, "spmm_transposed": spmm_transposed, "sddmm": sddmm}
each_op = pytest.mark.parametrize("op", OPS)


@pytest.fixture
def ready():
    """A (2, 3) topology with 4 entries, float32 values, x (5, 3) and its transpose."""
    topology = Topology.from_mask(np.array([[1, 0, 1], [1, 1, 0]]))
    x = np.ones((5, 3), np.float32)
    return topology, np.ones(4, np.float32), x, np.ascontiguousarray(x.T)


@each_op
@pytest.mark.parametrize("wrong", [None, [[1, 0]], np.ones((2, 3))], ids=["None", "list", "array"])
def test_op_rejects_what_is_no_topology(op, wrong):
    a, b = np.ones(4), np.ones(3)
    kind = type(wrong).__name__
    message = f"{op}: topology must be a snack_cupy.Topology, got {kind}"
    with pytest.raises(TypeError, match=message):
        OPS[op](wrong, a, b)


@each_op
@pytest.mark.parametrize("position", [0, 1])
def test_op_rejects_lists(op, position, ready):
    topology, values, _, dense = ready
    arguments = [np.ones((2, 5)), np.ones((3, 5))] if op == "sddmm" else [values, dense]
    arguments[position] = [1.0]
    names = ("left", "right") if op == "sddmm" else ("values", "dense")
    message = f"{op}: {names[position]} must be a NumPy or CuPy array, got list"
    with pytest.raises(TypeError, match=message):
        OPS[op](topology, *arguments)


@pytest.mark.parametrize("dtype", ["int64", "bool", "complex64"])
def test_spmm_rejects_other_dtypes(dtype, ready):
    topology, values, _, dense = ready
    with pytest.raises(TypeError, match=r"spmm: values must have a dtype of \(.*\), got"):
        spmm(topology, values.astype(dtype), dense.astype(dtype))


def test_spmm_rejects_mixed_dtypes(ready):
    topology, values, _, dense = ready
    message = r"spmm: dense must have the dtype of values \(float32\), got float64"
    with pytest.raises(TypeError, match=message):
        spmm(topology, values, dense.astype(np.float64))
    message = r"spmm: bias must have the dtype of values \(float32\), got float16"
    with pytest.raises(TypeError, match=message):
        spmm(topology, values, dense, bias=np.ones(2, np.float16))
    message = r"sddmm: right must have the dtype of left \(float32\), got float64"
    with pytest.raises(TypeError, match=message):
        sddmm(topology, np.ones(2, np.float32), np.ones(3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": (3,)}, r"spmm: values must have shape \(4,\), got \(3,\)"),
        ({"values": (4, 1)}, r"spmm: values must have shape \(4,\), got \(4, 1\)"),
        ({"dense": (2, 5)}, r"spmm: dense must have 3 rows, got \(2, 5\)"),
        ({"dense": (2,)}, r"spmm: dense must have 3 rows, got \(2,\)"),
        ({"dense": ()}, "spmm: dense must have 1 or 2 dimensions, got 0"),
        ({"dense": (3, 5, 1)}, "spmm: dense must have 1 or 2 dimensions, got 3"),
        ({"bias": (3,)}, r"spmm: bias must have shape \(2,\), got \(3,\)"),
        ({"bias": ()}, r"spmm: bias must have shape \(2,\), got \(\)"),
    ],
    ids=["values_short", "values_2d", "rows", "vector", "0d", "3d", "bias_long", "bias_0d"],
)
def test_spmm_rejects_shapes(change, message, ready):
    topology = ready[0]
    shapes = {"values": (4,), "dense": (3, 5), "bias": (2,), **change}
    arrays = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=message):
        spmm(topology, **arrays)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((5, 2), r"spmm: dense must have shape \(..., 3\), got \(5, 2\)"),
        ((3, 5), r"spmm: dense must have shape \(..., 3\), got \(3, 5\)"),
        ((), "spmm: dense must have at least 1 dimension, got 0"),
    ],
    ids=["features", "transposed", "0d"],
)
def test_spmm_batch_major_rejects_shapes(shape, message, ready):
    with pytest.raises(ValueError, match=message):
        spmm(ready[0], ready[1], np.ones(shape, np.float32), batch_major=True)


def test_spmm_transposed_and_sddmm_reject_shapes(ready):
    topology, values = ready[:2]
    ones = lambda *shape: np.ones(shape, np.float32)  # noqa: E731
    with pytest.raises(ValueError, match=r"spmm_transposed: dense must have 2 rows, got \(3, 5\)"):
        spmm_transposed(topology, values, ones(3, 5))
    with pytest.raises(ValueError, match=r"sddmm: left must have 2 rows, got \(3, 5\)"):
        sddmm(topology, ones(3, 5), ones(3, 5))
    with pytest.raises(ValueError, match=r"sddmm: right must have shape \(..., 3\), got \(5, 2\)"):
        sddmm(topology, ones(5, 2), ones(5, 2), batch_major=True)
    message = r"sddmm: right must have the trailing axes of left \(5,\), got \(4,\)"
    with pytest.raises(ValueError, match=message):
        sddmm(topology, ones(2, 5), ones(3, 4))
    message = r"sddmm: right must have the leading axes of left \(2, 5\), got \(10,\)"
    with pytest.raises(ValueError, match=message):
        sddmm(topology, ones(2, 5, 2), ones(10, 3), batch_major=True)


def test_out_is_checked(ready):
    topology, values, x, dense = ready
    strided = np.empty((5, 2), np.float32).T
    cases = [
        ([0.0], TypeError, "out must be a NumPy or CuPy array, got list"),
        (np.empty((2, 5)), TypeError, "out must have dtype float32, got float64"),
        (np.empty((5, 2), np.float32), ValueError, r"out must have shape \(2, 5\), got \(5, 2\)"),
        (strided, ValueError, r"out must be C-contiguous, got strides \(4, 8\)"),
    ]
    for out, error, message in cases:
        with pytest.raises(error, match=f"spmm: {message}"):
            spmm(topology, values, dense, out=out)
    memory = np.ones(16, np.float32)
    square = Topology.from_mask(np.ones((3, 3)))
    message = "spmm_transposed: out must not overlap an input, got shared memory"
    with pytest.raises(ValueError, match=message):
        overlapping = memory[:9].reshape(3, 3), memory[7:].reshape(3, 3)
        spmm_transposed(square, np.ones(9, np.float32), overlapping[0], out=overlapping[1])
    with pytest.raises(ValueError, match="sddmm: out must not overlap an input"):
        sddmm(square, x[:3], x[:3], batch_major=False, out=x.reshape(-1)[:9])


def test_kernel_names_are_checked(ready):
    topology, values, x, dense = ready
    message = r"spmm: kernel must be None or one of \('csr', 'snack_coo'\), got 'fast'"
    with pytest.raises(ValueError, match=message):
        spmm(topology, values, dense, kernel="fast")
    message = 'spmm: batch_major must be True for kernel "snack_coo", got False'
    with pytest.raises(ValueError, match=message):
        spmm(topology, values, dense, kernel="snack_coo")
    message = 'spmm: values must be float32 or float64 for kernel "snack_coo", got float16'
    with pytest.raises(TypeError, match=message):
        half = values.astype(np.float16), x.astype(np.float16)
        spmm(topology, *half, batch_major=True, kernel="snack_coo")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((None, 1), TypeError, "warmup: topology must be a snack_cupy.Topology, got NoneType"),
        ((..., -1), ValueError, "warmup: batch must be between 0 and 2147483647, got -1"),
        ((..., 1.5), TypeError, "warmup: batch must be an integer, got 1.5"),
        ((..., True), TypeError, "warmup: batch must be an integer, got True"),
        ((..., 8, "int8"), ValueError, "warmup: dtype must be one of .*, got 'int8'"),
    ],
    ids=["topology", "negative", "fraction", "bool", "dtype"],
)
def test_warmup_rejects(arguments, error, message, ready):
    topology, *rest = arguments
    with pytest.raises(error, match=message):
        warmup(ready[0] if topology is ... else topology, *rest)


class OnAnotherDevice(np.ndarray):
    """A NumPy array that `snack_cupy._xp.device_of` is made to place on a GPU."""


@each_op
@pytest.mark.parametrize("position", [0, 1])
def test_op_rejects_another_device(op, position, ready, monkeypatch):
    real = _check.device_of
    elsewhere = lambda a: "cuda:1" if isinstance(a, OnAnotherDevice) else real(a)  # noqa: E731
    monkeypatch.setattr(_check, "device_of", elsewhere)
    topology, values, _, dense = ready
    arguments = [np.ones((2, 5)), np.ones((3, 5))] if op == "sddmm" else [values, dense]
    arguments[position] = arguments[position].view(OnAnotherDevice)
    names = ("left", "right") if op == "sddmm" else ("values", "dense")
    message = f"{op}: {names[position]} must be on cpu, got cuda:1"
    with pytest.raises(ValueError, match=message):
        OPS[op](topology, *arguments)
