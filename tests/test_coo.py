"""`COOTensor` on NumPy arrays: construction, conversions, shape and copies, against dense NumPy."""

import copy
import itertools
import pickle

import numpy as np
import pytest
from coo_helpers import (
    COL,
    DATA,
    DENSE,
    EMPTY_SHAPES,
    ROW,
    each_dtype,
    each_other,
    each_shape,
    random_dense,
    shuffled,
)
from helpers import PROBLEMS, assert_coo, make_topology, problem_ids
from scipy import sparse

from snack_cupy import COOTensor, CudaUnavailableError, Topology, _jit, coo

# Construction


@pytest.mark.parametrize(
    "coords",
    [
        ([0, 2, 1], [3, 0, 1]),
        [[0, 2, 1], [3, 0, 1]],
        (np.array([0, 2, 1], np.uint8), [3, 0, 1]),
        (range(0, 3, 1), (3, 1, 0)),
        np.array([[0, 2, 1], [3, 0, 1]]),
        np.array([[0, 2, 1], [3, 0, 1]], np.uint64),
        np.array([[0, 3], [2, 0], [1, 1]], np.int16).T,
        (np.array([0, 2, 1], np.uint64), np.array([3, 0, 1], np.int64)),
    ],
    ids=["lists", "list", "mixed", "range", "array", "uint64", "strided_int16", "uint64_int64"],
)
def test_coo_takes_coordinates_in_many_forms(coords):
    tensor = COOTensor(coords, [1.0, 2.0, 3.0], shape=(3, 4))
    dense = np.zeros((3, 4))
    for row, col, value in zip(
        *np.array([list(map(int, c)) for c in coords]), [1, 2, 3], strict=True
    ):
        dense[row, col] = value
    assert_coo(tensor, dense)
    assert tensor.coords.flags.c_contiguous


def test_coo_tells_the_shape_from_the_coordinates():
    assert COOTensor(([0, 2], [3, 1]), [1, 2]).shape == (3, 4)
    assert COOTensor([[4]], [1]).shape == (5,)


def test_coo_keeps_stored_zeros_and_duplicates(messy):
    assert_coo(messy, DENSE.astype(float), nnz=6)
    assert messy.coords.tolist() == [ROW, COL]
    assert messy.data.tolist() == DATA
    assert messy.row.tolist() == ROW
    assert messy.col.tolist() == COL
    assert (messy.nnz, messy.size, messy.density) == (6, 12, 0.5)


@each_dtype
def test_coo_keeps_the_dtype_of_its_data(dtype):
    tensor = COOTensor(([0, 1], [1, 0]), np.array([1, 0], dtype), (2, 2))
    assert_coo(tensor, np.array([[0, 1], [0, 0]], dtype), nnz=2)


def test_coo_dtypes_of_sequences_are_numpys():
    for data in ([1, 2], [1.5, 2], [True, False], [1j, 2]):
        assert COOTensor([[0, 1]], data).dtype == np.asarray(data).dtype


def test_coo_owns_its_arrays():
    coords, data = np.array([[0, 1], [1, 0]], np.int32), np.array([1.0, 2.0])
    tensor = COOTensor(coords, data, (2, 2))
    coords[...], data[...] = 0, 9
    assert_coo(tensor, np.array([[0.0, 1.0], [2.0, 0.0]]))


def test_coo_coordinates_are_read_only(messy):
    for tensor in (messy, messy.T, messy.coalesce(), messy.copy(), COOTensor.from_dense(DENSE)):
        with pytest.raises(ValueError, match="read-only"):
            tensor.coords[0, 0] = 1
    with pytest.raises(AttributeError):
        messy.coords = np.zeros((2, 6))


@pytest.mark.parametrize("shape", EMPTY_SHAPES, ids=str)
def test_coo_without_entries(shape):
    for tensor in (
        COOTensor([[]] * len(shape), [], shape),
        COOTensor(np.empty((len(shape), 0), int), np.empty(0), shape),
        COOTensor.from_dense(np.zeros(shape)),
    ):
        assert_coo(tensor, np.zeros(shape))
        assert tensor.is_canonical
        assert tensor.density == 0.0
        for same in (tensor.coalesce(), tensor.copy(), tensor * 2, tensor / 2, -tensor):
            assert_coo(same, np.zeros(shape))
        tensor.sort_indices()
        tensor.sum_duplicates()
        assert_coo(tensor, np.zeros(shape))
        assert_coo(tensor.T, np.zeros(shape[::-1]))
        assert_coo(tensor.astype(np.int8), np.zeros(shape, np.int8))
        if len(shape) == 2:
            m, k = shape
            np.testing.assert_array_equal(tensor @ np.ones((k, 3)), np.zeros((m, 3)))
            np.testing.assert_array_equal(tensor @ np.ones(k, np.int64), np.zeros(m))
            np.testing.assert_array_equal(np.ones((3, m)) @ tensor, np.zeros((3, k)))
            integers = tensor.astype(np.int64)
            np.testing.assert_array_equal(integers @ np.ones((k, 3), int), np.zeros((m, 3), int))
            np.testing.assert_array_equal(np.ones((3, m), int) @ integers, np.zeros((3, k), int))
            for format in coo.SCIPY_FORMATS:
                if format != "dia" or min(shape):
                    assert tensor.to_scipy(format).shape == shape


