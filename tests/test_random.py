"""Keys, random topologies and random tensors; statistics run over fixed seeds."""

import math
import tracemalloc

import numpy as np
import pytest
from helpers import DTYPES, assert_coo, to_numpy
from hypothesis import given
from hypothesis import strategies as st
from random_helpers import assert_uniform, image, splitmix
from scipy import stats

from snack_cupy import random
from snack_cupy.topology import Topology


@pytest.fixture(scope="module")
def xp():
    """The array module under test; the GPU tests run this file with CuPy."""
    return np


# Keys


def test_key_vectors():
    assert random.key(0) == 0x098208390ACCEB8A
    assert random.key(-1, "layers.0", 10**20) == 0x64B7A75F5733DD95
    assert random.subkey(1, 0) == splitmix(1, 0)
    assert random.subkey(2**64 - 1, 7) == splitmix(2**64 - 1, 7)


def test_key_tells_every_argument_apart():
    triples = [
        (seed, name, step)
        for seed in (0, 1, 10, -1)
        for name in ("", "0", "1", "0 1", "fc1", "\u00e9")
        for step in (0, 1, 10)
    ]
    assert len({random.key(*triple) for triple in triples}) == len(triples)


def test_key_takes_numpy_integers():
    assert random.key(np.int32(5), "x", np.uint8(3)) == random.key(5, "x", 3)


@pytest.mark.parametrize("arguments", [(0.5,), (True,), (0, b"x"), (0, "", 1.0), ("0",)])
def test_key_refuses(arguments):
    with pytest.raises(TypeError, match=r"^key: (seed|name|step) must be "):
        random.key(*arguments)


# Topologies


def assert_canonical(topology):
    """The public constructor accepts the arrays as they are."""
    again = Topology(topology.row_offsets, topology.columns, topology.shape)
    assert again.equals(topology)
    assert topology.columns.dtype == again.columns.dtype
    assert topology.row_offsets.dtype == np.int32


def dense(topology):
    mask = np.zeros(topology.shape, bool)
    mask[to_numpy(topology.row), to_numpy(topology.col)] = True
    return mask


@given(m=st.integers(0, 12), k=st.integers(0, 12), data=st.data())
def test_random_topology_is_the_sorted_ranks(xp, m, k, data):
    nnz = data.draw(st.integers(0, m * k))
    topology = random.random_topology((m, k), nnz=nnz, seed=4, name="layer", xp=xp)
    assert_canonical(topology)
    want = sorted(image(random.key(4, "layer"), rank, m * k) for rank in range(nnz))
    assert to_numpy(topology.positions).tolist() == want


@given(m=st.integers(1, 12), k=st.integers(0, 12), data=st.data())
def test_random_topology_balanced(xp, m, k, data):
    nnz = data.draw(st.integers(0, m * k))
    topology = random.random_topology((m, k), nnz=nnz, distribution="balanced", xp=xp)
    assert_canonical(topology)
    assert topology.nnz == nnz
    fan_in = to_numpy(topology.fan_in)
    assert fan_in.max() - fan_in.min() == (1 if nnz % m else 0)


@pytest.mark.parametrize(
    ("size", "nnz"),
    [
        ({"sparsity": 0.9}, 24),
        ({"sparsity": 0.0}, 240),
        ({"density": 0.1}, 24),
        ({"density": 0}, 0),
        ({"density": 1}, 240),
        ({"nnz": 7}, 7),
        ({"fan_in": 3}, 36),
        ({"fan_in": 0}, 0),
        ({"fan_in": 20}, 240),
    ],
    ids=str,
)
def test_random_topology_size(xp, size, nnz):
    topology = random.random_topology((12, 20), xp=xp, **size)
    assert_canonical(topology)
    assert topology.nnz == nnz
    if "fan_in" in size:
        assert (to_numpy(topology.fan_in) == size["fan_in"]).all()


@pytest.mark.parametrize(("k", "nnz"), [(1, 0), (3, 2), (5, 2), (7, 4)])
def test_random_topology_rounds_halves_to_even(k, nnz):
    assert random.random_topology((1, k), sparsity=0.5).nnz == nnz
    assert random.random_topology((1, k), density=0.5).nnz == nnz


