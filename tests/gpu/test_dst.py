"""Dynamic sparse training on the GPU: the CPU's tests with CuPy, and the same bits as NumPy."""

import numpy as np
import pytest
import test_dst
import test_dst_drop_grow
import test_dst_gradient
import test_dst_remap
from gpu_arrays import put, spin, tests_that_take_xp
from helpers import DTYPES, normal, to_numpy

from snack_cupy import Topology, _jit, dst, random

globals().update(
    tests_that_take_xp(test_dst, test_dst_drop_grow, test_dst_gradient, test_dst_remap)
)

SHAPES = ((37, 41), (300, 784), (5, 70_000), (70_000, 5))
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


@pytest.fixture(scope="module")
def xp():
    return _jit.require_cupy()


def problem_of(rng, shape, dtype):
    """A topology and values with ties, zeros of both signs and non-finite numbers."""
    topology = random.random_topology(shape, density=0.1, seed=1)
    values = normal(rng, topology.nnz, dtype)
    values[::7] = values[0]
    values[1::11] = -values[0]
    values[2::13], values[3::13] = 0.0, -0.0
    values[4::97], values[5::97], values[6::97] = np.inf, -np.inf, np.nan
    return topology, values


def assert_same_change(got, want):
    """(row_offsets, columns, remap) of CuPy and NumPy: equal, of the same dtypes."""
    pairs = (*zip(got[:2], want[:2], strict=True), (got[2].new_to_old, want[2].new_to_old))
    for got_array, want_array in pairs:
        assert got_array.device.id == 0
        assert got_array.dtype == want_array.dtype
        np.testing.assert_array_equal(to_numpy(got_array), want_array)
    assert got[2].nnz_old == want[2].nnz_old
    assert (got[2].kept, got[2].grown) == (want[2].kept, want[2].grown)


