"""Order and duplicates of `COOTensor`: sorting, summing, truthful flags, shapes beyond 64 bits."""

import tracemalloc

import numpy as np
import pytest
from coo_helpers import BFLOAT16, DENSE, each_dtype, each_shape, random_dense, shuffled
from helpers import assert_coo
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from snack_cupy import COOTensor, _coords

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
    # The spacing of half-type numbers at `big` is 2: in that type, adding 1 would change nothing.
    big = 2048.0 if dtype == np.float16 else 256.0
    total = COOTensor(np.zeros((1, 4), int), np.array([big, 1, 0, 1], dtype)).coalesce().data
    assert total.dtype == dtype
    assert float(total[0]) == big + 2


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
