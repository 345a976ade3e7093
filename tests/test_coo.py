"""`COOTensor` on NumPy arrays: dense NumPy is the oracle, and its flags are checked every time."""

import copy
import itertools
import pickle
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from helpers import PROBLEMS, assert_close, assert_coo, expected_spmm, make_topology, problem_ids
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import sparse

from snack_cupy import COOTensor, CudaUnavailableError, Topology, _check, _coords, _jit, coo

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = [np.dtype(name) for name in ("float32", "float64", "float16")] + [BFLOAT16]
OTHERS = [np.dtype(name) for name in ("bool", "int8", "uint16", "int64", "complex64")]
each_dtype = pytest.mark.parametrize("dtype", FLOATS + OTHERS, ids=lambda d: d.name)
each_other = pytest.mark.parametrize("dtype", OTHERS, ids=lambda d: d.name)
SHAPES = [(7,), (4, 6), (3, 4, 5), (2, 3, 2, 3)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
EMPTY_SHAPES = [(0,), (5,), (0, 4), (4, 0), (0, 0), (3, 4), (2, 0, 3), (2, 3, 4)]

# Unsorted, with the positions (0, 2) and (2, 1) stored twice and a zero stored at (1, 0):
#   [[0  0 13  0]
#    [0  0  0  4]
#    [0 26  0  0]]
ROW, COL = [2, 0, 1, 2, 0, 1], [1, 2, 0, 1, 2, 3]
DATA = [20, 10, 0, 6, 3, 4]
DENSE = np.array([[0, 0, 13, 0], [0, 0, 0, 4], [0, 26, 0, 0]])


@pytest.fixture
def messy():
    """Float64 tensor of `DENSE` as drawn above."""
    return COOTensor((ROW, COL), np.array(DATA, float), (3, 4))


def random_dense(rng, shape, dtype, density=0.4):
    """Small integers (exact in every dtype) with about that share of elements not zero."""
    dense = rng.integers(-4, 5, shape) * (rng.random(shape) < density)
    return abs(dense).astype(dtype) if dtype.kind in "bu" else dense.astype(dtype)


def shuffled(rng, dense, duplicates=True):
    """An unsorted tensor of ``dense``, most elements split into two entries."""
    tensor = COOTensor.from_dense(dense)
    coords, data = tensor.coords, tensor.data
    if duplicates:
        if data.dtype.kind == "b":
            coords, data = np.tile(coords, 2), np.tile(data, 2)
        else:
            one = np.ones_like(data)
            coords, data = np.tile(coords, 2), np.concatenate([data - one, one])
    order = rng.permutation(data.size)
    return COOTensor(coords[:, order], data[order], dense.shape)


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


# Order and duplicates


def test_coo_coalesce_sorts_and_sums(messy):
    kept = messy.copy()
    tensor = messy.coalesce()
    assert_coo(tensor, DENSE.astype(float), nnz=4)
    assert tensor.is_canonical
    assert tensor.coords.tolist() == [[0, 1, 1, 2], [2, 0, 3, 1]]
    assert tensor.data.tolist() == [13, 0, 4, 26]
    assert tensor.coalesce() is tensor
    assert messy.coords.tolist() == kept.coords.tolist()
    assert messy.data.tolist() == kept.data.tolist()


def test_coo_sort_indices_keeps_duplicates_in_their_order(messy):
    assert messy.sort_indices() is None
    assert messy.coords.tolist() == [[0, 0, 1, 1, 2, 2], [2, 2, 0, 3, 1, 1]]
    assert messy.data.tolist() == [10, 3, 0, 4, 20, 6]
    assert_coo(messy, DENSE.astype(float), nnz=6)
    assert messy.is_sorted
    assert messy.has_duplicates


def test_coo_sum_duplicates_keeps_the_order_of_first_entries(messy):
    assert messy.sum_duplicates() is None
    assert messy.coords.tolist() == [[2, 0, 1, 1], [1, 2, 0, 3]]
    assert messy.data.tolist() == [26, 13, 0, 4]
    assert_coo(messy, DENSE.astype(float), nnz=4)
    assert not messy.is_sorted
    assert not messy.has_duplicates


def test_coo_sum_duplicates_may_leave_a_sorted_tensor():
    tensor = COOTensor([[0, 1, 0]], [1, 2, 3])
    assert not tensor.is_sorted
    tensor.sum_duplicates()
    assert tensor.is_sorted
    assert_coo(tensor, np.array([4, 2]))


@pytest.mark.parametrize(
    "steps",
    [("sort_indices", "sum_duplicates"), ("sum_duplicates", "sort_indices")],
    ids=["sort_first", "sum_first"],
)
@pytest.mark.parametrize("ask_first", [False, True], ids=["unknown", "known"])
def test_coo_sorting_and_summing_in_either_order_is_canonical(messy, steps, ask_first):
    if ask_first:
        _ = messy.is_canonical, messy.topology
    for step in steps:
        getattr(messy, step)()
        getattr(messy, step)()
    assert messy.is_canonical
    assert_coo(messy, DENSE.astype(float), nnz=4)
    np.testing.assert_array_equal(messy @ np.eye(4), DENSE)


def test_coo_keeps_entries_that_cancel():
    tensor = COOTensor([[1, 1]], [5, -5], (3,)).coalesce()
    assert_coo(tensor, np.zeros(3, int), nnz=1)


coordinate_lists = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 1)))


