"""Topologies of CuPy arrays equal those of NumPy arrays, derived views and errors included."""

import numpy as np
import pytest
from helpers import PROBLEMS, make_topology, problem, problem_ids, to_numpy

from snack_cupy import Topology, random

every_problem = pytest.mark.parametrize("problem", PROBLEMS, ids=problem_ids(PROBLEMS))


def assert_same(topology, host):
    """``topology`` is on the GPU and equals ``host``, in every array and every dtype."""
    assert topology.device == "cuda:0"
    assert topology.xp.__name__ == "cupy"
    for name in ("shape", "m", "k", "nnz", "density", "sparsity"):
        assert getattr(topology, name) == getattr(host, name)
    for name in ("row_offsets", "columns", "row", "col", "positions", "fan_in", "packed_rows"):
        got, want = getattr(topology, name), getattr(host, name)
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(to_numpy(got), want)
    for got, want in zip(topology.transposed, host.transposed, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(to_numpy(got), want)
    assert topology.nbytes == host.nbytes


@every_problem
def test_topology_from_coords(cp, rng, problem):
    host = make_topology(problem)
    order = rng.permutation(host.nnz)
    for dtype in (np.int32, np.int64, np.uint32):
        row, col = (cp.asarray(array[order].astype(dtype)) for array in (host.row, host.col))
        assert_same(Topology.from_coords(row, col, host.shape), host)


@every_problem
def test_topology_from_parts_that_are_checked(cp, problem):
    host = make_topology(problem)
    offsets = cp.asarray(host.row_offsets.astype(np.int64))
    columns = cp.asarray(host.col.astype(np.int64))
    topology = Topology(offsets, columns, host.shape)
    assert_same(topology, host)
    columns[...] = 0  # the topology holds a copy
    assert_same(topology, host)
    assert_same(Topology(topology.row_offsets, topology.columns, host.shape, check=False), host)


@pytest.mark.parametrize("dtype", ["bool", "int32", "float32", "float64"])
def test_topology_from_mask(cp, dtype):
    for name in ("odd_sizes", "every_entry", "no_entries", "no_rows", "no_columns", "one_element"):
        host = make_topology(problem(name))
        mask = np.zeros(host.shape, dtype)
        mask[host.row, host.col] = 1
        assert_same(Topology.from_mask(cp.asarray(mask)), host)
        strided = cp.asfortranarray(cp.asarray(mask))
        assert_same(Topology.from_mask(strided), host)


@every_problem
def test_topology_to_device_and_back(cp, problem):
    host = make_topology(problem)
    for device in ("cuda", "cuda:0"):
        topology = host.to_device(device)
        assert_same(topology, host)
        assert topology.to_device(device) is topology
        back = topology.to_device("cpu")
        assert back.device == "cpu"
        assert back.equals(host)
        assert (back.row_offsets.dtype, back.columns.dtype) == (
            host.row_offsets.dtype,
            host.columns.dtype,
        )


def test_topology_works_on_every_gpu(cp):
    host = make_topology(problem("odd_sizes"))
    for index in reversed(range(cp.cuda.runtime.getDeviceCount())):
        topology = host.to_device(f"cuda:{index}")
        view = topology.transposed
        for got, want in zip((topology.row, *view), (host.row, *host.transposed), strict=True):
            assert got.device.id == index
            np.testing.assert_array_equal(to_numpy(got), want)
        assert topology.copy().equals(topology)
        assert cp.cuda.Device().id == 0


def test_topology_equals_and_copy(cp):
    topology = make_topology(problem("odd_sizes")).to_device("cuda")
    copy = topology.copy()
    assert copy.equals(topology)
    for name in ("row_offsets", "columns"):
        assert getattr(copy, name).data.ptr != getattr(topology, name).data.ptr
    other = random.random_topology(topology.shape, nnz=topology.nnz, seed=8, xp=cp)
    assert not topology.equals(other)
    copy.update(other.row_offsets, other.columns)
    assert copy.equals(other)
    assert not copy.equals(topology)


def held_arrays(topology):
    return (
        topology.row_offsets,
        topology.columns,
        topology.packed_rows,
        *topology.transposed,
    )


@pytest.mark.parametrize("name", ["odd_sizes", "int32_columns", "int32_rows", "every_entry"])
def test_topology_update_in_place_keeps_every_address(cp, name):
    topology = make_topology(problem(name)).to_device("cuda")
    later = random.random_topology(topology.shape, nnz=topology.nnz, seed=3, name=name)
    addresses = [array.data.ptr for array in held_arrays(topology)]
    for columns in (later.columns, later.col.astype(np.int64)):
        version = topology.version
        topology.update(cp.asarray(later.row_offsets), cp.asarray(columns))
        assert topology.version == version + 1
        assert [array.data.ptr for array in held_arrays(topology)] == addresses
        assert_same(topology, later)


def test_topology_update_that_changes_nnz(cp):
    topology = make_topology(problem("odd_sizes")).to_device("cuda")
    held_arrays(topology)
    for nnz in (1200, 0, 7):
        later = random.random_topology(topology.shape, nnz=nnz, seed=4)
        version = topology.version
        given = cp.asarray(later.row_offsets), cp.asarray(later.columns)
        topology.update(*given)
        assert topology.version == version + 1
        for array in given:
            array[...] = 0  # the topology holds copies
        assert_same(topology, later)


def test_topology_refresh_after_arrays_were_written(cp):
    topology = make_topology(problem("odd_sizes")).to_device("cuda")
    addresses = [array.data.ptr for array in held_arrays(topology)]
    later = random.random_topology(topology.shape, nnz=topology.nnz, seed=5)
    topology.row_offsets[...] = cp.asarray(later.row_offsets)
    topology.columns[...] = cp.asarray(later.columns)
    topology.refresh()
    assert [array.data.ptr for array in held_arrays(topology)] == addresses
    assert_same(topology, later)


# Bad input


@pytest.mark.parametrize(
    ("offsets", "columns", "error", "message"),
    [
        pytest.param([0, 1, 3], [0, 1, 4], IndexError, r"columns must .* \[0, 4\), got 4", id="k"),
        pytest.param([0, 1, 3], [0, -1, 2], IndexError, r"columns must .*, got -1", id="negative"),
        pytest.param([0, 1, 3], [0, 2, 1], ValueError, "columns must strictly", id="unsorted"),
        pytest.param([0, 1, 3], [0, 2, 2], ValueError, "columns must strictly", id="twice"),
        pytest.param([0, 1, 2], [0, 1, 2], ValueError, "row_offsets must run", id="end"),
        pytest.param([1, 1, 3], [0, 1, 2], ValueError, "row_offsets must run", id="start"),
        pytest.param([0, 4, 3], [0, 1, 2], ValueError, "row_offsets must not", id="decrease"),
        pytest.param([0, 3], [0, 1, 2], ValueError, "row_offsets must have shape", id="length"),
        pytest.param([0.0, 1, 3], [0, 1, 2], TypeError, "row_offsets must have", id="float"),
        pytest.param([0, 1, 3], [0.0, 1, 2], TypeError, "columns must have", id="float-columns"),
        pytest.param([0, 1, 3], [[0, 1, 2]], ValueError, "columns must have 1", id="2d"),
    ],
)
def test_topology_refuses_a_wrong_structure(cp, offsets, columns, error, message):
    arrays = cp.asarray(offsets), cp.asarray(columns)
    with pytest.raises(error, match=f"^Topology: {message}"):
        Topology(*arrays, (2, 4))


def test_topology_refuses_wrong_coordinates(cp):
    def from_coords(row, col, shape=(2, 4)):
        return Topology.from_coords(cp.asarray(row), cp.asarray(col), shape)

    for row, col, error, message in (
        ([0, 2], [0, 1], IndexError, r"row must hold indices in \[0, 2\), got 2"),
        ([0, -1], [0, 1], IndexError, r"row must .*, got -1"),
        ([0, 1], [0, 4], IndexError, r"col must hold indices in \[0, 4\), got 4"),
        ([0, 1], [0, -3], IndexError, r"col must .*, got -3"),
        ([0, 1], [0], ValueError, "row and col must have the same length"),
        ([0.0, 1], [0, 1], TypeError, "row must have an integer dtype"),
        ([1, 0, 1], [2, 1, 2], ValueError, "row and col must hold no duplicate"),
    ):
        with pytest.raises(error, match=f"^Topology.from_coords: {message}"):
            from_coords(row, col)


def test_topology_refuses_arrays_of_two_devices(cp):
    index = cp.zeros(1, np.int32)
    with pytest.raises(ValueError, match="col must be on cuda:0, got cpu"):
        Topology.from_coords(index, np.zeros(1, np.int32), (2, 4))
    with pytest.raises(ValueError, match="col must be on cpu, got cuda:0"):
        Topology.from_coords(np.zeros(1, np.int32), index, (2, 4))
    with pytest.raises(ValueError, match="columns must be on cuda:0, got cpu"):
        Topology(cp.array([0, 1, 1]), np.zeros(1, np.int32), (2, 4))


def test_topology_update_refuses_and_changes_nothing(cp):
    topology = make_topology(problem("odd_sizes")).to_device("cuda")
    before = topology.copy()
    offsets, columns = before.row_offsets, before.columns
    for arguments, error in (
        ((offsets[1:], columns), ValueError),
        ((offsets.astype(np.float32), columns), TypeError),
        ((offsets, columns[None]), ValueError),
        ((to_numpy(offsets), columns), ValueError),
        ((offsets, to_numpy(columns)), ValueError),
        ((offsets.tolist(), columns), TypeError),
    ):
        with pytest.raises(error, match=r"^Topology\.update: .* must "):
            topology.update(*arguments)
    assert topology.version == 0
    assert topology.equals(before)


def test_topology_to_device_refuses(cp):
    topology = make_topology(problem("odd_sizes")).to_device("cuda")
    for device in ("gpu", "cuda:x", "cuda:", "", "tpu:0", "cuda:99"):
        with pytest.raises(ValueError, match="to_device: device must be"):
            topology.to_device(device)