# Other constructors


@each_shape
@each_dtype
def test_coo_from_dense_and_back(shape, dtype, rng):
    dense = random_dense(rng, shape, dtype)
    tensor = COOTensor.from_dense(dense)
    assert_coo(tensor, dense)
    assert tensor.is_canonical
    assert_coo(COOTensor.from_dense(dense.T), dense.T)


def test_coo_from_dense_takes_lists_and_keeps_nan():
    assert_coo(COOTensor.from_dense([[0, 1], [2, 0]]), np.array([[0, 1], [2, 0]]))
    tensor = COOTensor.from_dense(np.array([0.0, -0.0, np.nan]))
    assert tensor.nnz == 1
    np.testing.assert_array_equal(tensor.to_dense(), [0.0, 0.0, np.nan])


@pytest.mark.parametrize("format", coo.SCIPY_FORMATS)
@pytest.mark.parametrize("kind", ["array", "matrix"])
def test_coo_from_scipy_and_back(format, kind, rng):
    dense = random_dense(rng, (4, 6), np.dtype(np.float32))
    make = getattr(sparse, f"{format}_{kind}")
    tensor = COOTensor.from_scipy(make(dense))
    assert_coo(tensor, dense, nnz=tensor.nnz)
    back = tensor.to_scipy(format)
    assert back.format == format
    assert isinstance(back, sparse.sparray)
    assert back.dtype == np.float32
    np.testing.assert_array_equal(back.toarray(), dense)


def test_coo_scipy_keeps_stored_entries_as_they_are(messy):
    matrix = messy.to_scipy()
    assert (matrix.row.tolist(), matrix.col.tolist(), matrix.data.tolist()) == (ROW, COL, DATA)
    again = COOTensor.from_scipy(matrix)
    assert_coo(again, DENSE.astype(float), nnz=6)
    matrix.data[...] = 0
    matrix.row[...] = 0
    assert_coo(messy, DENSE.astype(float), nnz=6)
    assert_coo(again, DENSE.astype(float), nnz=6)
    assert messy.to_scipy("csr").nnz == 4


@each_other
def test_coo_scipy_round_trip_of_other_dtypes(dtype, rng):
    dense = random_dense(rng, (4, 6), dtype)
    matrix = shuffled(rng, dense).to_scipy("csr")
    assert matrix.dtype == dtype
    assert_coo(COOTensor.from_scipy(matrix), dense)


def test_coo_from_scipy_takes_vectors():
    vector = sparse.coo_array(np.array([0.0, 2.0, 0.0, 1.0]))
    assert_coo(COOTensor.from_scipy(vector), np.array([0.0, 2.0, 0.0, 1.0]))


@pytest.mark.parametrize("p", PROBLEMS, ids=problem_ids(PROBLEMS))
def test_coo_from_topology(p, rng):
    topology = make_topology(p)
    values = rng.integers(1, 9, p.nnz).astype(np.float32)
    tensor = COOTensor.from_topology(topology, values)
    dense = np.zeros((p.m, p.k), np.float32)
    dense[topology.row, topology.col] = values
    assert_coo(tensor, dense)
    assert tensor.topology is topology
    assert tensor.values is values
    assert tensor.data is values


def test_coo_from_topology_outlives_an_update_of_the_topology():
    topology = Topology.from_mask(DENSE != 0)
    values = np.array([13.0, 4.0, 26.0])
    tensor = COOTensor.from_topology(topology, values)
    scaled = tensor * 2.0
    topology.update(np.array([0, 3, 3, 3]), np.array([0, 1, 2]))
    assert_coo(tensor, DENSE.astype(float))
    np.testing.assert_array_equal(tensor @ np.eye(4), DENSE)
    np.testing.assert_array_equal(scaled @ np.eye(4), 2 * DENSE)
    assert topology.row.tolist() == [0, 0, 0]


