"""`COOTensor` on CuPy arrays: its NumPy twin is the oracle, and its flags are always checked."""

import numpy as np
import pytest
from gpu_arrays import put
from helpers import (
    DTYPES,
    PROBLEMS,
    assert_close,
    assert_coo,
    assert_exact,
    exact_pair,
    expected_spmm,
    make_topology,
    normal,
    problem,
    problem_ids,
    to_numpy,
)
from scipy import sparse

from snack_cupy import COOTensor

OTHERS = {name: np.dtype(name) for name in ("bool", "int8", "uint16", "int64", "complex64")}
ALL = {**DTYPES, **OTHERS}
SHAPES = ((7,), (4, 6), (3, 4, 5), (2, 3, 2, 3))
EMPTY_SHAPES = ((0,), (5,), (0, 4), (4, 0), (3, 4), (2, 0, 3))
every_dtype = pytest.mark.parametrize("dtype", ALL)
every_float = pytest.mark.parametrize("dtype", DTYPES)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def random_dense(rng, shape, dtype):
    """Small integers (exact in every dtype), more than half of them zero."""
    dense = rng.integers(-4, 5, shape) * (rng.random(shape) < 0.4)
    return (abs(dense) if ALL[dtype].kind in "bu" else dense).astype(ALL[dtype])


def messy(rng, dense):
    """An unsorted tensor of ``dense`` in NumPy arrays, every element split into two entries."""
    coords = np.stack(np.nonzero(dense))
    data = dense[tuple(coords)]
    parts = (data, data) if data.dtype.kind == "b" else (data - np.ones_like(data), data * 0 + 1)
    coords, data = np.tile(coords, 2), np.concatenate(parts).astype(dense.dtype)
    order = rng.permutation(data.size)
    return COOTensor(coords[:, order], data[order], dense.shape)


def on_gpu(tensor):
    """The same tensor of CuPy arrays, through the public constructor."""
    return COOTensor(put(tensor.coords), put(tensor.data), tensor.shape)


def assert_same(tensor, host):
    """Equal entries in equal order, bit for bit, and equal flags."""
    assert tensor.device == "cuda:0"
    assert (tensor.shape, tensor.nnz) == (host.shape, host.nnz)
    for name in ("coords", "data"):
        got, want = getattr(tensor, name), getattr(host, name)
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(to_numpy(got), want)
    for name in ("is_sorted", "has_duplicates", "is_canonical"):
        assert getattr(tensor, name) == getattr(host, name)


# Construction


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8, np.uint64])
def test_coo_takes_coordinates_in_many_forms(cp, dtype):
    row, col = cp.array([0, 2, 1], dtype), cp.array([3, 0, 1], dtype)
    dense = np.zeros((3, 4))
    dense[[0, 2, 1], [3, 0, 1]] = [1, 2, 3]
    data = cp.array([1.0, 2.0, 3.0])
    for coords in ((row, col), cp.stack([row, col]), (row, [3, 0, 1]), ([0, 2, 1], [3, 0, 1])):
        tensor = COOTensor(coords, data, (3, 4))
        assert tensor.device == "cuda:0"
        assert_coo(tensor, dense)
    assert COOTensor((row, col), [1.0, 2.0, 3.0]).device == "cuda:0"
    assert_coo(COOTensor((row, col), data), dense)  # the shape told from the coordinates


def test_coo_owns_its_arrays(cp):
    coords, data = cp.array([[0, 1], [1, 0]], np.int32), cp.array([1.0, 2.0])
    tensor = COOTensor(coords, data, (2, 2))
    coords[...], data[...] = 0, 9
    assert_coo(tensor, np.array([[0.0, 1.0], [2.0, 0.0]]))


@every_shape
@every_dtype
def test_coo_is_its_numpy_twin(cp, rng, shape, dtype):
    dense = random_dense(rng, shape, dtype)
    host = messy(rng, dense)
    tensor = on_gpu(host)
    assert_coo(tensor, dense, nnz=host.nnz)
    assert_same(tensor, host)
    assert_same(tensor.coalesce(), host.coalesce())
    assert_same(tensor.transpose(), host.transpose())
    assert_same(tensor.T.coalesce(), host.T.coalesce())
    assert_same(tensor.copy(), host)
    assert_same(host.to_device("cuda"), host)
    back = tensor.get()
    assert back.device == "cpu"
    assert_coo(back, dense, nnz=host.nnz)
    for change in ("sort_indices", "sum_duplicates"):
        one, other = tensor.copy(), host.copy()
        getattr(one, change)()
        getattr(other, change)()
        assert_same(one, other)


