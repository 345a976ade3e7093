"""The kernels of topology updates, run on the host by `emulator`: the bits of the array code."""

import emulator
import numpy as np
import pytest
from dst_helpers import problems
from helpers import DTYPES, PROBLEMS, make_topology, normal, problem_ids
from hypothesis import given, settings
from hypothesis import strategies as st

from snack_cupy import _device_work, _jit, _structure, dispatch, dst, random
from snack_cupy.dispatch import Device
from snack_cupy.dst import _device, _gradient, _select
from snack_cupy.topology import Topology

pytestmark = pytest.mark.skipif(bool(emulator.missing()), reason=emulator.missing())

every_dtype = pytest.mark.parametrize("dtype", DTYPES)
SHAPES = ((37, 41), (300, 84), (5, 70_000), (70_000, 5), (1, 1), (130, 64))


@pytest.fixture(autouse=True, scope="module")
def emulated():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_jit, "compile_instance", emulator.compile_instance)
        patch.setattr(dispatch, "device_facts", lambda device: Device(2, 64 * 1024))
        patch.setattr(_device, "resident_blocks", lambda device: 1)  # others would wait for ever
        _device_work._function.cache_clear()
        yield
    _device_work._function.cache_clear()


def values_of(rng, nnz, dtype):
    """With ties, zeros of both signs and non-finite numbers."""
    values = normal(rng, nnz, dtype)
    values[::7] = values[:1]
    values[1::11] = -values[:1]
    values[2::13], values[3::13] = 0.0, -0.0
    values[4::97], values[5::97], values[6::97] = np.inf, -np.inf, np.nan
    return values


def changed_on_maps(topology, drop, n=0, key=0, regrown="survive"):
    maps = _device.Maps(topology, drop, n)
    if n:
        maps.grow_at_random(key)
    return maps.structure(regrown)


def assert_same_change(got, want):
    for given_array, wanted in zip(got, (*want[:2], want[2].new_to_old), strict=True):
        assert given_array.dtype == wanted.dtype
        np.testing.assert_array_equal(given_array, wanted)


def assert_updates_as_arrays(topology, values, n, key):
    for regrown in ("survive", "reset"):
        want = dst.restructure(topology, values, n=n, key=key, regrown=regrown)
        drop = _device.Drop(n, values=values)
        got = changed_on_maps(topology, drop, n, random.subkey(key, 1), regrown)
        assert_same_change(got, want)
    assert_same_change(
        changed_on_maps(topology, _device.Drop(n, values=values)), dst.prune(topology, values, n)
    )
    dropped = dst.random_drop(values, n, key)
    assert_same_change(
        changed_on_maps(topology, _device.Drop(n, mask=dropped)),
        dst.prune(topology, keep_mask=~dropped),
    )


