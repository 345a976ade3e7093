"""Growth by gradient against the dense gradient."""

import numpy as np
import pytest
from dst_helpers import changed, problems
from helpers import normal, to_numpy
from hypothesis import given
from hypothesis import strategies as st

from snack_cupy import dst, random
from snack_cupy.dst import gradient
from snack_cupy.topology import Topology


@pytest.fixture(scope="module")
def xp():
    """The array module under test; the GPU tests run this file with CuPy."""
    return np


def best_by_hand(mask, scores, n):
    """Positions of the ``n`` largest magnitudes outside the mask, the lower one of equal ones."""
    magnitude = np.abs(np.asarray(scores, np.float32)).ravel()
    ranked = sorted(
        np.flatnonzero(~mask.ravel()), key=lambda p: (not np.isnan(magnitude[p]), -magnitude[p], p)
    )
    return sorted(map(int, ranked[:n]))


@given(problem=problems(), data=st.data())
def test_grow_by_gradient_is_the_dense_choice(xp, problem, data):
    mask = problem[0]
    (m, k), batch = mask.shape, data.draw(st.integers(0, 3))
    entries = st.sampled_from([0.0, 1.0, -1.0, 2.0, 3.0, -5.0])
    draw = lambda size: data.draw(st.lists(entries, min_size=size, max_size=size))  # noqa: E731
    left = np.array(draw(batch * m), np.float32).reshape(batch, m)
    right = np.array(draw(batch * k), np.float32).reshape(batch, k)
    topology = Topology.from_mask(xp.asarray(mask))
    for n in {0, int((~mask).sum()) // 2, int((~mask).sum())}:
        got = dst.grow_by_gradient(topology, xp.asarray(left), xp.asarray(right), n)
        assert got.dtype == np.int64
        assert to_numpy(got).tolist() == best_by_hand(mask, left.T @ right, n)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("batch", [1, 5, 40])
def test_grow_by_gradient_in_every_dtype(xp, rng, dtype, batch):
    topology = random.random_topology((70, 150), sparsity=0.8, seed=1, xp=xp)
    left = rng.integers(-9, 10, (batch, 70)).astype(dtype)
    right = rng.integers(-9, 10, (batch, 150)).astype(dtype)
    mask = np.zeros((70, 150), bool)
    mask[to_numpy(topology.row), to_numpy(topology.col)] = True
    exact = left.T.astype(np.float64) @ right
    for n in (1, 700, 8000):
        got = dst.grow_by_gradient(topology, xp.asarray(left), xp.asarray(right), n)
        assert to_numpy(got).tolist() == best_by_hand(mask, exact, n)


def test_grow_by_gradient_in_blocks_of_rows(xp, rng, monkeypatch):
    monkeypatch.setattr(gradient, "_BLOCK", 40)
    topology = random.random_topology((33, 20), sparsity=0.7, seed=4, xp=xp)
    left, right = (xp.asarray(normal(rng, (6, size), "float32")) for size in (33, 20))
    want = dst.grow_by_gradient(topology, left, right, 50)
    monkeypatch.setattr(gradient, "_BLOCK", 2**20)
    got = dst.grow_by_gradient(topology, left, right, 50)
    assert to_numpy(got).tolist() == to_numpy(want).tolist()


def test_grow_by_gradient_of_numbers_that_are_not_finite(xp):
    topology = Topology.from_mask(xp.asarray([[1, 0, 0, 0, 0, 0]]))
    right = xp.asarray([[9.0, 1.0, np.inf, 1e-42, np.nan, 0.0]], np.float32)
    left = xp.ones((1, 1), np.float32)
    for n, want in ((1, [4]), (2, [2, 4]), (3, [1, 2, 4]), (4, [1, 2, 3, 4])):
        assert to_numpy(dst.grow_by_gradient(topology, left, right, n)).tolist() == want


def test_restructure_by_gradient_regrows_what_was_dropped(xp, rng):
    topology = random.random_topology((20, 30), sparsity=0.5, seed=2, xp=xp)
    values = xp.asarray(normal(rng, topology.nnz, "float32"))
    left = xp.asarray(rng.integers(-9, 10, (4, 20)).astype(np.float32))
    right = xp.asarray(rng.integers(-9, 10, (4, 30)).astype(np.float32))
    growth = dst.GradientGrowth(left, right)
    n = topology.nnz // 3
    change = dst.restructure(topology, values, n=n, growth=growth, key=3)
    pruned = changed(topology, dst.prune(topology, values, n))
    mask = np.zeros((20, 30), bool)
    mask[to_numpy(pruned.row), to_numpy(pruned.col)] = True
    mask.ravel()[best_by_hand(mask, to_numpy(left).T @ to_numpy(right), n)] = True
    result = changed(topology, change)
    want = Topology.from_mask(xp.asarray(mask))
    assert result.equals(want)
    again = dst.restructure(topology, values, n=n, growth=growth, key=9, regrown="reset")
    assert changed(topology, again).equals(want)
    assert again[2].grown == n


def test_grow_by_gradient_refuses(xp):
    topology = Topology.from_mask(xp.asarray([[1, 0, 1], [0, 0, 1]]))
    left, right = xp.ones((4, 2), np.float32), xp.ones((4, 3), np.float32)
    for arguments, error, message in [
        ((left[:, :1], right, 1), ValueError, r"left must have shape \(4, 2\), got \(4, 1\)"),
        ((left, right[:, :2], 1), ValueError, r"right must have shape \(4, 3\), got \(4, 2\)"),
        ((left, right[:3], 1), ValueError, r"right must have shape \(4, 3\), got \(3, 3\)"),
        ((left[0], right, 1), ValueError, r"left must have shape \(2, 2\), got \(2,\)"),
        ((left, right.astype(float), 1), TypeError, "right must have the dtype of left"),
        ((left.astype(int), right, 1), TypeError, "left must have a dtype of"),
        ((None, right, 1), TypeError, "left must be a NumPy or CuPy array"),
        ((left, right, 4), ValueError, "n must be at most the number of inactive positions"),
        ((left, right, -1), ValueError, "n must be between 0 and"),
    ]:
        with pytest.raises(error, match=f"^grow_by_gradient: {message}"):
            dst.grow_by_gradient(topology, *arguments)
    growth = dst.GradientGrowth(left, right[:, :2])
    for op in (
        lambda: dst.grow(topology, 1, growth=growth, key=0),
        lambda: dst.restructure(topology, xp.ones(3), n=1, growth=growth, key=0),
    ):
        with pytest.raises(ValueError, match="right must have shape"):
            op()
