"""Bad input to `COOTensor`: one clear exception, and nothing large allocated."""

import numpy as np
import pytest

from snack_cupy import COOTensor, Topology, _check

BAD_INPUT = {
    "coords_none": (
        (None, [1]),
        TypeError,
        r"coords must be an integer array of shape \(ndim, nnz",
    ),
    "coords_string": (("01", [1, 2]), TypeError, r"coords must be .*, got str"),
    "coords_1d_array": ((np.array([0, 1]), [1, 2]), ValueError, r"coords must have 2 dimensions"),
    "coords_flat_list": (
        ([0, 1], [1]),
        ValueError,
        r"coords\[0\] must be one index sequence, got 0",
    ),
    "coords_nested": (([[[0]], [[1]]], [1]), ValueError, r"coords\[0\] must be one index sequence"),
    "coords_ragged": (
        ([[[0], [1, 2]]], [1]),
        ValueError,
        r"coords\[0\] must be a flat sequence of",
    ),
    "coords_no_dimension": (
        ((), []),
        ValueError,
        "coords must have a row for each dimension, at l",
    ),
    "coords_floats": (
        (np.ones((2, 3)), [1] * 3),
        TypeError,
        "coords must have an integer dtype, g",
    ),
    "coords_float_list": (
        ([[0], [1.0]], [1]),
        TypeError,
        r"coords\[1\] must have an integer dtype,",
    ),
    "coords_bools": ((np.ones((1, 3), bool), [1] * 3), TypeError, "integer dtype, got bool"),
    "coords_bool_list": (
        ([[True]], [1]),
        TypeError,
        r"coords\[0\] must have an integer dtype, got b",
    ),
    "coords_strings": (
        ([["a"]], [1]),
        TypeError,
        r"coords\[0\] must have an integer dtype, got str",
    ),
    "coords_huge": (
        ([[2**70]], [1]),
        TypeError,
        r"coords\[0\] must have an integer dtype, got obje",
    ),
    "coords_empty_floats": (([np.array([])], []), TypeError, "integer dtype, got float64"),
    "coords_unequal": (
        ([[0, 1], [0]], [1, 2]),
        ValueError,
        r"coords must hold index sequences of one length, got \(2, 1\)",
    ),
    "data_short": (
        ([[0, 1]], [1]),
        ValueError,
        "data must have one entry for each of the 2 coordi",
    ),
    "data_2d": (([[0]], [[1]]), ValueError, "data must have 1 dimension, got 2"),
    "data_number": (([[0]], 1), ValueError, "data must have 1 dimension, got 0"),
    "data_strings": (
        ([[0]], ["a"]),
        TypeError,
        "data must have a boolean or numeric dtype, got str",
    ),
    "data_objects": (
        ([[0]], [None]),
        TypeError,
        "data must have a boolean or numeric dtype, got ob",
    ),
    "data_ragged": (([[0]], [[1], [1, 2]]), ValueError, "data must be a flat sequence of numbers"),
    "shape_missing": (
        ([[]], []),
        ValueError,
        "shape must be given where there are no entries, got",
    ),
    "shape_short": (
        ([[0], [0]], [1], (3,)),
        ValueError,
        "shape must have 2 entries, one per row of",
    ),
    "shape_number": (([[0]], [1], 3), TypeError, "shape must be a tuple of integers, got 3"),
    "shape_float": (
        ([[0]], [1], (3.0,)),
        TypeError,
        r"shape must be a tuple of integers, got \(3.0",
    ),
    "shape_negative": (
        ([[0]], [1], (-3,)),
        ValueError,
        r"shape must have no negative entry, got \(-",
    ),
    "shape_huge": (([[0]], [1], (2**63,)), ValueError, r"shape must have no entry above 2\^63 - 1"),
    "index_beyond": (
        ([[0, 0], [1, 5]], [1, 2], (3, 5)),
        IndexError,
        r"coords\[1\] must hold indices in \[0, 5\), got 5",
    ),
    "index_negative": (
        ([[0, -1], [1, 4]], [1, 2], (3, 5)),
        IndexError,
        r"coords\[0\] must hold indices in \[0, 3\), got -1",
    ),
    "index_negative_without_shape": (
        ([[-5, -2]], [1, 2]),
        IndexError,
        r"coords\[0\] must hold indices in \[0, 0\), got -5",
    ),
    "index_into_nothing": (
        ([[0], [0]], [1], (3, 0)),
        IndexError,
        r"coords\[1\] must hold indices in \[0, 0\), got 0",
    ),
    "index_of_64_bits": (
        (np.array([[2**64 - 1]], np.uint64), [1], (3,)),
        IndexError,
        r"coords\[0\] must hold indices in \[0, 3\), got 18446744073709551615",
    ),
    "index_that_would_wrap": (
        ([np.array([2**63 + 1], np.uint64), np.array([0])], [1], (3, 3)),
        IndexError,
        r"coords\[0\] must hold indices in \[0, 3\), got -",
    ),
}