# Shape


@each_shape
@pytest.mark.parametrize("sort", [False, True], ids=["unsorted", "sorted"])
def test_coo_transpose_by_every_permutation(shape, sort, rng):
    dense = random_dense(rng, shape, np.dtype(np.int64))
    tensor = COOTensor.from_dense(dense) if sort else shuffled(rng, dense)
    assert_coo(tensor.T, dense.T, nnz=tensor.nnz)
    for axes in itertools.permutations(range(len(shape))):
        assert_coo(tensor.transpose(axes), dense.transpose(axes), nnz=tensor.nnz)
    negative = [axis - len(shape) for axis in range(len(shape))]
    assert_coo(tensor.transpose(negative), dense, nnz=tensor.nnz)


def test_coo_transpose_shares_its_data(messy):
    transposed = messy.T
    messy.data[0] = 100
    assert transposed.to_dense()[1, 2] == 106
    transposed.sort_indices()
    transposed.sum_duplicates()
    assert messy.coords.tolist() == [ROW, COL]


@pytest.mark.parametrize(
    ("axes", "error", "message"),
    [
        ((0,), ValueError, r"axes must be a permutation of the 2 axes, got \(0,\)"),
        ((0, 0), ValueError, r"axes must be a permutation of the 2 axes, got \(0, 0\)"),
        ((0, 2), ValueError, r"axes must be a permutation of the 2 axes, got \(0, 2\)"),
        ((0, -3), ValueError, r"axes must be a permutation of the 2 axes, got \(0, -3\)"),
        ((0, 1.0), TypeError, r"axes must be integers, got \(0, 1.0\)"),
    ],
    ids=["short", "twice", "beyond", "below", "float"],
)
def test_coo_transpose_rejects(messy, axes, error, message):
    with pytest.raises(error, match=f"COOTensor.transpose: {message}"):
        messy.transpose(axes)


# Copies, memory, and what Python asks


@pytest.mark.parametrize(
    "clone",
    [COOTensor.copy, copy.copy, copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))],
    ids=["copy", "copy.copy", "deepcopy", "pickle"],
)
def test_coo_copies(messy, clone):
    _ = messy.topology
    other = clone(messy)
    assert_coo(other, DENSE.astype(float), nnz=6)
    np.testing.assert_array_equal(other @ np.eye(4), DENSE)
    if clone is not copy.copy:
        other.data[...] = 0
        assert_coo(messy, DENSE.astype(float), nnz=6)


def test_coo_nbytes_counts_what_is_kept(messy):
    own = 2 * 6 * 4 + 6 * 8
    assert messy.nbytes == own
    topology = messy.topology
    order_and_starts = 6 * 8 + 4 * 8
    assert messy.nbytes == own + order_and_starts + topology.nbytes
    clean = COOTensor.from_dense(DENSE)
    assert clean.is_canonical
    assert clean.nbytes == 2 * 3 * 4 + 3 * 8


def test_coo_on_the_cpu_is_itself_there(messy):
    assert messy.device == "cpu"
    assert messy.get() is messy
    assert messy.to_device("cpu") is messy
    message = "to_device: device must be 'cpu', 'cuda' or 'cuda:<index>', got 'gpu'"
    with pytest.raises(ValueError, match=message):
        messy.to_device("gpu")


def test_coo_to_device_without_a_gpu(messy, monkeypatch):
    def missing():
        raise CudaUnavailableError("snack_cupy: CuPy is missing")

    monkeypatch.setattr(_jit, "require_cupy", missing)
    with pytest.raises(CudaUnavailableError, match="CuPy is missing"):
        messy.to_device("cuda")


def test_coo_repr():
    tensor = COOTensor(([0, 1, 2, 3, 3], [0, 1, 2, 3, 0]), np.ones(5, np.float32))
    assert repr(tensor) == "<COOTensor: shape=(4, 4), dtype=float32, nnz=5, device='cpu'>"


def test_coo_python_protocols(messy):
    assert len(messy) == 3
    assert (messy != messy.copy()).nnz == 0
    assert len({messy, messy.copy()}) == 2
    with pytest.raises(ValueError, match="COOTensor: the truth of a tensor must not be asked for"):
        bool(messy)
    with pytest.raises(TypeError, match=r"must be asked for with to_dense\(\)"):
        np.asarray(messy)
    assert [part.shape for part in messy] == [(4,)] * 3