@every_dtype
def test_emulated_selection_is_that_of_numpy(rng, dtype):
    for count in (1, 33, 5000):
        for values in (values_of(rng, count, dtype), np.zeros(count, DTYPES[dtype])):
            for n in sorted({1, count // 3 + 1, count}):
                got = _select.smallest(values, n)
                np.testing.assert_array_equal(got, dst.smallest_magnitude(values, n))


def test_emulated_selection_among_shares_of_equal_keys(rng, monkeypatch):
    monkeypatch.setattr(_select, "SHARES", 3)
    values = np.repeat(np.array([1.0, 2.0, 1.0, 0.5], np.float32), 4000)
    for n in (4000, 4001, 6100, 8000, 8192, 11_999, 12_000):
        np.testing.assert_array_equal(
            _select.smallest(values, n), dst.smallest_magnitude(values, n)
        )


@every_dtype
def test_emulated_updates_in_every_dtype(rng, dtype):
    topology = random.random_topology((37, 41), density=0.3, seed=2)
    for n in (0, 1, topology.nnz // 3, topology.nnz):
        assert_updates_as_arrays(topology, values_of(rng, topology.nnz, dtype), n, n)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("density", [0.02, 0.3, 1.0])
def test_emulated_updates_of_every_shape(rng, shape, density):
    if shape[0] * shape[1] * density > 20_000:
        density = 0.02
    topology = random.random_topology(shape, density=density, seed=2)
    for n in {topology.nnz // 3, topology.nnz}:
        assert_updates_as_arrays(topology, values_of(rng, topology.nnz, "float32"), n, 5)


@pytest.mark.parametrize("problem", PROBLEMS, ids=problem_ids(PROBLEMS))
def test_emulated_updates_of_odd_structures(rng, problem):
    topology = make_topology(problem)
    if not 0 < topology.m * topology.k < 2**22 or topology.nnz > 40_000:
        pytest.skip("nothing to do, or too much for the emulator")
    values = values_of(rng, topology.nnz, "float32")
    inactive = topology.m * topology.k - topology.nnz
    assert_updates_as_arrays(topology, values, topology.nnz // 2, 7)
    n = min(inactive, topology.nnz + 3)
    want = dst.grow(topology, n, key=9)
    assert_same_change(changed_on_maps(topology, _device.Drop(0), n, 9), want)
    if n:
        got = _device.random_growth(topology, n, 9)
        np.testing.assert_array_equal(got, dst.random_growth(topology, n, 9))


@settings(max_examples=60, deadline=None)
@given(problem=problems(), data=st.data())
def test_emulated_updates_of_small_masks(problem, data):
    mask, values = problem
    topology = Topology.from_mask(mask)
    if mask.size:
        n = data.draw(st.integers(0, topology.nnz))
        assert_updates_as_arrays(topology, values, n, data.draw(st.integers(0, 2**64 - 1)))


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32", "float64"])
def test_emulated_move_is_that_of_numpy(rng, dtype):
    topology = random.random_topology((40, 50), density=0.5, seed=1)
    array = rng.integers(0, 255, topology.nnz).astype(dtype)
    remap = dst.restructure(topology, array.astype(np.float32), 0.5, key=1)[2]
    out = np.full_like(array, 99)
    _device.move(array, remap.new_to_old, out)
    np.testing.assert_array_equal(out, remap.apply(array))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_emulated_moves_in_place_are_those_of_numpy(rng, dtype):
    itemsize = np.dtype(dtype).itemsize
    for nnz in (1, 1000, *(256 * _device.carried(itemsize, together) for together in (3, 2, 1))):
        topology = random.random_topology((150, 120), nnz=nnz, seed=1)
        arrays = [rng.integers(0, 255, nnz).astype(dtype) for _ in range(5)]
        remap = dst.restructure(topology, rng.random(nnz), 0.5, key=1)[2]
        want = [remap.apply(array) for array in arrays]
        mover = _device.InPlace(arrays[0], nnz)
        assert mover.takes(itemsize)
        mover.move(remap.new_to_old, [array.ctypes.data for array in arrays], itemsize)
        np.testing.assert_array_equal(arrays, want)
    assert not _device.InPlace(arrays[0], nnz + 1).takes(itemsize)
    assert not _device.InPlace(arrays[0], 1).takes(16)


@pytest.mark.parametrize("problem", PROBLEMS, ids=problem_ids(PROBLEMS))
def test_emulated_column_major_view(problem):
    topology = make_topology(problem)
    words = -(-topology.m // 32) * topology.k
    if not topology.nnz or words > 2**20 or topology.nnz > 40_000:
        pytest.skip("nothing to do, or too much for the emulator")
    assert_view(topology)


@pytest.mark.parametrize("shape", [*SHAPES, (70, 9000)], ids=str)
def test_emulated_column_major_view_of_every_shape(shape):
    assert_view(random.random_topology(shape, density=0.02, seed=3))


def test_emulated_column_major_view_of_crowded_tiles():
    assert_view(random.random_topology((300, 70), density=0.9, seed=3))


def assert_view(topology):
    if topology.nnz == 0:
        return
    transposing = _structure.Transposing(topology.columns, topology.shape)
    transposing.reserve(topology.columns)
    got = transposing(topology.row_offsets, topology.columns)
    for array, wanted in zip(got, topology.transposed, strict=True):
        assert array.dtype == wanted.dtype
        np.testing.assert_array_equal(array, wanted)


def operands(rng, topology, batch, dtype, high=9):
    """Integers, so that products and sums are exact, with many equal sums."""
    sizes = topology.shape
    return [rng.integers(-high, high + 1, (batch, size)).astype(DTYPES[dtype]) for size in sizes]


def assert_grows_by_gradient(topology, left, right, counts):
    for n in counts:
        want = dst.grow_by_gradient(topology, left, right, n)
        got = _device.gradient_growth(topology, left, right, n)
        np.testing.assert_array_equal(got, want)


@every_dtype
def test_emulated_growth_by_gradient_in_every_dtype(rng, dtype):
    topology = random.random_topology((133, 140), density=0.2, seed=3)
    for batch in (1, 21):
        left, right = operands(rng, topology, batch, dtype)
        assert_grows_by_gradient(topology, left, right, (5000,))


@pytest.mark.parametrize("shape", [(37, 41), (260, 300), (5, 2000), (2000, 5), (1, 1)], ids=str)
@pytest.mark.parametrize("batch", [0, 1, 17])
def test_emulated_growth_by_gradient_of_every_shape(rng, shape, batch):
    topology = random.random_topology(shape, density=0.3, seed=3)
    inactive = topology.m * topology.k - topology.nnz
    left, right = operands(rng, topology, batch, "float32")
    counts = {1, inactive} if batch == 17 else {inactive // 3 + 1}
    assert_grows_by_gradient(topology, left, right, counts)


def test_emulated_growth_by_gradient_of_rows_that_differ(rng):
    topology = random.random_topology((300, 400), density=0.1, seed=5)
    left, right = operands(rng, topology, 9, "float32")
    left[:, :3] *= 100  # so that few rows get nearly all that grows
    left[:, 200:] = 0
    assert_grows_by_gradient(topology, left, right, (900, 3000))


@pytest.mark.parametrize("capacity", [1, 700])
def test_emulated_growth_by_gradient_without_a_list(rng, monkeypatch, capacity):
    monkeypatch.setattr(_gradient, "capacity_of", lambda inactive, n: capacity)
    topology = random.random_topology((150, 140), density=0.2, seed=3)
    left, right = operands(rng, topology, 6, "float32", 2)
    assert_grows_by_gradient(topology, left, right, (701, 9000))
    assert_grows_by_gradient(topology, 0 * left, right, (701,))


def test_emulated_growth_by_gradient_of_numbers_that_are_not_finite(rng):
    topology = random.random_topology((40, 50), density=0.2, seed=3)
    left, right = operands(rng, topology, 1, "float32")
    left[0, 3], right[0, 7], right[0, 9] = np.inf, np.nan, 1e-42
    assert_grows_by_gradient(topology, left, right, (30, 60, 1590))


@settings(max_examples=25, deadline=None)
@given(problem=problems(), data=st.data())
def test_emulated_restructure_by_gradient(problem, data):
    mask, values = problem
    topology = Topology.from_mask(mask)
    if not mask.size:
        return
    n = data.draw(st.integers(0, topology.nnz))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    growth = dst.GradientGrowth(*operands(rng, topology, 2, "float32", 2))
    for regrown in ("survive", "reset"):
        want = dst.restructure(topology, values, n=n, growth=growth, key=0, regrown=regrown)
        maps = _device.Maps(topology, _device.Drop(n, values=values), n, by_gradient=True)
        if n:
            maps.grow_by_gradient(growth.left, growth.right)
        assert_same_change(maps.structure(regrown), want)
