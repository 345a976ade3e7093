"""The checks of `helpers` fail where they must: a check that never fails checks nothing."""

import numpy as np
import pytest
from helpers import (
    DTYPES,
    EMPTY,
    EPS_ACC,
    EPS_OUT,
    LAYOUTS,
    PROBLEMS,
    assert_close,
    assert_coo,
    assert_exact,
    assert_rms,
    exact_pair,
    make_topology,
)

from snack_cupy import COOTensor

each_dtype = pytest.mark.parametrize("dtype", DTYPES)


@each_dtype
def test_assert_exact_notices_the_last_bit(dtype):
    want = np.array([1.0, 2.0])
    assert_exact(want.astype(DTYPES[dtype]), want)
    other = want.astype(DTYPES[dtype])
    other.view(f"u{other.itemsize}")[1] += 1
    with pytest.raises(AssertionError, match="Mismatched elements: 1 / 2"):
        assert_exact(other, want)


@each_dtype
def test_assert_close_draws_the_line_at_its_bound(dtype):
    want = np.array([1.0], np.longdouble)
    magnitude, products = np.array([512.0]), np.array(7)
    bound = 8 * EPS_ACC[dtype] * 512 + EPS_OUT.get(dtype, 0.0)
    near, far = 1 + 0.5 * bound, 1 + 2.5 * bound
    assert_close(np.array([near], DTYPES[dtype]), want, magnitude, products)
    with pytest.raises(AssertionError, match=r"element .* is off by .*, more than"):
        assert_close(np.array([far], DTYPES[dtype]), want, magnitude, products)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_assert_close_rejects_what_is_not_finite(wrong):
    got = np.array([1.0, wrong], np.float32)
    with pytest.raises(AssertionError, match="element"):
        assert_close(got, np.ones(2), np.ones(2), np.array(1))


def test_assert_close_rejects_another_shape():
    with pytest.raises(AssertionError):
        assert_close(np.ones((1, 2), np.float32), np.ones(2), np.ones(2), np.array(1))


def test_assert_rms_allows_twice_the_error():
    want, dense = np.zeros(4), np.full(4, 1e-3, np.float32)
    assert_rms(np.full(4, 1.9e-3, np.float32), want, dense)
    with pytest.raises(AssertionError, match="RMS error"):
        assert_rms(np.full(4, 2.1e-3, np.float32), want, dense)


def test_assert_coo_notices_false_flags_values_and_counts():
    dense = np.array([[0, 1], [2, 0]])

    def tensor(**flags):
        coords = np.array([[1, 0], [0, 1]], np.int32)
        return COOTensor._from_parts(coords, np.array([2, 1]), (2, 2), **flags)

    assert_coo(tensor(), dense)
    for false in ({"is_sorted": True}, {"has_duplicates": True}):
        with pytest.raises(AssertionError):
            assert_coo(tensor(**false), dense)
    with pytest.raises(AssertionError):
        assert_coo(tensor(), dense * 2)
    with pytest.raises(AssertionError):
        assert_coo(tensor(), dense, nnz=3)
    with pytest.raises(AssertionError):
        assert_coo(tensor(), dense.astype(np.float32))


@each_dtype
def test_exact_pairs_have_exact_sums(dtype, rng):
    a, b = exact_pair(rng, 2047, 2047, dtype)
    assert a.dtype == b.dtype == DTYPES[dtype]
    terms = a.astype(np.float64) * b.astype(np.float64)
    assert abs(terms).sum() < 2**24
    if dtype in ("float32", "float64"):
        # Narrower types cannot hold them: TF32 has 10 bits behind the leading one.
        assert (abs(a) % 2 == 1).all()
        assert (abs(a) >= 2**12).all()


@pytest.mark.parametrize("p", PROBLEMS, ids=lambda p: p.name)
def test_problems_are_as_their_table_says(p):
    topology = make_topology(p)
    assert (topology.m, topology.k, topology.nnz) == (p.m, p.k, p.nnz)
    assert make_topology(p).equals(topology)
    assert (p.name in EMPTY) == (p.nnz == 0 or p.n == 0)
    fan_in = topology.fan_in
    if p.pattern == "fan_in":
        assert set(fan_in.tolist()) == {p.nnz // p.m}
    if p.pattern == "holes":
        assert (fan_in[::2] == 0).all()
        assert not np.isin(topology.col, range(0, p.k, 2)).any()
    if p.pattern == "long_row":
        assert fan_in.max() == 2000
    if p.pattern == "ends":
        assert topology.positions[-1] == p.m * p.k - 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_equal_and_lie_another_way(layout):
    array = np.arange(12.0).reshape(3, 4)
    other = LAYOUTS[layout](np, array)
    np.testing.assert_array_equal(other, array)
    assert not np.shares_memory(other, array)
    assert other.strides != array.strides or other.base is not None