def test_random_topology_vectors(xp):
    topology = random.random_topology((3, 10), fan_in=3, seed=1, xp=xp)
    assert to_numpy(topology.columns).tolist() == [2, 4, 7, 0, 4, 9, 0, 4, 6]
    topology = random.random_topology((4, 10), nnz=10, distribution="balanced", seed=1, xp=xp)
    assert to_numpy(topology.row).tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3]
    assert to_numpy(topology.columns).tolist() == [2, 4, 7, 4, 9, 0, 4, 6, 0, 7]


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0)])
@pytest.mark.parametrize("size", [{"sparsity": 0.5}, {"density": 1.0}, {"nnz": 0}, {"fan_in": 0}])
@pytest.mark.parametrize("distribution", random.DISTRIBUTIONS)
def test_random_topology_without_elements(xp, shape, size, distribution):
    topology = random.random_topology(shape, distribution=distribution, xp=xp, **size)
    assert_canonical(topology)
    assert topology.shape == shape
    assert topology.nnz == 0


def test_random_topology_depends_on_seed_and_name(xp):
    make = [{"seed": 0}, {"seed": 1}, {"name": "a"}, {"seed": 1, "name": "a"}]
    made = [random.random_topology((20, 20), nnz=100, xp=xp, **how) for how in make]
    again = [random.random_topology((20, 20), nnz=100, xp=xp, **how) for how in make]
    for i, topology in enumerate(made):
        assert [topology.equals(other) for other in again] == [i == j for j in range(len(made))]


def test_random_topology_every_position_is_equally_likely(xp):
    draws, shape, nnz = 600, (6, 11), 20
    counts = sum(
        dense(random.random_topology(shape, nnz=nnz, seed=seed, xp=xp)).astype(int)
        for seed in range(draws)
    )
    cells = shape[0] * shape[1]
    assert_uniform(counts, variance_factor=(1 - nnz / cells) * cells / (cells - 1))


def test_random_topology_constant_fan_in_is_uniform_and_rows_differ(xp):
    m, k, fan_in = 6000, 12, 3
    topology = random.random_topology((m, k), fan_in=fan_in, seed=2, xp=xp)
    columns = to_numpy(topology.columns).reshape(m, fan_in).astype(np.int64)
    _, counts = np.unique(columns @ np.array([k * k, k, 1]), return_counts=True)
    assert counts.size == math.comb(k, fan_in)
    assert_uniform(counts)
    # Consecutive rows: how many columns they share is hypergeometric.
    shared = [len(set(x) & set(y)) for x, y in zip(columns[::2], columns[1::2], strict=True)]
    want = stats.hypergeom(k, fan_in, fan_in).pmf(range(fan_in + 1)) * (m // 2)
    statistic = ((np.bincount(shared, minlength=fan_in + 1) - want) ** 2 / want).sum()
    assert stats.chi2.sf(statistic, fan_in) > 1e-3


def test_random_topology_of_a_huge_shape_stays_small():
    tracemalloc.start()
    try:
        topology = random.random_topology((2**10, 2**31 - 1), nnz=5000)
        balanced = random.random_topology((2**10, 2**31 - 1), fan_in=5)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert_canonical(topology)
    assert_canonical(balanced)
    assert peak < 2 * 2**20


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {},
            ValueError,
            "exactly one of sparsity, density, nnz and fan_in must be given, got none",
        ),
        ({"nnz": 1, "density": 0.1}, ValueError, "got ['density', 'nnz']"),
        ({"sparsity": 1.0}, ValueError, "sparsity must be in [0, 1), got 1.0"),
        ({"sparsity": -0.1}, ValueError, "sparsity must be in [0, 1), got -0.1"),
        ({"sparsity": math.nan}, ValueError, "sparsity must be in [0, 1), got nan"),
        ({"density": math.inf}, ValueError, "density must be in [0, 1], got inf"),
        ({"density": "0.5"}, TypeError, "density must be a number in [0, 1], got '0.5'"),
        ({"nnz": 13}, ValueError, "nnz must be between 0 and 12, got 13"),
        ({"nnz": 1.0}, TypeError, "nnz must be an integer, got 1.0"),
        ({"fan_in": 5}, ValueError, "fan_in must be between 0 and 4, got 5"),
        ({"nnz": 1, "distribution": "erk"}, ValueError, "distribution must be one of"),
        ({"nnz": 1, "seed": 0.5}, TypeError, "key: seed must be an integer, got 0.5"),
    ],
    ids=str,
)
def test_random_topology_refuses(arguments, error, message):
    with pytest.raises(error) as caught:
        random.random_topology((3, 4), **arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize("shape", [(1, 2**31), (2**31, 1), (1, 2**40)])
def test_random_topology_refuses_sizes_beyond_32_bits(shape):
    with pytest.raises(ValueError, match="random_topology: shape must have no entry above 21474"):
        random.random_topology(shape, nnz=1)


def test_random_topology_refuses_more_than_32_bit_entries():
    with pytest.raises(ValueError, match="random_topology: nnz must be at most 2147483647"):
        random.random_topology((2**17, 2**17), sparsity=0.5)


# Tensors


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name != "bfloat16"])
@pytest.mark.parametrize("shape", [(7,), (6, 11), (3, 4, 5), (2, 1, 3, 2), (4, 0, 2), (2**31, 3)])
def test_random_tensor(xp, shape, dtype):
    check_random_tensor(xp, shape, dtype)


