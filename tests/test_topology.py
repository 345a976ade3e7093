"""`Topology`: construction, derived arrays, updates in place and the checks of its input."""

import copy
import pickle

import numpy as np
import pytest
from helpers import PROBLEMS, make_topology, problem_ids
from hypothesis import given
from hypothesis import strategies as st

from snack_cupy import CudaUnavailableError, Topology, _jit
from snack_cupy._structure import NARROW_LIMIT

each_problem = pytest.mark.parametrize("p", PROBLEMS, ids=problem_ids(PROBLEMS))


@pytest.fixture
def small():
    """[[. x x .], [. . . .], [x . . x]]"""
    return Topology(np.array([0, 2, 2, 4]), np.array([1, 2, 0, 3]), (3, 4))


def mask_of(topology):
    mask = np.zeros(topology.shape, bool)
    mask[topology.row, topology.col] = True
    return mask


# Construction


def test_topology_derived_arrays_of_a_small_matrix(small):
    assert (small.m, small.k, small.nnz) == (3, 4, 4)
    assert small.density == 4 / 12
    assert small.sparsity == 1 - 4 / 12
    assert small.device == "cpu"
    assert small.xp is np
    assert small.row.tolist() == [0, 0, 2, 2]
    assert small.col.tolist() == [1, 2, 0, 3]
    assert small.positions.tolist() == [1, 2, 8, 11]
    assert small.fan_in.tolist() == [2, 0, 2]
    assert small.packed_rows.tolist() == [0, 0, 2, 2]
    view = small.transposed
    assert view.col_offsets.tolist() == [0, 1, 2, 3, 4]
    assert view.rows.tolist() == [2, 0, 0, 2]
    assert view.permutation.tolist() == [2, 0, 1, 3]
    assert repr(small) == "Topology(shape=(3, 4), nnz=4, density=0.3333, device='cpu')"


@each_problem
def test_topology_agrees_with_its_mask(p):
    topology = make_topology(p)
    mask = mask_of(topology)
    assert topology.nnz == p.nnz == mask.sum()
    row, col = np.nonzero(mask)
    np.testing.assert_array_equal(topology.row, row)
    np.testing.assert_array_equal(topology.col, col)
    np.testing.assert_array_equal(topology.positions, np.flatnonzero(mask))
    np.testing.assert_array_equal(topology.fan_in, mask.sum(axis=1))
    np.testing.assert_array_equal(topology.packed_rows, row)
    col_by_column, row_by_column = np.nonzero(mask.T)
    view = topology.transposed
    np.testing.assert_array_equal(view.rows, row_by_column)
    np.testing.assert_array_equal(topology.col[view.permutation], col_by_column)
    np.testing.assert_array_equal(np.diff(view.col_offsets), mask.sum(axis=0))
    assert topology.equals(Topology.from_mask(mask))


@each_problem
def test_topology_stores_narrow_indices(p):
    topology = make_topology(p)
    assert topology.row_offsets.dtype == np.int32
    assert topology.columns.dtype == (np.uint16 if p.k <= NARROW_LIMIT else np.int32)
    assert topology.packed_rows.dtype == (np.uint16 if p.m <= NARROW_LIMIT else np.int32)
    view = topology.transposed
    assert view.col_offsets.dtype == view.permutation.dtype == np.int32
    assert view.rows.dtype == topology.packed_rows.dtype
    assert topology.row.dtype == topology.col.dtype == topology.fan_in.dtype == np.int32
    assert topology.positions.dtype == np.int64


@pytest.mark.parametrize(("k", "dtype"), [(65536, np.uint16), (65537, np.int32)])
def test_topology_index_width_at_the_limit(k, dtype):
    last = np.array([k - 1])
    topology = Topology.from_coords(np.array([0]), last, (1, k))
    assert topology.columns.dtype == dtype
    assert topology.col.tolist() == [k - 1]
    assert Topology.from_coords(last, np.array([0]), (k, 1)).transposed.rows.dtype == dtype


@given(data=st.data())
def test_topology_from_coords_in_any_order(data):
    m, k = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    cells = data.draw(st.lists(st.integers(0, m * k - 1), unique=True))
    order = np.array(data.draw(st.permutations(cells)), dtype=np.int64)
    topology = Topology.from_coords(order // k, order % k, (m, k))
    assert topology.positions.tolist() == sorted(cells)
    again = Topology(topology.row_offsets, topology.columns, (m, k))
    assert again.equals(topology)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "int32", "int64", "uint64"])