@given(entries=coordinate_lists, data=st.data())
def test_coo_any_entries_coalesce_to_their_sums(entries, data):
    values = data.draw(hnp.arrays(np.int64, len(entries), elements=st.integers(-9, 9)))
    coords = np.array(entries, dtype=np.int64).reshape(-1, 3).T
    dense = np.zeros((3, 4, 2), np.int64)
    np.add.at(dense, tuple(coords), values)
    tensor = COOTensor(coords, values, (3, 4, 2))
    distinct = len(set(entries))
    assert_coo(tensor, dense, nnz=len(entries))
    assert_coo(tensor.coalesce(), dense, nnz=distinct)
    assert tensor.coalesce().is_canonical
    in_place = tensor.copy()
    in_place.sum_duplicates()
    assert_coo(in_place, dense, nnz=distinct)
    in_place.sort_indices()
    assert_coo(in_place, dense, nnz=distinct)
    assert in_place.is_canonical
    in_place = tensor.copy()
    in_place.sort_indices()
    assert_coo(in_place, dense, nnz=len(entries))
    assert in_place.is_sorted


@each_dtype
@each_shape
def test_coo_duplicates_act_as_their_sum(dtype, shape, rng):
    dense = random_dense(rng, shape, dtype)
    tensor = shuffled(rng, dense)
    assert_coo(tensor, dense, nnz=2 * np.count_nonzero(dense))
    assert_coo(tensor.coalesce(), dense, nnz=np.count_nonzero(dense))
    assert_coo(tensor.T, dense.T, nnz=tensor.nnz)
    wide = np.dtype(np.complex128 if dtype.kind == "c" else np.longdouble)
    assert_coo(tensor.astype(wide), dense.astype(wide), nnz=np.count_nonzero(dense))
    assert_coo(tensor.copy(), dense, nnz=tensor.nnz)


def test_coo_duplicates_wrap_before_a_wider_dtype_sees_them():
    tensor = COOTensor([[0, 0]], np.array([100, 100], np.int8))
    wrapped = np.array([-56], np.int8)
    assert_coo(tensor, wrapped, nnz=2)
    assert_coo(tensor.astype(np.int64), wrapped.astype(np.int64))
    assert_coo(tensor * np.int64(2), wrapped * np.int64(2))
    assert_coo(tensor / 2, wrapped / 2)
    np.testing.assert_array_equal(COOTensor(([0, 0], [0, 0]), tensor.data) @ np.ones(1), [-56.0])


def test_coo_boolean_duplicates_are_one_true():
    tensor = COOTensor([[1, 1]], [True, True], (3,))
    assert_coo(tensor, np.array([False, True, False]), nnz=2)
    assert_coo(tensor * 3, np.array([0, 3, 0]))
    assert_coo(tensor.astype(np.int64), np.array([0, 1, 0]))


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16], ids=lambda d: d.name)
def test_coo_sums_half_types_in_float32(dtype):
    # One by one in the half type, each addition of 1 would be lost.
    big = float(2 / np.finfo(dtype).eps) if dtype != BFLOAT16 else 256.0
    data = np.array([big] + [1.0] * 64).astype(dtype)
    total = COOTensor(np.zeros((1, 65), int), data).coalesce().data
    assert total.dtype == dtype
    assert float(total[0]) == big + 64


