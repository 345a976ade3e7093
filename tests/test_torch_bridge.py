"""Between tensors and arrays: the same memory, whatever the dtype and strides."""

import gc
import weakref

import numpy as np
import pytest
import torch
from helpers import DTYPES as NUMPY_DTYPES
from helpers import normal
from torch_helpers import DTYPES, integers, seeded_layer

from snack_cupy import Topology, random
from snack_cupy.torch import bridge, to_array, to_tensor
from snack_cupy.torch.bridge import structure_of

INTEGERS = ("int32", "int64", "uint8", "bool")


@pytest.fixture
def topology():
    return random.random_topology((9, 14), density=0.3, seed=2)


# Tensors and arrays


@pytest.mark.parametrize("dtype", [*DTYPES, *INTEGERS])
def test_to_array_shares_memory(dtype):
    tensor = integers((3, 4), dtype=getattr(torch, dtype))
    array = to_array(tensor)
    assert bridge.address(array) == tensor.data_ptr()
    assert (array.shape, array.dtype.name) == ((3, 4), dtype)
    assert array.astype(np.float64).tolist() == tensor.double().tolist()
    array[1, 2] = 1
    assert tensor[1, 2] == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_to_tensor_shares_memory(dtype, rng):
    array = normal(rng, (3, 4), dtype)
    tensor = to_tensor(array)
    assert tensor.data_ptr() == bridge.address(array)
    assert (tuple(tensor.shape), tensor.dtype) == ((3, 4), DTYPES[dtype])
    assert tensor.double().tolist() == array.astype(np.float64).tolist()
    tensor[1, 2] = 5
    assert array[1, 2] == 5


@pytest.mark.parametrize("dtype", DTYPES)
def test_to_array_and_back_is_the_same_tensor(dtype):
    tensor = integers((4, 6), dtype=DTYPES[dtype])
    for view in (tensor, tensor.T, tensor[1:, ::2], tensor[2], tensor[:0]):
        back = to_tensor(to_array(view))
        assert back.data_ptr() == view.data_ptr()
        assert back.dtype == view.dtype
        assert torch.equal(back, view)


@pytest.mark.parametrize("dtype", DTYPES)
def test_to_array_keeps_strides(dtype):
    view = integers((4, 6), dtype=DTYPES[dtype]).T[1::2]
    array = to_array(view)
    assert array.strides == tuple(s * view.element_size() for s in view.stride())
    assert array.dtype == NUMPY_DTYPES[dtype]


def test_to_array_of_a_tensor_with_gradient_is_detached():
    tensor = torch.ones(3, requires_grad=True)
    array = to_array(tensor * 1)
    assert array.tolist() == [1, 1, 1]
    assert bridge.address(to_array(tensor)) == tensor.data_ptr()


def test_to_array_refuses_other_devices():
    with pytest.raises(ValueError, match="to_array: tensor must be on the CPU or a CUDA device, "):
        to_array(torch.empty(3, device="meta"))


def test_to_array_refuses_what_is_no_dense_tensor():
    with pytest.raises(TypeError, match="to_array: tensor must be a tensor, got ndarray"):
        to_array(np.ones(3))
    with pytest.raises(ValueError, match=r"to_array: tensor must be dense \(strided\), got"):
        to_array(torch.ones(2, 2).to_sparse())


def test_to_tensor_refuses_what_is_no_array():
    with pytest.raises(TypeError, match="to_tensor: array must be a NumPy or CuPy array, got list"):
        to_tensor([1.0])


# Indices