@every_shape
@every_dtype
def test_dst_drop_is_that_of_numpy(cp, rng, shape, dtype):
    topology, values = problem_of(rng, shape, dtype)
    device_values = put(values)
    for n in (0, 1, topology.nnz // 3, topology.nnz - 1, topology.nnz):
        for drop in (dst.smallest_magnitude, dst.random_drop):
            got = drop(device_values, n, 5)
            assert got.dtype == bool
            np.testing.assert_array_equal(to_numpy(got), drop(values, n, 5))


@every_shape
def test_dst_growth_is_that_of_numpy(cp, shape):
    host = random.random_topology(shape, density=0.1, seed=1)
    topology = host.to_device("cuda")
    for n in (0, 1, host.nnz // 3, 2 * host.nnz):
        got = dst.random_growth(topology, n, 9)
        assert got.dtype == np.int64
        np.testing.assert_array_equal(to_numpy(got), dst.random_growth(host, n, 9))


@every_shape
@every_dtype
def test_dst_changes_are_those_of_numpy(cp, rng, shape, dtype):
    host, values = problem_of(rng, shape, dtype)
    topology, device_values = host.to_device("cuda"), put(values)
    keep = rng.random(host.nnz) < 0.6
    for n in (0, 1, host.nnz // 3, host.nnz):
        for criterion in ("magnitude", "random"):
            keywords = {"criterion": criterion, "key": 3}
            assert_same_change(
                dst.prune(topology, device_values, n, **keywords),
                dst.prune(host, values, n, **keywords),
            )
            for regrown in ("survive", "reset"):
                assert_same_change(
                    dst.restructure(topology, device_values, n=n, regrown=regrown, **keywords),
                    dst.restructure(host, values, n=n, regrown=regrown, **keywords),
                )
        assert_same_change(dst.grow(topology, n, key=4), dst.grow(host, n, key=4))
    assert_same_change(dst.prune(topology, keep_mask=put(keep)), dst.prune(host, keep_mask=keep))


@every_dtype
def test_dst_remap_applies_as_in_numpy(cp, rng, dtype):
    host, values = problem_of(rng, (37, 41), dtype)
    topology = host.to_device("cuda")
    for n in (0, 40, host.nnz):
        got = dst.restructure(topology, put(values), n=n, key=2, regrown="reset")[2]
        want = dst.restructure(host, values, n=n, key=2, regrown="reset")[2]
        rows = normal(rng, (host.nnz, 3), dtype)
        for array in (values, rows):
            for fill in (0, 1.5):
                moved = got.apply(put(array), fill=fill)
                assert moved.dtype == array.dtype
                assert to_numpy(moved).tobytes() == want.apply(array, fill=fill).tobytes()
            out = put(array)
            assert got.apply(out, out=out) is out
            assert to_numpy(out).tobytes() == want.apply(array).tobytes()


@every_shape
@every_dtype
def test_dst_growth_by_gradient_is_that_of_numpy(cp, rng, shape, dtype):
    host = random.random_topology(shape, density=0.1, seed=1)
    topology = host.to_device("cuda")
    for batch, high in ((1, 2), (33, 9)):  # integers: exact sums, many of them equal
        left, right = (
            rng.integers(-high, high + 1, (batch, size)).astype(DTYPES[dtype]) for size in shape
        )
        for n in (1, host.nnz // 3, 5 * host.nnz):
            want = dst.grow_by_gradient(host, left, right, n)
            for skip in (0, 1):  # aligned or not
                operands = put(left, skip), put(right, skip)
                got = dst.grow_by_gradient(topology, *operands, n)
                np.testing.assert_array_equal(to_numpy(got), want)


def test_dst_growth_by_gradient_of_a_real_layer(cp, rng):
    host = random.random_topology((1030, 1500), sparsity=0.9, seed=2)
    topology = host.to_device("cuda")
    for skew in (0.0, 2.0):
        left, right = (normal(rng, (64, size), "float32") for size in host.shape)
        left *= np.exp(skew * normal(rng, host.m, "float32"))  # rows that differ: the sample errs
        exact = np.abs(left.T.astype(float) @ right).ravel()
        exact[host.positions] = -1
        n = 3 * host.nnz // 10
        got = to_numpy(dst.grow_by_gradient(topology, put(left), put(right), n))
        want = np.argsort(-exact, kind="stable")[:n]
        assert len(got) == n
        assert (np.diff(got) > 0).all()
        assert (exact[got] >= 0).all()
        # Only scores within rounding of the smallest one that grows may differ.
        slack = 64 * 2.0**-23 * np.abs(left).max() * np.abs(right).max() * 64
        assert exact[got].min() >= exact[want].min() - slack
        assert np.isin(want[exact[want] > exact[want].min() + slack], got).all()
        again = dst.grow_by_gradient(topology, put(left), put(right), n)
        np.testing.assert_array_equal(to_numpy(again), got)


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan])
def test_dst_ties_are_those_of_numpy(cp, value):
    host = random.random_topology((300, 784), density=0.5, seed=1)
    topology, values = host.to_device("cuda"), np.full(host.nnz, value, np.float32)
    for n in (1, 40_000, host.nnz - 1):
        assert_same_change(
            dst.restructure(topology, put(values), n=n, key=3),
            dst.restructure(host, values, n=n, key=3),
        )
    left, right = np.zeros((4, 300), np.float32), np.ones((4, 784), np.float32)
    for n in (1, 40_000):
        got = dst.grow_by_gradient(topology, put(left), put(right), n)
        want = dst.grow_by_gradient(host, left, right, n)
        np.testing.assert_array_equal(to_numpy(got), want)


def test_dst_skewed_rows_are_those_of_numpy(cp, rng):
    mask = rng.random((700, 900)) < rng.random((700, 1)) ** 6
    mask[5], mask[100:300] = True, False
    host = Topology.from_mask(mask)
    topology, values = host.to_device("cuda"), normal(rng, host.nnz, "float32")
    for n in (10, host.nnz // 2):
        got = dst.restructure(topology, put(values), n=n, key=3)
        assert_same_change(got, dst.restructure(host, values, n=n, key=3))
    for array, want in zip(topology.transposed, host.transposed, strict=True):
        np.testing.assert_array_equal(to_numpy(array), want)


def test_dst_update_does_not_wait_for_the_device(cp, rng):
    topology = random.random_topology((300, 784), density=0.1, seed=1).to_device("cuda")
    values, operands = put(normal(rng, topology.nnz, "float32")), []
    for size in topology.shape:
        operands.append(put(normal(rng, (8, size), "float32")))
    growths = ("random", dst.GradientGrowth(*operands))
    for growth in growths:
        dst.restructure(topology, values, 0.3, growth=growth, key=1)  # compiles
    cp.cuda.Device().synchronize()
    end = cp.cuda.Event()
    spin(200)
    for growth in growths:
        dst.restructure(topology, values, 0.3, growth=growth, key=1)
    end.record()
    assert not end.done
    end.synchronize()


def test_dst_many_updates_stay_those_of_numpy(cp, rng):
    host = random.random_topology((128, 256), sparsity=0.9, seed=7)
    topology = host.to_device("cuda")
    values = normal(rng, host.nnz, "float32")
    device_values = put(values)
    for step in range(30):
        key = random.key(7, "layer", step)
        got = dst.restructure(topology, device_values, 0.3, key=key)
        want = dst.restructure(host, values, 0.3, key=key)
        assert_same_change(got, want)
        topology.update(*got[:2])
        host.update(*want[:2])
        fresh = random.uniform(key, host.nnz, np.float32)
        values = want[2].apply(values, fill=fresh)
        device_values = got[2].apply(device_values, fill=put(fresh))
        assert to_numpy(device_values).tobytes() == values.tobytes()
    assert topology.to_device("cpu").equals(host)
    for got, want in zip(topology.transposed, host.transposed, strict=True):
        np.testing.assert_array_equal(to_numpy(got), want)