def test_coo_sums_are_the_same_however_often_they_are_taken(rng):
    coords, data = rng.integers(0, 5, (2, 4000)), rng.standard_normal(4000).astype(np.float32)
    first, again = (COOTensor(coords, data, (5, 5)).coalesce() for _ in range(2))
    assert first.data.tobytes() == again.data.tobytes()
    exact = np.zeros((5, 5))
    np.add.at(exact, tuple(coords), data.astype(np.float64))
    size = np.zeros((5, 5))
    np.add.at(size, tuple(coords), abs(data))
    # A tree of 9 levels or fewer adds each number at most 9 times.
    assert (abs(first.to_dense() - exact) <= 9 * 2.0**-24 * size).all()


@pytest.mark.parametrize("lengths", [[1], [2], [1, 1], [3, 1, 2], [1000, 1, 7, 64, 65], [1] * 50])
def test_sum_runs_adds_up_each_run(lengths, rng):
    data = rng.integers(-99, 100, sum(lengths))
    starts = np.cumsum([0, *lengths[:-1]])
    want = np.add.reduceat(data, starts)
    np.testing.assert_array_equal(_coords.sum_runs(data, starts), want)


# Large shapes


@pytest.mark.parametrize(
    "shape",
    [
        (2**31, 3),
        (2**31 + 1, 3),
        (2**32, 2**31 - 1),
        (2**40, 2**40),
        (2**63 - 1, 2**63 - 1, 2**63 - 1),
        (3, 2**62, 3, 2**62, 5),
    ],
    ids=lambda shape: "x".join(map(str, shape)),
)
def test_coo_orders_lexicographically_beyond_64_bits(shape, rng):
    choices = [np.array([0, 1, size // 2, size - 2, size - 1]) for size in shape]
    coords = np.stack([rng.choice(choice, 300) for choice in choices])
    data = rng.integers(1, 9, 300)
    tracemalloc.start()
    try:
        tensor = COOTensor(coords, data, shape)
        merged = tensor.coalesce()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
    wide = max(shape) > 2**31
    assert tensor.coords.dtype == (np.int64 if wide else np.int32)
    want = {}
    for position, value in zip(zip(*coords.tolist(), strict=True), data.tolist(), strict=True):
        want[position] = want.get(position, 0) + value
    assert tensor.has_duplicates == (len(want) < 300)
    assert not tensor.is_sorted
    assert list(zip(*merged.coords.tolist(), strict=True)) == sorted(want)
    assert merged.data.tolist() == [want[position] for position in sorted(want)]
    assert merged.is_canonical
    tensor.sort_indices()
    assert tensor.is_sorted
    assert 0 < merged.density < 1e-6


def test_coo_keys_of_neighbouring_axes_are_joined():
    coords = np.array([[1, 0], [2, 3], [0, 4]], np.int32)
    keys = _coords.sort_keys(coords, (2, 5, 6))
    assert [key.tolist() for key in keys] == [[42, 22]]
    assert len(_coords.sort_keys(coords, (2**31, 2**31, 6))) == 2
    assert len(_coords.sort_keys(coords, (2**62, 2**62, 6))) == 3


@pytest.mark.parametrize("shape", [(2**31, 3), (3, 2**31)], ids=str)
def test_coo_linear_algebra_is_refused_beyond_32_bits(shape):
    tensor = COOTensor(([0], [0]), [1.0], shape)
    rule = r"have no entry above 2147483647 \(indices are 32-bit\)"
    with pytest.raises(ValueError, match=f"COOTensor.topology: shape must {rule}"):
        _ = tensor.topology


# Linear algebra


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.name)
@pytest.mark.parametrize("duplicates", [False, True], ids=["unsorted", "duplicates"])
def test_coo_matmul_float(dtype, duplicates, rng):
    dense = random_dense(rng, (13, 17), dtype)
    tensor = shuffled(rng, dense, duplicates)
    clean = COOTensor.from_dense(dense)
    for shape in ((17,), (17, 1), (17, 5), (17, 0)):
        other = rng.standard_normal(shape).astype(dtype)
        got = tensor @ other
        assert got.dtype == dtype
        assert_close(got, *expected_spmm(clean.topology, clean.values, other))
    for shape in ((13,), (1, 13), (5, 13), (2, 3, 13), (0, 13)):
        other = rng.standard_normal(shape).astype(dtype)
        got = other @ tensor
        assert got.dtype == dtype
        transposed = {"batch_major": True, "transposed": True}
        assert_close(got, *expected_spmm(clean.topology, clean.values, other, **transposed))


@each_other
def test_coo_matmul_other_dtypes(dtype, rng):
    dense = random_dense(rng, (13, 17), dtype)
    tensor = shuffled(rng, dense)
    for shape in ((17,), (17, 5), (17, 0)):
        other = random_dense(rng, shape, dtype)
        got = tensor @ other
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, dense @ other)
    for shape in ((13,), (5, 13), (2, 3, 13), (0, 13)):
        other = random_dense(rng, shape, dtype)
        got = other @ tensor
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, other @ dense)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("float32", "float64"),
        ("float64", "float32"),
        ("float16", "float32"),
        ("int32", "float32"),
        ("float32", "int64"),
        ("bool", "float32"),
        ("int8", "int64"),
        ("float32", "complex64"),
    ],
)
def test_coo_matmul_promotes_dtypes_as_numpy_does(left, right, rng):
    dense = random_dense(rng, (4, 6), np.dtype(left))
    other = random_dense(rng, (6, 3), np.dtype(right))
    got = shuffled(rng, dense) @ other
    want = dense @ other
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)
    got = other.T @ COOTensor.from_dense(dense.T)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want.T)