def test_topology_takes_every_integer_dtype(dtype):
    row, col = np.array([2, 0, 1], dtype), np.array([0, 3, 1], dtype)
    topology = Topology.from_coords(row, col, (3, 4))
    assert topology.positions.tolist() == [3, 5, 8]
    again = Topology(topology.row_offsets.astype(dtype), topology.columns.astype(dtype), (3, 4))
    assert again.equals(topology)


def test_topology_positions_beyond_32_bits():
    k = 2**31 - 1
    wide = Topology.from_coords(np.array([2, 0]), np.array([0, k - 1]), (3, k))
    assert wide.positions.tolist() == [k - 1, 2 * k]
    assert wide.col.tolist() == [k - 1, 0]


def test_topology_from_mask_takes_any_dtype():
    mask = np.array([[0.0, -1.5], [np.nan, 0.0]])
    assert Topology.from_mask(mask).positions.tolist() == [1, 2]


def test_topology_from_mask_of_a_view():
    mask = np.arange(12).reshape(3, 4) % 3 == 0
    assert Topology.from_mask(mask.T).equals(Topology.from_mask(mask.T.copy()))


def test_topology_does_not_share_the_given_arrays():
    offsets, columns = np.array([0, 1], np.int32), np.array([1], np.uint16)
    topology = Topology(offsets, columns, (1, 3))
    offsets[...], columns[...] = 7, 7
    assert (topology.row_offsets.tolist(), topology.columns.tolist()) == ([0, 1], [1])


def test_topology_from_parts_shares_the_given_arrays():
    offsets, columns = np.array([0, 1], np.int32), np.array([1], np.uint16)
    topology = Topology._from_parts(offsets, columns, (1, 3))
    assert topology.row_offsets is offsets
    assert topology.columns is columns


def test_topology_nbytes_counts_what_is_derived(small):
    assert small.nbytes == 4 * 4 + 2 * 4
    _ = small.transposed
    assert small.nbytes == 24 + 4 * 5 + 2 * 4 + 4 * 4
    _ = small.packed_rows
    assert small.nbytes == 24 + 44 + 2 * 4


# Updates and copies


def test_topology_update_with_equal_nnz_writes_in_place(small):
    view, packed = small.transposed, small.packed_rows
    held = (small.row_offsets, small.columns, *view, packed)
    target = Topology.from_coords(np.array([1, 1, 1, 2]), np.array([0, 1, 3, 2]), small.shape)
    small.update(target.row_offsets, target.columns)
    assert small.version == 1
    now = (small.row_offsets, small.columns, *small.transposed, small.packed_rows)
    assert all(a is b for a, b in zip(held, now, strict=True))
    wanted = (target.row_offsets, target.columns, *target.transposed, target.packed_rows)
    for got, want in zip(now, wanted, strict=True):
        np.testing.assert_array_equal(got, want)
        assert got.dtype == want.dtype


def test_topology_update_with_another_nnz_replaces(small):
    held = small.columns
    _ = small.transposed, small.packed_rows
    target = Topology.from_coords(np.array([1]), np.array([2]), small.shape)
    small.update(target.row_offsets, target.columns.astype(np.int64))
    assert small.version == 1
    assert small.columns is not held
    assert small.columns.dtype == np.uint16
    assert small.equals(target)
    np.testing.assert_array_equal(small.transposed.rows, target.transposed.rows)
    np.testing.assert_array_equal(small.packed_rows, [1])
    small.update(target.row_offsets, target.columns)
    assert small.version == 2


@pytest.mark.parametrize("nnz", [4, 3], ids=["equal_nnz", "another_nnz"])
def test_topology_update_shares_nothing_with_its_input(small, nnz):
    offsets, columns = np.array([0, nnz, nnz, nnz], np.int32), np.arange(nnz, dtype=np.uint16)
    small.update(offsets, columns)
    offsets[...], columns[...] = 9, 9
    assert small.row_offsets.tolist() == [0, nnz, nnz, nnz]
    assert small.columns.tolist() == list(range(nnz))


def test_topology_refresh_follows_arrays_written_from_outside(small):
    view, packed = small.transposed, small.packed_rows
    small.row_offsets[...] = [0, 0, 1, 4]
    small.columns[...] = [3, 0, 1, 2]
    small.refresh()
    assert small.version == 1
    assert small.transposed is view
    assert view.rows.tolist() == [2, 2, 2, 1]
    assert view.permutation.tolist() == [1, 2, 3, 0]
    assert packed.tolist() == [1, 2, 2, 2]


