"""`Remap` against one row moved at a time."""

import math

import numpy as np
import pytest
from dst_helpers import remap_of
from helpers import to_numpy
from hypothesis import given
from hypothesis import strategies as st

from snack_cupy.dst import Remap


@pytest.fixture(scope="module")
def xp():
    """The array module under test; the GPU tests run this file with CuPy."""
    return np


@given(data=st.data())
def test_remap_apply_moves_rows(xp, data):
    nnz_old, nnz_new = data.draw(st.integers(0, 8)), data.draw(st.integers(0, 8))
    olds = data.draw(st.permutations(range(nnz_old)))
    new_to_old = [olds.pop() if olds and data.draw(st.booleans()) else -1 for _ in range(nnz_new)]
    remap = remap_of(xp, new_to_old, nnz_old)
    kept = sum(old >= 0 for old in new_to_old)
    assert (remap.kept, remap.grown, remap.dropped) == (kept, nnz_new - kept, nnz_old - kept)
    assert remap.is_identity == (new_to_old == list(range(nnz_old)))
    dtype = data.draw(st.sampled_from(["f2", "f4", "f8", "i1", "i4", "i8", "u2", "?"]))
    tail = data.draw(st.sampled_from([(), (3,), (2, 0), (1, 2)]))
    array = xp.asarray(np.arange(nnz_old * math.prod(tail)).reshape(nnz_old, *tail), dtype)
    before = array.copy()
    fill = np.array(1, dtype)
    want = np.full((nnz_new, *tail), fill)
    for new, old in enumerate(new_to_old):
        if old >= 0:
            want[new] = to_numpy(array)[old]
    got = remap.apply(array, fill=1)
    assert got.dtype == array.dtype
    assert got.shape == want.shape
    assert np.array_equal(to_numpy(got), want)
    out = xp.zeros((nnz_new, *tail), dtype)
    assert remap.apply(array, fill=1, out=out) is out
    assert np.array_equal(to_numpy(out), want)
    assert (array == before).all()
    if nnz_new == nnz_old:
        remap.apply(array, fill=1, out=array)
        assert np.array_equal(to_numpy(array), want)


def test_remap_apply_copies_bits(xp):
    bits = np.array([0x7FC12345, 0xFF800000, 0x80000000, 1], np.uint32)
    values = xp.asarray(bits.view(np.float32))
    moved = remap_of(xp, [3, 0, -1, 2, 1], 4).apply(values)
    assert to_numpy(moved).view(np.uint32).tolist() == [1, 0x7FC12345, 0, 0x80000000, 0xFF800000]


def test_remap_apply_fill(xp):
    remap = remap_of(xp, [-1, 0, -1], 1)
    values = xp.asarray([7.0], np.float32)
    fresh = xp.asarray([1.5, 2.5, 3.5])
    assert to_numpy(remap.apply(values, fill=fresh)).tolist() == [1.5, 7.0, 3.5]
    assert remap.apply(values, fill=fresh).dtype == np.float32
    assert np.isnan(to_numpy(remap.apply(values, fill=math.nan))).tolist() == [True, False, True]
    rows = remap.apply(xp.asarray([[1, 2]]), fill=xp.asarray([8, 9]))
    assert to_numpy(rows).tolist() == [[8, 9], [1, 2], [8, 9]]


def test_remap_apply_takes_strided_arrays(xp):
    remap = remap_of(xp, [2, -1, 0], 3)
    array = xp.arange(12).reshape(2, 6)[:, ::2].T
    out = xp.zeros((2, 3), array.dtype).T
    assert to_numpy(remap.apply(array, out=out)).tolist() == [[4, 10], [0, 0], [0, 6]]


