"""Work on a device that is not current: it is entered, and left again."""

import sys

import fake_cupy
import numpy as np
import pytest
from helpers import make_topology, problem

from snack_cupy import COOTensor, Topology, _jit, dst


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
    assert topology.to_device("cuda").device == "cuda:0"  # the current one
    with cupy.cuda.Device(1):
        assert topology.to_device("cuda") is topology
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


# Restructuring


def assert_change(change, want):
    """Both lead to the same structure by the same remap; the first one on the second device."""
    *arrays, remap = change
    *wanted, host_remap = want
    for got, array in zip(
        (*arrays, remap.new_to_old), (*wanted, host_remap.new_to_old), strict=True
    ):
        assert got.device.id == 1
        assert got.dtype == array.dtype
        np.testing.assert_array_equal(fake_cupy.plain_array(got), array)
    for name in ("kept", "grown", "dropped", "is_identity", "nnz_old", "nnz_new"):
        assert getattr(remap, name) == getattr(host_remap, name), name


@pytest.mark.parametrize("criterion", ["magnitude", "random"])
def test_dst_works_on_another_device(cupy, host, rng, criterion):
    topology, values = host.to_device("cuda:1"), rng.standard_normal(host.nnz)
    device_values = on_second(cupy, values)
    keep = values > 0.5
    options = {"criterion": criterion, "key": 3}
    assert_change(
        dst.prune(topology, keep_mask=on_second(cupy, keep)), dst.prune(host, keep_mask=keep)
    )
    assert_change(
        dst.prune(topology, device_values, 40, **options), dst.prune(host, values, 40, **options)
    )
    assert_change(dst.grow(topology, 50, key=4), dst.grow(host, 50, key=4))
    change = dst.restructure(topology, device_values, 0.3, **options)
    assert_change(change, dst.restructure(host, values, 0.3, **options))


def test_remap_on_another_device(cupy):
    indices = np.array([2, -1, 0], np.int32)
    remap, host = dst.Remap(on_second(cupy, indices), 3), dst.Remap(indices, 3)
    moved = remap.apply(on_second(cupy, np.array([1.0, 2.0, 3.0])))
    assert moved.device.id == 1
    assert fake_cupy.plain_array(moved).tolist() == [3.0, 0.0, 1.0]
    assert fake_cupy.plain_array(remap.compose(remap).new_to_old).tolist() == [0, -1, 2]
    assert (remap.kept, remap.is_identity) == (host.kept, host.is_identity)
    for wrong, error in (([0, 0], ValueError), ([0, 3], IndexError)):
        with pytest.raises(error, match=r"^Remap: new_to_old must hold"):
            dst.Remap(on_second(cupy, np.array(wrong, np.int32)), 3)


# Tensors


def test_coo_works_on_another_device(cupy):
    coords, data = np.array([[1, 0, 1, 1], [2, 1, 0, 2]]), np.array([4.0, 2.0, 3.0, 1.0])
    tensor = COOTensor(on_second(cupy, coords), on_second(cupy, data), (2, 3))
    host = COOTensor(coords, data, (2, 3))
    for make in (
        lambda t: t.coalesce(),
        lambda t: t.copy(),
        lambda t: t.T,
        lambda t: (t * 2).astype(np.float32),
        lambda t: -t / 3,
        lambda t: COOTensor.from_topology(t.topology, t.values),
    ):
        got, want = make(tensor), make(host)
        assert got.device == "cuda:1"
        assert (got.dtype, got.is_sorted, got.nnz) == (want.dtype, want.is_sorted, want.nnz)
        np.testing.assert_array_equal(fake_cupy.plain_array(got.to_dense()), want.to_dense())
    tensor.sort_indices()
    tensor.sum_duplicates()
    assert tensor.is_canonical
    again = COOTensor.from_dense(tensor.to_dense())
    assert again.device == "cuda:1"
    assert again.topology.equals(tensor.topology)