@pytest.mark.parametrize(
    "clone",
    [Topology.copy, copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_topology_copies_share_nothing(small, clone):
    _ = small.transposed
    other = clone(small)
    assert other.equals(small)
    other.update(np.array([0, 4, 4, 4]), np.arange(4))
    assert small.positions.tolist() == [1, 2, 8, 11]
    assert small.transposed.rows.tolist() == [2, 0, 0, 2]
    assert not other.equals(small)


def test_topology_equals_compares_shape_and_entries(small):
    assert small.equals(small.copy())
    assert not small.equals(Topology(small.row_offsets, small.columns, (3, 5)))
    assert not small.equals(Topology(small.row_offsets, np.array([1, 3, 0, 3]), (3, 4)))
    assert not small.equals(Topology(np.array([0, 1, 2, 4]), small.columns, (3, 4)))
    assert not small.equals(Topology(np.array([0, 0, 0, 0]), small.columns[:0], (3, 4)))


def test_topology_to_device_is_itself_where_it_is(small):
    assert small.to_device("cpu") is small


# Errors


@pytest.mark.parametrize(
    "device", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:²", "cpu:0", "", 0, None]
)
def test_topology_to_device_names_the_allowed_forms(small, device):
    message = f"to_device: device must be 'cpu', 'cuda' or 'cuda:<index>', got {device!r}"
    with pytest.raises(ValueError, match=message):
        small.to_device(device)


def test_topology_to_device_without_a_gpu(small, monkeypatch):
    def missing():
        raise CudaUnavailableError("snack_cupy: CuPy is missing")

    monkeypatch.setattr(_jit, "require_cupy", missing)
    with pytest.raises(CudaUnavailableError, match="CuPy is missing"):
        small.to_device("cuda")


BAD_PARTS = {
    "offsets_are_a_list": (
        ([0, 1], np.array([0]), (1, 2)),
        TypeError,
        "Topology: row_offsets must be a NumPy or CuPy array, got list",
    ),
    "columns_are_floats": (
        (np.array([0, 1]), np.array([0.0]), (1, 2)),
        TypeError,
        "Topology: columns must have an integer dtype, got float64",
    ),
    "columns_are_booleans": (
        (np.array([0, 1]), np.array([True]), (1, 2)),
        TypeError,
        "Topology: columns must have an integer dtype, got bool",
    ),
    "columns_are_2d": (
        (np.array([0, 1]), np.array([[0]]), (1, 2)),
        ValueError,
        "Topology: columns must have 1 dimension, got 2",
    ),
    "offsets_too_short": (
        (np.array([0]), np.array([0]), (1, 2)),
        ValueError,
        r"Topology: row_offsets must have shape \(2,\), got \(1,\)",
    ),
    "offsets_start_late": (
        (np.array([1, 2]), np.array([0, 1]), (1, 2)),
        ValueError,
        r"Topology: row_offsets must run from 0 to nnz \(2\), got \(1, 2\)",
    ),
    "offsets_end_early": (
        (np.array([0, 1]), np.array([0, 1]), (1, 2)),
        ValueError,
        r"Topology: row_offsets must run from 0 to nnz \(2\), got \(0, 1\)",
    ),
    "offsets_decrease": (
        (np.array([0, 2, 1, 2]), np.array([0, 1]), (3, 2)),
        ValueError,
        "Topology: row_offsets must not decrease, got an entry below its predecessor",
    ),
    "column_too_large": (
        (np.array([0, 1]), np.array([2]), (1, 2)),
        IndexError,
        r"Topology: columns must hold indices in \[0, 2\), got 2",
    ),
    "column_negative": (
        (np.array([0, 1]), np.array([-1]), (1, 2)),
        IndexError,
        r"Topology: columns must hold indices in \[0, 2\), got -1",
    ),
    "columns_unsorted": (
        (np.array([0, 2]), np.array([1, 0]), (1, 2)),
        ValueError,
        "Topology: columns must strictly increase within each row, got an entry out of order",
    ),
    "columns_repeat": (
        (np.array([0, 2]), np.array([1, 1]), (1, 2)),
        ValueError,
        "Topology: columns must strictly increase within each row, got an entry out of order",
    ),
    "shape_of_3": (
        (np.array([0]), np.array([], np.int32), (0, 0, 0)),
        ValueError,
        r"Topology: shape must have 2 entries, got \(0, 0, 0\)",
    ),
    "shape_is_a_number": (
        (np.array([0]), np.array([], np.int32), 3),
        TypeError,
        "Topology: shape must be a tuple of integers, got 3",
    ),
    "shape_of_floats": (
        (np.array([0]), np.array([], np.int32), (0.0, 1)),
        TypeError,
        r"Topology: shape must be a tuple of integers, got \(0.0, 1\)",
    ),
    "shape_negative": (
        (np.array([0]), np.array([], np.int32), (0, -1)),
        ValueError,
        r"Topology: shape must have no negative entry, got \(0, -1\)",
    ),
    "shape_beyond_32_bits": (
        (np.array([0]), np.array([], np.int32), (0, 2**31)),
        ValueError,
        r"Topology: shape must have no entry above 2147483647 \(indices are 32-bit\), got",
    ),
}


@pytest.mark.parametrize(("parts", "error", "message"), BAD_PARTS.values(), ids=BAD_PARTS)
def test_topology_rejects(parts, error, message):
    with pytest.raises(error, match=message):
        Topology(*parts)


BAD_COORDS = {
    "lists": (
        ([0], np.array([0])),
        TypeError,
        "Topology.from_coords: row must be a NumPy or CuPy array, got list",
    ),
    "floats": (
        (np.array([0]), np.array([0.5])),
        TypeError,
        "Topology.from_coords: col must have an integer dtype, got float64",
    ),
    "unequal_lengths": (
        (np.array([0, 1]), np.array([0])),
        ValueError,
        r"Topology.from_coords: row and col must have the same length, got \(2, 1\)",
    ),
    "row_too_large": (
        (np.array([0, 3]), np.array([0, 0])),
        IndexError,
        r"Topology.from_coords: row must hold indices in \[0, 3\), got 3",
    ),
    "row_negative": (
        (np.array([0, -4]), np.array([0, 0])),
        IndexError,
        r"Topology.from_coords: row must hold indices in \[0, 3\), got -4",
    ),
    "col_too_large": (
        (np.array([0, 1]), np.array([0, 9])),
        IndexError,
        r"Topology.from_coords: col must hold indices in \[0, 4\), got 9",
    ),
    "col_negative": (
        (np.array([0, 1]), np.array([-1, 3])),
        IndexError,
        r"Topology.from_coords: col must hold indices in \[0, 4\), got -1",
    ),
    "duplicates": (
        (np.array([0, 1, 0]), np.array([2, 1, 2])),
        ValueError,
        "Topology.from_coords: row and col must hold no duplicate coordinates",
    ),
}


@pytest.mark.parametrize(("coords", "error", "message"), BAD_COORDS.values(), ids=BAD_COORDS)
def test_topology_from_coords_rejects(coords, error, message):
    with pytest.raises(error, match=message):
        Topology.from_coords(*coords, (3, 4))


def test_topology_from_coords_of_nothing_fits_any_shape():
    nothing = np.array([], np.int64)
    for shape in ((0, 0), (0, 5), (5, 0), (3, 4)):
        topology = Topology.from_coords(nothing, nothing, shape)
        assert (topology.shape, topology.nnz, topology.density) == (shape, 0, 0.0)
        assert topology.transposed.col_offsets.tolist() == [0] * (shape[1] + 1)


def test_topology_from_coords_into_a_zero_size_dimension():
    with pytest.raises(IndexError, match=r"col must hold indices in \[0, 0\), got 0"):
        Topology.from_coords(np.array([0]), np.array([0]), (3, 0))


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        ([[1, 0]], TypeError, "Topology.from_mask: mask must be a NumPy or CuPy array, got list"),
        (np.ones(3), ValueError, "Topology.from_mask: mask must have 2 dimensions, got 1"),
    ],
    ids=["list", "1d"],
)
def test_topology_from_mask_rejects(mask, error, message):
    with pytest.raises(error, match=message):
        Topology.from_mask(mask)


def test_topology_update_rejects_and_changes_nothing(small):
    columns = small.columns.copy()
    cases = [
        ((np.array([0, 4]), columns), ValueError, r"row_offsets must have shape \(4,\), got"),
        ((small.row_offsets, columns * 1.0), TypeError, "columns must have an integer dtype"),
        (([0, 2, 2, 4], columns), TypeError, "row_offsets must be a NumPy or CuPy array"),
    ]
    for parts, error, message in cases:
        with pytest.raises(error, match=f"Topology.update: {message}"):
            small.update(*parts)
    assert small.version == 0
    assert small.positions.tolist() == [1, 2, 8, 11]


def test_topology_rejects_2_to_the_31_entries():
    # A broadcast array claims the entries without holding them.
    columns = np.broadcast_to(np.zeros(1, np.uint16), (2**31,))
    with pytest.raises(ValueError, match=r"nnz must be at most 2147483647 .*got 2147483648"):
        Topology(np.array([0, 2**31]), columns, (1, 2), check=False)