@given(data=st.data())
def test_remap_compose_is_one_after_the_other(xp, data):
    def draw(nnz_old):
        olds = data.draw(st.permutations(range(nnz_old)))
        picks = data.draw(st.lists(st.booleans(), max_size=8))
        new_to_old = [olds.pop() if olds and pick else -1 for pick in picks]
        return remap_of(xp, new_to_old, nnz_old)

    first = draw(data.draw(st.integers(0, 8)))
    later = draw(first.nnz_new)
    last = draw(later.nnz_new)
    array = xp.arange(1, first.nnz_old + 1)
    both = first.compose(later)
    assert (both.nnz_old, both.nnz_new) == (first.nnz_old, later.nnz_new)
    assert (both.apply(array) == later.apply(first.apply(array))).all()
    left, right = both.compose(last), first.compose(later.compose(last))
    assert (left.new_to_old == right.new_to_old).all()


def test_remap_identity(xp):
    for nnz in (0, 1, 5):
        remap = Remap.identity(nnz, xp)
        assert remap.is_identity
        assert (remap.kept, remap.grown, remap.dropped) == (nnz, 0, 0)
        assert (remap.apply(xp.arange(nnz)) == xp.arange(nnz)).all()
        assert remap.compose(remap).is_identity
    assert not remap_of(xp, [0, 1], 3).is_identity
    assert not remap_of(xp, [1, 0], 2).is_identity
    assert repr(remap_of(xp, [1, 0], 2)) == "Remap(nnz_old=2, nnz_new=2)"


def test_remap_refuses_entries(xp):
    with pytest.raises(IndexError, match=r"Remap: new_to_old must hold .* in \[-1, 2\), got 2"):
        remap_of(xp, [0, 2], 2)
    with pytest.raises(IndexError, match=r"got -2"):
        remap_of(xp, [0, -2], 2)
    with pytest.raises(ValueError, match="Remap: new_to_old must hold no old index twice, got 1"):
        remap_of(xp, [0, 1, -1, -1, 1], 2)
    with pytest.raises(TypeError, match="Remap: new_to_old must have dtype int32, got int64"):
        Remap(xp.zeros(1, np.int64), 1)
    with pytest.raises(ValueError, match="Remap: new_to_old must have 1 dimension, got 2"):
        Remap(xp.zeros((1, 1), np.int32), 1)
    with pytest.raises(TypeError, match="Remap: new_to_old must be a NumPy or CuPy array"):
        Remap([0], 1)
    with pytest.raises(ValueError, match="Remap: nnz_old must be between"):
        Remap(xp.zeros(0, np.int32), -1)


def test_remap_apply_refuses(xp):
    remap = remap_of(xp, [1, -1, 0], 2)
    out = xp.full(3, 9.0)
    for array, keywords, error, message in [
        (xp.zeros(3), {}, ValueError, r"array must have nnz_old = 2 rows, got shape \(3,\)"),
        (xp.zeros(()), {}, ValueError, r"array must have nnz_old = 2 rows, got shape \(\)"),
        (
            xp.zeros(2),
            {"fill": [1.0] * 3},
            TypeError,
            "fill must be a scalar or an array, got list",
        ),
        ([1, 2], {}, TypeError, "array must be a NumPy or CuPy array, got list"),
        (xp.zeros((2, 2)), {"out": out}, ValueError, r"out must have shape \(3, 2\), got"),
        (xp.zeros(2, "f4"), {"out": out}, TypeError, "out must have dtype float32, got float64"),
        (xp.zeros(2), {"fill": xp.zeros(4), "out": out}, ValueError, r"fill must broadcast to"),
    ]:
        with pytest.raises(error, match=f"Remap.apply: {message}"):
            remap.apply(array, **keywords)
    assert (out == 9.0).all()


def test_remap_compose_refuses(xp):
    remap = remap_of(xp, [1, -1, 0], 2)
    with pytest.raises(ValueError, match=r"later.nnz_old must equal nnz_new \(3\), got 2"):
        remap.compose(remap)
    with pytest.raises(TypeError, match=r"Remap\.compose: later must be a Remap, got list"):
        remap.compose([0, 1, 2])