def test_coo_matmul_of_bfloat16_promotes_to_float32(rng):
    dense, other = random_dense(rng, (4, 6), BFLOAT16), np.eye(6, dtype=np.float32)
    got = COOTensor.from_dense(dense) @ other
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, dense.astype(np.float32))
    for unfit in (np.float16, np.int64):
        message = "COOTensor.matmul: dense must have a dtype that promotes with bfloat16, got"
        with pytest.raises(TypeError, match=message):
            COOTensor.from_dense(dense) @ other.astype(unfit)


def test_coo_matmul_with_the_transpose(messy):
    np.testing.assert_array_equal(messy.T @ np.eye(3), DENSE.T)
    np.testing.assert_array_equal(np.eye(4) @ messy.T, DENSE.T)


def test_coo_keeps_its_topology_and_shares_it_with_scaled_tensors(messy):
    topology = messy.topology
    assert messy.topology is topology
    assert topology.positions.tolist() == [2, 4, 7, 9]
    assert (messy * 2.0).topology.positions.tolist() == [2, 4, 7, 9]
    assert messy.coalesce().topology is topology
    clean = messy.coalesce()
    assert (clean * 2.0).topology is topology
    assert clean.astype(np.float32).topology is topology
    messy.sort_indices()
    messy.sum_duplicates()
    assert messy.topology is topology
    assert messy.T.topology is not topology


def test_coo_data_may_be_written_between_products(messy):
    np.testing.assert_array_equal(messy @ np.eye(4), DENSE)
    messy.data[...] *= 2
    np.testing.assert_array_equal(messy @ np.eye(4), 2 * DENSE)
    np.testing.assert_array_equal(messy.to_dense(), 2 * DENSE)
    assert messy.values.tolist() == [26, 0, 8, 52]


def test_coo_numpy_defers_to_it(messy):
    np.testing.assert_array_equal(np.eye(3) @ messy, DENSE)
    for scale in (np.float64(2), np.array(2.0), 2, 2.0):
        assert_coo(scale * messy, 2.0 * DENSE, nnz=4)
    with pytest.raises(TypeError, match="unsupported operand"):
        np.ones((3, 4)) * messy
    with pytest.raises(TypeError, match="operand 'COOTensor' does not support ufuncs"):
        messy * np.ones((3, 4))
    with pytest.raises(TypeError):
        np.add(messy, 1.0)


@pytest.mark.parametrize("other", [[1, 2, 3, 4], "x", None, 3.0], ids=str)
def test_coo_matmul_takes_arrays_only(messy, other):
    with pytest.raises(TypeError, match="unsupported operand"):
        messy @ other
    with pytest.raises(TypeError, match="unsupported operand"):
        other @ messy


