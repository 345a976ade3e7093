"""Problems, oracles and checks of the tests of dynamic sparse training."""

import math

import numpy as np
from helpers import to_numpy
from hypothesis import strategies as st

from snack_cupy.dst import Remap
from snack_cupy.topology import Topology


def remap_of(xp, new_to_old, nnz_old):
    return Remap(xp.asarray(new_to_old, np.int32), nnz_old)


def dense(topology, entries, fill):
    """Dense matrix of one number per connection (NumPy)."""
    matrix = np.full(topology.shape, fill, to_numpy(entries).dtype)
    matrix[to_numpy(topology.row), to_numpy(topology.col)] = to_numpy(entries)
    return matrix


def changed(topology, change):
    """Topology after a change, whose arrays must be canonical and of the stored dtypes."""
    row_offsets, columns, remap = change
    result = Topology(row_offsets, columns, topology.shape)
    assert row_offsets.dtype == np.int32
    assert columns.dtype == topology.columns.dtype
    assert remap.new_to_old.dtype == np.int32
    assert (remap.nnz_old, remap.nnz_new) == (topology.nnz, result.nnz)
    Remap(remap.new_to_old, remap.nnz_old)  # its check: in range, nothing twice
    return result


def assert_survivors_are_where_they_were(topology, result, remap):
    """Each survivor of the remap is the connection at its (row, col) before."""
    new_to_old = to_numpy(remap.new_to_old)
    kept = new_to_old >= 0
    old = to_numpy(topology.positions)[new_to_old[kept]]
    assert np.array_equal(to_numpy(result.positions)[kept], old)


@st.composite
def problems(draw):
    """Shape, mask and weights with ties, zeros of both signs and non-finite ones."""
    m, k = draw(st.integers(0, 7)), draw(st.integers(0, 7))
    bits = draw(st.lists(st.booleans(), min_size=m * k, max_size=m * k))
    mask = np.array(bits, bool).reshape(m, k)
    weights = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 1e-45, -3.0, math.inf, math.nan])
    nnz = int(mask.sum())
    values = np.array(draw(st.lists(weights, min_size=nnz, max_size=nnz)), np.float32)
    return mask, values


def by_magnitude(values):
    """Indices from the one dropped first: by |value|, NaN last, then by index."""

    def rank(i):
        value = abs(float(values[i]))
        return (math.isnan(value), 0.0 if math.isnan(value) else value, i)

    return sorted(range(len(values)), key=rank)
