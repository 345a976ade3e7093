"""Counter-based words, uniform numbers and permutations.

The fixed vectors pin the bits: whatever computes these functions on a GPU has to give the same.
Statistics run over fixed keys, so they either always pass or always fail.
"""

import math

import numpy as np
import pytest
from helpers import DTYPES, to_numpy
from hypothesis import given
from hypothesis import strategies as st
from random_helpers import WORD, assert_uniform, image, splitmix

from snack_cupy import _counters, random


@pytest.fixture(scope="module")
def xp():
    """The array module under test; the GPU tests run this file with CuPy."""
    return np


def test_hash_counters_is_splitmix64(xp):
    # The published first outputs of SplitMix64 from the state 1234567.
    words = _counters.hash_counters(1234567, xp.arange(5, dtype=np.uint64))
    assert to_numpy(words).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_hash_counters_leaves_its_argument(xp):
    counters = xp.arange(4, dtype=np.uint64)
    _counters.mix64(counters)
    _counters.hash_counters(3, counters)
    assert to_numpy(counters).tolist() == [0, 1, 2, 3]


# Uniform numbers


@pytest.mark.parametrize(
    ("dtype", "bits"), [("float64", 53), ("float32", 24), ("float16", 11), ("bfloat16", 8)]
)
def test_uniform_is_the_top_bits(xp, dtype, bits):
    if dtype == "bfloat16" and xp is not np:
        pytest.skip("CuPy has no bfloat16")
    dtype = DTYPES[dtype]
    for key in (0, 1, 2**64 - 1):
        numbers = random.uniform(key, 100, dtype, xp)
        assert numbers.dtype == dtype
        want = [(splitmix(key, i) >> (64 - bits)) / 2**bits for i in range(100)]
        assert to_numpy(numbers).astype(np.float64).tolist() == want


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_uniform_is_uniform(xp, dtype):
    numbers = to_numpy(random.uniform(random.key(11), 100_000, dtype, xp)).astype(np.float64)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert_uniform(np.histogram(numbers, 64, (0, 1))[0])
    assert_uniform(np.histogram2d(numbers[::2], numbers[1::2], 16, ((0, 1), (0, 1)))[0])


def test_uniform_prefix_and_empty(xp):
    assert random.uniform(3, 0, np.float32, xp).shape == (0,)
    assert (random.uniform(3, 5, xp=xp) == random.uniform(3, 9, xp=xp)[:5]).all()


def test_uniform_refuses():
    with pytest.raises(TypeError, match=r"uniform: dtype must be one of .*, got int32"):
        random.uniform(0, 3, np.int32)
    with pytest.raises(ValueError, match=r"uniform: n must be between 0 and .*, got -1"):
        random.uniform(0, -1)
    with pytest.raises(ValueError, match=r"uniform: key must be between 0 and .*, got -1"):
        random.uniform(-1, 3)


# Distinct ranks

RANK_VECTORS = [
    (0, 1, [0]),
    (1, 2, [0, 1]),
    (2, 3, [1, 2, 0]),
    (3, 10, [1, 6, 8, 4, 2, 9, 3, 7, 5, 0]),
    (0x0123456789ABCDEF, 65535, [37635, 42255, 34602, 6037, 42398, 54226]),
    (0x0123456789ABCDEF, 65536, [54807, 42569, 61190, 27694, 9986, 56955]),
    (42, 15_099_494, [1584677, 10592454, 56966, 13731371, 9454286, 8885966, 6473017]),
    (2**64 - 1, 2**40, [314861528552, 416295782441, 849728614333, 1011722307749]),
    (7, 2**62, [1168685835687623455, 4503633777937171710, 948292031845539678]),
]


@pytest.mark.parametrize(("key", "domain", "ranks"), RANK_VECTORS)
def test_permuted_ranks_vectors(xp, key, domain, ranks):
    got = random.permuted_ranks(key, len(ranks), domain, xp)
    assert got.dtype == np.int64
    assert to_numpy(got).tolist() == ranks


@given(
    key=st.integers(0, WORD - 1),
    domain=st.one_of(st.integers(1, 70), st.integers(1, 2**20), st.integers(1, 2**62)),
)
def test_permuted_ranks_is_the_feistel_walk(xp, key, domain):
    n = min(domain, 20)
    want = [image(key, rank, domain) for rank in range(n)]
    assert to_numpy(random.permuted_ranks(key, n, domain, xp)).tolist() == want


SMALL_DOMAINS = sorted(
    {*range(71), *(2**p + d for p in range(6, 17) for d in (-1, 0, 1)), 99_856, 99_857, 100_000}
)