@pytest.mark.parametrize(("arguments", "error", "message"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_coo_rejects(arguments, error, message):
    with pytest.raises(error, match=message) as caught:
        COOTensor(*arguments)
    assert str(caught.value).startswith("COOTensor: ")


def test_coo_check_false_skips_the_comparison_with_the_shape():
    tensor = COOTensor([[7]], [1.0], (3,), check=False)
    assert tensor.coords.tolist() == [[7]]


def test_coo_rejects_arrays_of_two_devices(monkeypatch):
    class Elsewhere(np.ndarray):
        """A NumPy array that is made to seem on a GPU."""

    real = _check.device_of
    fake = lambda a: "cuda:0" if isinstance(a, Elsewhere) else real(a)  # noqa: E731
    monkeypatch.setattr(_check, "device_of", fake)
    with pytest.raises(ValueError, match="COOTensor: data must be on cpu, got cuda:0"):
        COOTensor(np.array([[0]]), np.ones(1).view(Elsewhere), (3,))


OTHER_BAD_INPUT = {
    "from_dense_number": (
        lambda: COOTensor.from_dense(3.0),
        ValueError,
        "at least 1 dimension, got 0",
    ),
    "from_dense_text": (
        lambda: COOTensor.from_dense(["a"]),
        TypeError,
        "array must have a boolean or",
    ),
    "from_scipy_array": (
        lambda: COOTensor.from_scipy(np.eye(3)),
        TypeError,
        "COOTensor.from_scipy: matrix must be a SciPy sparse array or matrix, got ndarray",
    ),
    "from_topology_array": (
        lambda: COOTensor.from_topology(np.eye(3), np.ones(3)),
        TypeError,
        "COOTensor.from_topology: topology must be a snack_cupy.Topology, got ndarray",
    ),
    "from_topology_list": (
        lambda: COOTensor.from_topology(Topology.from_mask(np.eye(2)), [1, 2]),
        TypeError,
        "COOTensor.from_topology: values must be a NumPy or CuPy array, got list",
    ),
    "from_topology_length": (
        lambda: COOTensor.from_topology(Topology.from_mask(np.eye(2)), np.ones(3)),
        ValueError,
        r"COOTensor.from_topology: values must have shape \(2,\), got \(3,\)",
    ),
    "from_topology_dtype": (
        lambda: COOTensor.from_topology(Topology.from_mask(np.eye(2)), np.array(["a", "b"])),
        TypeError,
        "COOTensor.from_topology: values must have a boolean or numeric dtype, got str",
    ),
    "to_scipy_format": (
        lambda: COOTensor.from_dense(np.eye(2)).to_scipy("xyz"),
        ValueError,
        r"COOTensor.to_scipy: format must be one of \(.*\), got 'xyz'",
    ),
    "to_scipy_float16": (
        lambda: COOTensor.from_dense(np.eye(2, dtype=np.float16)).to_scipy(),
        TypeError,
        r"COOTensor.to_scipy: dtype must be one SciPy knows \(call astype.*\), got float16",
    ),
}


@pytest.mark.parametrize(
    ("action", "error", "message"), OTHER_BAD_INPUT.values(), ids=OTHER_BAD_INPUT
)
def test_coo_methods_reject(action, error, message):
    with pytest.raises(error, match=message):
        action()