@pytest.mark.parametrize(
    ("product", "message"),
    [
        (lambda a: a @ np.ones(3), r"dense must have shape \(4,\) or \(4, n\), got \(3,\)"),
        (lambda a: a @ np.ones((3, 4)), r"dense must have shape \(4,\) or \(4, n\), got \(3, 4\)"),
        (lambda a: a @ np.ones((1, 4, 2)), "dense must have 1 or 2 dimensions, got 3"),
        (lambda a: a @ np.array(1.0), "dense must have 1 or 2 dimensions, got 0"),
        (lambda a: np.ones(4) @ a, r"dense must have shape \(..., 3\), got \(4,\)"),
        (lambda a: np.ones((3, 4)) @ a, r"dense must have shape \(..., 3\), got \(3, 4\)"),
        (lambda a: np.array(1.0) @ a, "dense must have at least 1 dimension, got 0"),
    ],
    ids=["vector", "matrix", "3d", "0d", "rvector", "rmatrix", "r0d"],
)
def test_coo_matmul_rejects_shapes(messy, product, message):
    for tensor in (messy, messy.astype(np.int64)):
        with pytest.raises(ValueError, match=f"COOTensor.matmul: {message}"):
            product(tensor)


@pytest.mark.parametrize(
    "use", ["topology", "matmul", "to_scipy", "row", "col"], ids=lambda name: name
)
def test_coo_of_3_dimensions_has_no_linear_algebra(use):
    tensor = COOTensor.from_dense(np.ones((2, 2, 2)))
    uses = {"matmul": lambda t: t @ np.ones(2), "to_scipy": lambda t: t.to_scipy()}
    error = AttributeError if use in ("row", "col") else ValueError
    message = f"COOTensor.{use}: the tensor must have 2 dimensions, got 3"
    with pytest.raises(error, match=message):
        uses.get(use, lambda t: getattr(t, use))(tensor)


# Elementwise


@each_dtype
def test_coo_scalar_arithmetic_has_numpys_dtypes(dtype, rng):
    dense = random_dense(rng, (4, 6), dtype)
    scalars = [2, 2.0, np.float32(2), True]
    if dtype != BFLOAT16:
        scalars += [2j, np.int16(2), np.bool_(True), np.array(2.0)]
    for tensor in (COOTensor.from_dense(dense), shuffled(rng, dense)):
        for scalar in scalars:
            assert_scaled(tensor * scalar, dense, dense * scalar, scalar)
            assert_scaled(scalar * tensor, dense, scalar * dense, scalar)
            assert_scaled(tensor / scalar, dense, dense / scalar, scalar)


def assert_scaled(got, dense, want, scalar):
    if dense.dtype == BFLOAT16 and isinstance(scalar, int | float):
        want = want.astype(BFLOAT16)  # a Python number does not decide the dtype
    assert_coo(got, want, nnz=np.count_nonzero(dense))


@each_dtype
def test_coo_negation(dtype, rng):
    dense = random_dense(rng, (4, 6), dtype)
    tensor = shuffled(rng, dense)
    if dtype.kind == "b":
        with pytest.raises(TypeError):
            _ = -tensor
    else:
        assert_coo(-tensor, -dense, nnz=tensor.nnz)
        assert_coo(tensor, dense, nnz=tensor.nnz)


def test_coo_scalars_act_on_stored_entries_only(messy):
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient = messy / 0.0
        assert (messy * np.inf).to_dense()[0, 0] == 0
    assert np.isnan(quotient.data).sum() == 1
    assert np.count_nonzero(quotient.to_dense()) == 4


@pytest.mark.parametrize(
    "scalar", ["2", None, [2], object()], ids=["str", "None", "list", "object"]
)
def test_coo_arithmetic_takes_numbers_only(messy, scalar):
    for product in (lambda: messy * scalar, lambda: scalar * messy, lambda: messy / scalar):
        with pytest.raises(TypeError):
            product()
    with pytest.raises(TypeError, match="unsupported operand"):
        _ = 2 / messy


def test_coo_astype(messy):
    assert_coo(messy.astype(np.int16), DENSE.astype(np.int16), nnz=4)
    assert_coo(messy.astype("complex128"), DENSE.astype(complex), nnz=4)
    assert messy.astype(np.float64, copy=False) is messy
    same = messy.astype(float)
    assert not np.shares_memory(same.data, messy.data)
    assert_coo(same, DENSE.astype(float), nnz=6)
    message = "COOTensor.astype: dtype must have a boolean or numeric dtype, got object"
    with pytest.raises(TypeError, match=message):
        messy.astype(object)


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
    assert messy != messy.copy()
    assert len({messy, messy.copy()}) == 2
    with pytest.raises(ValueError, match="COOTensor: the truth of a tensor must not be asked for"):
        bool(messy)
    with pytest.raises(TypeError, match=r"must be asked for with to_dense\(\)"):
        np.asarray(messy)
    with pytest.raises(TypeError):
        iter(messy)


# Errors


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