def test_random_tensor_of_bfloat16():  # which CuPy does not have
    check_random_tensor(np, (6, 11), "bfloat16")


def check_random_tensor(xp, shape, dtype):
    size = math.prod(shape)
    density = 0.4 if size < 1000 else 50 / size
    tensor = random.random(shape, density, DTYPES[dtype], seed=3, xp=xp)
    assert tensor.nnz == round(density * size)
    assert tensor.is_canonical
    assert tensor.dtype == DTYPES[dtype]
    data = to_numpy(tensor.data).astype(np.float64)
    assert ((data > 0) & (data <= 1)).all()
    if size < 1000:
        dense = np.zeros(shape, DTYPES[dtype])
        dense[tuple(to_numpy(tensor.coords))] = to_numpy(tensor.data)
        assert_coo(tensor, dense)


def test_random_tensor_is_the_sorted_ranks(xp):
    tensor = random.random((3, 4, 5), 0.3, np.float64, seed=9, xp=xp)
    key = random.key(9)
    places = sorted(image(splitmix(key, 1), rank, 60) for rank in range(18))
    assert to_numpy(tensor.coords).T.tolist() == [[p // 20, p // 5 % 4, p % 5] for p in places]
    words = [splitmix(splitmix(key, 0), i) >> 11 for i in range(18)]
    assert to_numpy(tensor.data).tolist() == [1 - word / 2**53 for word in words]


def test_random_tensor_refuses():
    for arguments, error, message in [
        (((),), ValueError, "random: shape must have at least 1 entry"),
        (((3, -1),), ValueError, "random: shape must have no negative entry"),
        (((2**31, 2**32),), ValueError, "random: shape must have a product of at most"),
        (((3, 3), 1.5), ValueError, r"random: density must be in \[0, 1\], got 1.5"),
        (((2**20, 2**20), 0.5), ValueError, "random: nnz must be at most 2147483647"),
        (((3, 3), 0.5, np.int32), TypeError, "dtype must be one of"),
        (((3, 3), 0.5, np.float32, "x"), TypeError, "key: seed must be an integer"),
    ]:
        with pytest.raises(error, match=message):
            random.random(*arguments)


def test_erdos_renyi_density():
    assert random.erdos_renyi_density((1000, 500), 20) == pytest.approx(0.06)
    assert random.erdos_renyi_density((3, 4), 20) == 1.0
    assert random.erdos_renyi_density((0, 4), 20) == 0.0
    for epsilon in (-1, math.nan, math.inf):
        with pytest.raises(ValueError, match="erdos_renyi_density: epsilon must be finite"):
            random.erdos_renyi_density((3, 4), epsilon)
    for epsilon in ("20", None, True):
        with pytest.raises(TypeError, match="erdos_renyi_density: epsilon must be a number, got"):
            random.erdos_renyi_density((3, 4), epsilon)