def test_index_tensor_of_16_bits_is_bytes():
    array = np.array([0, 1, 32767, 32768, 65535], np.uint16)
    tensor = bridge.index_to_tensor(array)
    assert (tensor.dtype, tuple(tensor.shape)) == (torch.uint8, (10,))
    assert tensor.data_ptr() == bridge.address(array)
    back = bridge.index_to_array(tensor)
    assert back.dtype == np.uint16
    assert bridge.address(back) == bridge.address(array)
    assert back.tolist() == array.tolist()
    assert (bridge.index_name(tensor), bridge.index_length(tensor)) == ("uint16", 5)
    unpacked = bridge.unpack_indices(tensor)
    assert (unpacked.dtype, unpacked.tolist()) == (torch.int32, array.tolist())


def test_index_tensor_of_32_bits_is_itself():
    array = np.array([0, 65536, 2**31 - 1], np.int32)
    tensor = bridge.index_to_tensor(array)
    assert (tensor.dtype, tensor.data_ptr()) == (torch.int32, bridge.address(array))
    assert bridge.address(bridge.index_to_array(tensor)) == bridge.address(array)
    assert (bridge.index_name(tensor), bridge.index_length(tensor)) == ("int32", 3)
    assert bridge.unpack_indices(tensor) is tensor


# Topologies


def test_structure_shares_the_topology_arrays(topology):
    structure = structure_of(topology, transposed=True)
    view = topology.transposed
    pairs = zip(structure[:5], (topology.row_offsets, topology.columns, *view), strict=True)
    for tensor, array in pairs:
        assert tensor.data_ptr() == bridge.address(array)
        assert bridge.index_to_array(tensor).tolist() == array.tolist()


def test_structure_is_made_once_per_version(topology):
    first = structure_of(topology, transposed=False)
    assert first[2:5] == (None, None, None)
    assert structure_of(topology, transposed=False).row_offsets is first.row_offsets
    whole = structure_of(topology, transposed=True)
    assert whole.columns is first.columns
    again = structure_of(topology, transposed=False)
    assert all(a is b for a, b in zip(again, whole, strict=True))


def test_structure_follows_an_update(topology):
    old = structure_of(topology, transposed=True)
    other = random.random_topology((9, 14), density=0.3, seed=3)
    topology.update(other.row_offsets, other.columns)
    new = structure_of(topology, transposed=True)
    assert new.columns is not old.columns
    assert new.columns.data_ptr() == old.columns.data_ptr()  # nnz is the same: in place
    assert bridge.index_to_array(new.columns).tolist() == other.columns.tolist()
    assert new.permutation.tolist() == other.transposed.permutation.tolist()


def test_structure_follows_an_update_of_another_nnz(topology):
    old = structure_of(topology, transposed=True)
    other = random.random_topology((9, 14), density=0.5, seed=3)
    topology.update(other.row_offsets, other.columns)
    new = structure_of(topology, transposed=True)
    assert bridge.index_length(new.columns) == other.nnz != bridge.index_length(old.columns)
    assert new.rows.tolist() == bridge.index_to_tensor(other.transposed.rows).tolist()


def test_structure_does_not_keep_a_topology_alive(topology):
    structure_of(topology, transposed=True)
    copy = topology.copy()
    structure_of(copy, transposed=True)
    reference = weakref.ref(copy)
    del copy
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("features", [12, 70_000], ids=["16_bits", "32_bits"])
def test_layer_topology_is_made_of_its_buffers(features):
    layer = seeded_layer(features, 7, sparsity=0.99 if features > 100 else 0.5)
    topology = layer.topology
    assert isinstance(topology, Topology)
    assert topology is layer.topology
    assert bridge.address(topology.row_offsets) == layer.row_offsets.data_ptr()
    assert bridge.address(topology.columns) == layer.packed_columns.data_ptr()
    layer(torch.ones(1, features, requires_grad=True))  # builds the column-major view
    view = layer.topology.transposed
    for array, name in zip(view, ("col_offsets", "packed_rows", "permutation"), strict=True):
        assert bridge.address(array) == getattr(layer, name).data_ptr()


def test_array_scope_does_nothing_on_the_cpu():
    with bridge.array_scope(torch.device("cpu")):
        assert torch.ones(1).device.type == "cpu"