@every_shape
@every_dtype
def test_coo_from_dense(cp, rng, shape, dtype):
    dense = random_dense(rng, shape, dtype)
    tensor = COOTensor.from_dense(put(dense))
    assert tensor.device == "cuda:0"
    assert tensor.is_canonical
    assert_coo(tensor, dense)


@pytest.mark.parametrize("shape", EMPTY_SHAPES, ids=str)
def test_coo_without_entries(cp, shape):
    for tensor in (
        COOTensor(cp.empty((len(shape), 0), int), cp.empty(0), shape),
        COOTensor.from_dense(cp.zeros(shape)),
        COOTensor([[]] * len(shape), [], shape).to_device("cuda"),
    ):
        assert_coo(tensor, np.zeros(shape))
        assert tensor.is_canonical
        assert_coo(tensor.coalesce(), np.zeros(shape))
        assert_coo(tensor.T, np.zeros(shape[::-1]))


def test_coo_of_a_shape_with_more_than_2_to_the_63_elements(cp, rng):
    shape = (2**40, 3, 2**40)
    coords = np.stack([rng.integers(0, size, 500) for size in shape])
    coords[:, 250:] = coords[:, :250]
    host = COOTensor(coords, np.arange(500.0), shape)
    tensor = on_gpu(host)
    assert tensor.coords.dtype == np.int64
    assert_same(tensor, host)
    assert_same(tensor.coalesce(), host.coalesce())


def test_coo_sums_many_duplicates_in_a_fixed_order(cp, rng):
    coords = rng.integers(0, 5, (2, 3000))
    for dtype in DTYPES:
        host = COOTensor(coords, normal(rng, 3000, dtype), (5, 5))
        tensor = on_gpu(host)
        assert tensor.nnz == 3000
        assert_same(tensor.coalesce(), host.coalesce())


# Linear algebra


@pytest.mark.parametrize("problem", PROBLEMS, ids=problem_ids(PROBLEMS))
@every_float
def test_coo_matmul(cp, rng, problem, dtype):
    host = make_topology(problem)
    values, dense = exact_pair(rng, host.nnz, (host.k, problem.n), dtype)
    order = rng.permutation(host.nnz)
    coords = np.stack([host.row, host.col])[:, order]
    tensor = COOTensor(put(coords), put(values[order]), host.shape)
    assert_exact(tensor @ put(dense), expected_spmm(host, values, dense).want)
    rows = exact_pair(rng, host.nnz, (problem.n, host.m), dtype)[1]
    want = expected_spmm(host, values, rows, batch_major=True, transposed=True).want
    assert_exact(put(rows) @ tensor, want)
    canonical = COOTensor.from_topology(host.to_device("cuda"), put(values))
    assert_exact(canonical @ put(dense), expected_spmm(host, values, dense).want)


@every_float
def test_coo_matmul_of_vectors_and_duplicates(cp, rng, dtype):
    host = make_topology(problem("odd_sizes"))
    values, x = normal(rng, host.nnz, dtype), normal(rng, host.k, dtype)
    expected = expected_spmm(host, values, x)
    topology = host.to_device("cuda")
    tensor = COOTensor.from_topology(topology, put(values))
    assert_close(tensor @ put(x), *expected)
    left = normal(rng, (2, 3, host.m), dtype)
    expected = expected_spmm(host, values, left, batch_major=True, transposed=True)
    assert_close(put(left) @ tensor, *expected)
    dense = random_dense(rng, (30, 40), dtype)
    operand = random_dense(rng, (40, 5), dtype)
    want = dense.astype(np.float64) @ operand.astype(np.float64)
    assert_exact(on_gpu(messy(rng, dense)) @ put(operand), want)


def test_coo_matmul_promotes(cp):
    tensor = COOTensor(cp.array([[0, 1], [1, 0]]), cp.array([2, 3], np.float32), (2, 2))
    for dense, dtype in (
        (cp.ones((2, 2), np.float64), np.float64),
        (cp.ones((2, 2), np.float16), np.float32),
        (cp.ones((2, 2), np.int8), np.float32),
        (cp.ones(2, np.float32), np.float32),
    ):
        got = tensor @ dense
        assert got.dtype == dtype
        np.testing.assert_array_equal(to_numpy(got).T, np.broadcast_to([2, 3], got.shape[::-1]))


