"""What is dropped and what is grown, against sorting and enumeration."""

import math
import tracemalloc

import numpy as np
import pytest
from dst_helpers import by_magnitude, problems
from helpers import DTYPES, to_numpy
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from snack_cupy import dst, random
from snack_cupy.topology import Topology


@pytest.fixture(scope="module")
def xp():
    """The array module under test; the GPU tests run this file with CuPy."""
    return np


@given(problem=problems(), dtype=st.sampled_from(["float16", "float32", "float64"]))
def test_smallest_magnitude_is_the_sorted_order(xp, problem, dtype):
    values = problem[1].astype(dtype)
    order = by_magnitude(values)
    weights = xp.asarray(values)
    for n in range(len(values) + 1):
        dropped = dst.smallest_magnitude(weights, n)
        assert dropped.dtype == bool
        assert np.flatnonzero(to_numpy(dropped)).tolist() == sorted(order[:n])
    assert to_numpy(weights).tobytes() == values.tobytes()


def test_smallest_magnitude_bfloat16():
    values = np.array([2, -0.0, math.nan, 0.5, -0.5, 0, math.inf, 1e-40])
    values = values.astype(DTYPES["bfloat16"])
    order = [1, 5, 7, 3, 4, 0, 6, 2]
    for n in range(9):
        dropped = dst.smallest_magnitude(values, n)
        assert np.flatnonzero(dropped).tolist() == sorted(order[:n])


def test_smallest_magnitude_ties_and_non_finite(xp):
    values = xp.asarray([1.0, math.nan, -1.0, math.inf, 1.0, -math.inf, -math.nan, 1.0])
    order = [0, 2, 4, 7, 3, 5, 1, 6]
    for n in range(9):
        assert np.flatnonzero(to_numpy(dst.smallest_magnitude(values, n))).tolist() == sorted(
            order[:n]
        )


def test_smallest_magnitude_of_many_takes_strides(xp):
    values = random.uniform(5, 40_000, np.float32, xp)[::2] - np.float32(0.5)
    values[::3] = 0.25
    want = np.lexsort((np.arange(20_000), np.abs(to_numpy(values))))
    for n in (1, 5000, 10_000, 19_999):
        dropped = to_numpy(dst.smallest_magnitude(values, n))
        assert np.flatnonzero(dropped).tolist() == sorted(want[:n].tolist())


def test_random_drop_is_exact_and_uniform(xp):
    nnz, n, draws = 40, 7, 400
    counts = np.zeros(nnz)
    for step in range(draws):
        dropped = to_numpy(dst.random_drop(xp.zeros(nnz), n, random.key(0, "", step)))
        assert dropped.sum() == n
        counts += dropped
    expected = draws * n / nnz
    statistic = ((counts - expected) ** 2).sum() / (expected * (1 - n / nnz)) * (nnz - 1) / nnz
    assert stats.chi2.sf(statistic, nnz - 1) > 1e-3


@pytest.mark.parametrize("drop", [dst.smallest_magnitude, dst.random_drop])
def test_drop_refuses(xp, drop):
    for values, n, error, message in [
        (xp.zeros(3), 4, ValueError, "n must be between 0 and 3, got 4"),
        (xp.zeros(3), -1, ValueError, "n must be between 0 and 3, got -1"),
        (xp.zeros(3), 1.0, TypeError, "n must be an integer, got 1.0"),
        (xp.zeros((3, 1)), 1, ValueError, "values must have 1 dimension, got 2"),
        (xp.zeros(3, np.int32), 1, TypeError, "values must have a dtype of"),
        ([0.0], 1, TypeError, "values must be a NumPy or CuPy array, got list"),
    ]:
        with pytest.raises(error, match=f"{drop.__name__}: {message}"):
            drop(values, n, 0)


# Grow


@given(problem=problems(), key=st.integers(0, 2**64 - 1))
def test_random_growth_is_the_ranks_of_the_inactive(xp, problem, key):
    mask = problem[0]
    topology = Topology.from_mask(xp.asarray(mask))
    inactive = np.flatnonzero(~mask)
    for n in {0, 1, len(inactive) // 2, len(inactive)}:
        if n > len(inactive):
            continue
        grown = dst.random_growth(topology, n, key)
        ranks = np.sort(to_numpy(random.permuted_ranks(key, n, len(inactive), xp)))
        assert grown.dtype == np.int64
        assert to_numpy(grown).tolist() == inactive[ranks].tolist()


def test_random_growth_is_uniform(xp):
    mask = to_numpy(random.uniform(1, 80, xp=xp)).reshape(8, 10) < 0.4
    topology = Topology.from_mask(xp.asarray(mask))
    cells, n, draws = int((~mask).sum()), 9, 400
    counts = np.zeros(80)
    for step in range(draws):
        counts[to_numpy(dst.random_growth(topology, n, random.key(0, "", step)))] += 1
    assert not counts[mask.ravel()].any()
    expected = draws * n / cells
    statistic = ((counts[~mask.ravel()] - expected) ** 2).sum() / expected
    statistic *= (cells - 1) / (cells - n)
    assert stats.chi2.sf(statistic, cells - 1) > 1e-3


def test_growth_and_restructure_never_densify():
    topology = random.random_topology((2**10, 2**30), nnz=20_000)
    values = random.uniform(0, 20_000, np.float32)
    tracemalloc.start()
    try:
        grown = dst.random_growth(topology, 10_000, 1)
        dst.restructure(topology, values, 0.5, key=2)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(set(grown.tolist())) == 10_000
    assert peak < 100 * topology.nnz


def test_random_growth_refuses(xp):
    topology = Topology.from_mask(xp.asarray([[1, 0, 0], [1, 1, 0]]))
    for grow in (dst.random_growth, lambda *arguments: dst.grow(*arguments[:2], key=arguments[2])):
        message = r"n must be at most the number of inactive positions \(3\), got 4"
        with pytest.raises(ValueError, match=message):
            grow(topology, 4, 0)
        with pytest.raises(ValueError, match=r"n must be between 0 and .*, got -1"):
            grow(topology, -1, 0)
        with pytest.raises(TypeError, match=r"n must be an integer, got 1\.5"):
            grow(topology, 1.5, 0)
        with pytest.raises(ValueError, match=r"key must be between 0 and .*, got -1"):
            grow(topology, 1, -1)


def test_grow_refuses_2_to_the_31_connections():
    topology = random.random_topology((2**16, 2**16), nnz=10)
    for grow in (dst.random_growth, lambda *arguments: dst.grow(*arguments[:2], key=arguments[2])):
        with pytest.raises(ValueError, match="nnz must be at most 2147483647"):
            grow(topology, 2**31, 0)
