"""A topology on a device that is not current: it switches by itself and leaves the device again."""

import sys

import fake_cupy
import numpy as np
import pytest
from helpers import make_topology, problem

from snack_cupy import Topology, _jit


@pytest.fixture
def cupy(monkeypatch):
    """The stand-in with two devices, of which the first is current."""
    module = fake_cupy.module()
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(_jit, "require_cupy", lambda: module)
    yield module
    assert fake_cupy.current == [0]


@pytest.fixture
def host():
    return make_topology(problem("odd_sizes"))


def on_second(cupy, array):
    with cupy.cuda.Device(1):
        return cupy.array(array)


def assert_same(topology, host):
    """``topology`` is on the second device and equals ``host``, in every array and every dtype."""
    assert topology.device == "cuda:1"
    arrays = {
        name: (getattr(topology, name), getattr(host, name))
        for name in ("row_offsets", "columns", "row", "col", "positions", "fan_in", "packed_rows")
    }
    arrays |= {
        f"transposed.{name}": (getattr(topology.transposed, name), getattr(host.transposed, name))
        for name in host.transposed._fields
    }
    for name, (got, want) in arrays.items():
        assert got.device.id == 1, name
        assert got.dtype == want.dtype, name
        np.testing.assert_array_equal(fake_cupy.plain_array(got), want, err_msg=name)


def test_the_stand_in_refuses_arrays_of_another_device(cupy):
    array = on_second(cupy, np.arange(3))
    for work in (
        lambda: array + 1,
        lambda: array[1:],
        lambda: array.astype(np.int32),
        lambda: cupy.argsort(array),
    ):
        with pytest.raises(RuntimeError, match="an array of device 1 while 0 is current"):
            work()


def test_topology_is_made_on_the_device_of_its_arrays(cupy, host):
    mask = np.zeros(host.shape, bool)
    mask[host.row, host.col] = True
    row, col = (on_second(cupy, array[::-1].copy()) for array in (host.row, host.col))
    offsets, columns = (on_second(cupy, array) for array in (host.row_offsets, host.columns))
    assert_same(Topology.from_coords(row, col, host.shape), host)
    assert_same(Topology.from_mask(on_second(cupy, mask)), host)
    assert_same(Topology(offsets, columns, host.shape), host)
    assert_same(Topology(offsets, columns, host.shape, check=False), host)


def test_topology_moves_to_another_device(cupy, host):
    topology = host.to_device("cuda:1")
    assert_same(topology, host)
    assert topology.to_device("cuda:1") is topology
    copy = topology.copy()
    assert_same(copy, host)
    assert copy.equals(topology)


@pytest.mark.parametrize("nnz", [None, 7], ids=["equal_nnz", "another_nnz"])
def test_topology_update_on_another_device(cupy, host, nnz):
    topology = host.to_device("cuda:1")
    assert_same(topology, host)  # what is derived is there, and has to follow
    later = Topology._from_positions(
        np.arange(host.nnz if nnz is None else nnz, dtype=np.int64) * 2, host.shape
    )
    topology.update(on_second(cupy, later.row_offsets), on_second(cupy, later.columns))
    assert_same(topology, later)


def test_topology_refresh_on_another_device(cupy, host):
    topology = host.to_device("cuda:1")
    assert_same(topology, host)
    later = Topology._from_positions(np.arange(host.nnz, dtype=np.int64), host.shape)
    with cupy.cuda.Device(1):
        topology.row_offsets[...] = later.row_offsets
        topology.columns[...] = later.columns
    topology.refresh()
    assert_same(topology, later)


def test_topology_errors_on_another_device(cupy):
    row, col = (on_second(cupy, np.array(indices)) for indices in ([1, 0, 1], [2, 1, 2]))
    with pytest.raises(ValueError, match=r"^Topology\.from_coords: row and col must hold no dup"):
        Topology.from_coords(row, col, (2, 4))
    with pytest.raises(IndexError, match=r"^Topology\.from_coords: col must .*, got 2"):
        Topology.from_coords(row, col, (2, 2))
    with pytest.raises(ValueError, match=r"^Topology: columns must strictly increase"):
        Topology(on_second(cupy, np.array([0, 0, 3])), col, (2, 4))


@pytest.mark.parametrize("device", ["cuda:2", "cuda:99"])
def test_topology_to_device_names_the_devices_there_are(cupy, host, device):
    message = f"^to_device: device must be one of cuda:0 to cuda:1, got '{device}'$"
    with pytest.raises(ValueError, match=message):
        host.to_device(device)