def test_coo_matmul_sees_data_written_in_place(cp):
    tensor = COOTensor(cp.array([[1, 0], [0, 1]]), cp.array([2.0, 3.0]), (2, 2))
    assert to_numpy(tensor @ cp.ones(2)).tolist() == [3, 2]
    tensor.data[...] = cp.array([5.0, 7.0])
    assert to_numpy(tensor @ cp.ones(2)).tolist() == [7, 5]


# Elementwise, conversions


@every_float
def test_coo_times_a_scalar(cp, rng, dtype):
    dense = random_dense(rng, (4, 6), dtype)
    for tensor in (on_gpu(messy(rng, dense)), COOTensor.from_dense(put(dense))):
        nnz = np.count_nonzero(dense)
        for product in (
            tensor * 2,
            2 * tensor,
            tensor / 0.5,
            tensor * np.float32(2).astype(dense.dtype),
        ):
            canonical = product.coalesce()
            assert canonical.dtype == dense.dtype
            assert_coo(canonical, dense * dense.dtype.type(2), nnz=nnz)
        assert_coo((-tensor).coalesce(), -dense, nnz=nnz)
        for other in DTYPES:
            converted = tensor.astype(DTYPES[other]).coalesce()
            assert_coo(converted, dense.astype(DTYPES[other]), nnz=nnz)
    scalar = cp.array(3, DTYPES[dtype]) if dtype != "bfloat16" else put(np.array(3, dense.dtype))
    assert_coo(tensor * scalar, dense * dense.dtype.type(3))


@pytest.mark.parametrize("format", ["coo", "csr", "csc", "bsr", "dia", "dok", "lil"])
def test_coo_to_scipy_and_back(cp, rng, format):
    dense = random_dense(rng, (4, 6), "float32")
    matrix = on_gpu(messy(rng, dense)).to_scipy(format)
    assert sparse.issparse(matrix)
    assert matrix.format == format
    np.testing.assert_array_equal(matrix.toarray(), dense)
    tensor = COOTensor.from_scipy(matrix).to_device("cuda")
    np.testing.assert_array_equal(to_numpy(tensor.to_dense()), dense)


def test_coo_from_topology_shares_what_it_is_given(cp):
    topology = make_topology(problem("odd_sizes")).to_device("cuda")
    values = cp.arange(topology.nnz, dtype=np.float32)
    tensor = COOTensor.from_topology(topology, values)
    assert tensor.data is values
    assert tensor.topology is topology
    assert tensor.is_canonical
    assert repr(tensor) == "<COOTensor: shape=(67, 129), dtype=float32, nnz=1000, device='cuda:0'>"


# Bad input


def test_coo_refuses(cp):
    row, col, data = cp.array([0, 1]), cp.array([1, 0]), cp.array([1.0, 2.0])
    for arguments, error, message in (
        (((row, col), data, (2, 1)), IndexError, r"coords\[1\] must hold indices in \[0, 1\)"),
        (((row - 1, col), data, (2, 2)), IndexError, r"coords\[0\] must .*, got -1"),
        (((row, col[1:]), data, (2, 2)), ValueError, "coords must hold"),
        (((row, col), data[1:], (2, 2)), ValueError, "data must have one entry"),
        (((row * 1.0, col), data, (2, 2)), TypeError, r"coords\[0\] must have an integer"),
        (((row, col), data, (2, 2, 2)), ValueError, "shape must have 2 entries"),
        (((row, to_numpy(col)), data, (2, 2)), ValueError, r"coords\[1\] must be on cuda:0"),
        (((to_numpy(row), to_numpy(col)), data, (2, 2)), ValueError, "must be on cuda:0"),
        ((cp.stack([row, col]), to_numpy(data), (2, 2)), ValueError, "must be on"),
    ):
        with pytest.raises(error, match=f"^COOTensor: .*{message}|^COOTensor: {message}"):
            COOTensor(*arguments)


def test_coo_matmul_refuses(cp):
    tensor = COOTensor(cp.array([[0, 1], [1, 0]]), cp.array([1.0, 2.0]), (2, 2))
    whole = tensor.astype(np.int64)
    for matrix, dense, error, message in (
        (tensor, cp.ones(3), ValueError, "dense must have shape"),
        (tensor, np.ones(2), ValueError, "dense must be on cuda:0, got cpu"),
        (whole, cp.ones(2, np.int64), TypeError, "dtype must be one of .* on a GPU, got int64"),
        (tensor, cp.ones(2, np.complex64), TypeError, "dtype must be one of .* on a GPU"),
    ):
        with pytest.raises(error, match=f"^COOTensor.matmul: {message}"):
            matrix @ dense
    with pytest.raises(TypeError, match="to_dense"):
        np.asarray(tensor)