@pytest.mark.parametrize("key", [0, 0xDEADBEEF])
def test_permuted_ranks_is_a_permutation(xp, key):
    for domain in SMALL_DOMAINS:
        ranks = to_numpy(random.permuted_ranks(key, domain, domain, xp))
        assert np.array_equal(np.sort(ranks), np.arange(domain)), domain


@pytest.mark.parametrize("domain", [2**32 - 1, 2**32 + 1, 2**40, 3**30, 2**62 - 1, 2**62])
def test_permuted_ranks_of_a_large_domain(xp, domain):
    ranks = to_numpy(random.permuted_ranks(1, 10_000, domain, xp))
    assert ranks.min() >= 0
    assert ranks.max() < domain
    assert len(set(ranks.tolist())) == 10_000
    assert_uniform(np.histogram(ranks / domain, 50, (0, 1))[0])


def test_permuted_ranks_of_n_is_a_prefix(xp):
    whole = random.permuted_ranks(9, 1000, 1000, xp)
    for n in (0, 1, 2, 500, 999):
        assert (random.permuted_ranks(9, n, 1000, xp) == whole[:n]).all()


def test_permuted_ranks_in_blocks_is_the_same(monkeypatch):
    whole = random.permuted_ranks(4, 1000, 1003)
    monkeypatch.setattr(_counters, "_NUMPY_BLOCK", 7)
    assert np.array_equal(random.permuted_ranks(4, 1000, 1003), whole)


@pytest.mark.parametrize("domain", [2, 3, 4, 5])
def test_permuted_ranks_every_permutation_is_equally_likely(xp, domain):
    # One permutation per tweak: the same network as with a key each, evaluated at once.
    trials = 400 * math.factorial(domain)
    tweak = _counters.hash_counters(5, xp.arange(trials, dtype=np.uint64))
    columns = [
        to_numpy(_counters.permute(77, xp.full(trials, rank, np.uint64), domain, tweak))
        for rank in range(domain)
    ]
    images = np.stack(columns, axis=1).astype(np.int64)
    assert (np.sort(images, axis=1) == np.arange(domain)).all()
    codes = images @ (domain ** np.arange(domain))
    _, counts = np.unique(codes, return_counts=True)
    assert counts.size == math.factorial(domain)
    assert_uniform(counts)


@pytest.mark.parametrize("domain", [6, 10, 13, 16])
def test_permuted_ranks_pairs_are_equally_likely(xp, domain):
    trials = 40_000
    tweak = _counters.hash_counters(6, xp.arange(trials, dtype=np.uint64))
    for ranks in ((0, 1), (0, domain - 1), (2, 5)):
        first, second = (
            to_numpy(_counters.permute(78, xp.full(trials, rank, np.uint64), domain, tweak))
            for rank in ranks
        )
        counts = np.bincount((first * domain + second).astype(np.int64), minlength=domain**2)
        off_diagonal = ~np.eye(domain, dtype=bool).ravel()
        assert counts[~off_diagonal].sum() == 0
        assert_uniform(counts[off_diagonal])


def test_permuted_ranks_first_image_over_keys(xp):
    counts = np.zeros(50, int)
    for step in range(1000):
        counts[int(random.permuted_ranks(random.key(0, "x", step), 1, 50, xp)[0])] += 1
    assert_uniform(counts)


@pytest.mark.parametrize("domain", [2**17 - 5, 15_099_494, 2**24])
def test_permuted_ranks_neighbours_are_independent(xp, domain):
    n = 100_000
    ranks = to_numpy(random.permuted_ranks(random.key(3), n, domain, xp)) / domain
    for lag in (1, 2, 64, math.isqrt(domain)):
        pairs = np.histogram2d(ranks[:-lag], ranks[lag:], 12, ((0, 1), (0, 1)))[0]
        assert_uniform(pairs)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 4, 3), ValueError, "permuted_ranks: n must be between 0 and 3, got 4"),
        ((0, -1, 3), ValueError, "permuted_ranks: n must be between 0 and 3, got -1"),
        ((0, 1, 2**62 + 1), ValueError, "permuted_ranks: domain must be between 0 and"),
        ((0, 1, -1), ValueError, "permuted_ranks: domain must be between 0 and"),
        ((2**64, 1, 2), ValueError, "permuted_ranks: key must be between 0 and"),
        ((0, 1.0, 2), TypeError, "permuted_ranks: n must be an integer, got 1.0"),
        ((None, 1, 2), TypeError, "permuted_ranks: key must be an integer, got None"),
    ],
)
def test_permuted_ranks_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        random.permuted_ranks(*arguments)
