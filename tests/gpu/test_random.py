"""Random numbers and topologies on the GPU: the CPU's tests with CuPy, and the same bits."""

import numpy as np
import pytest
import test_random
import test_random_numbers
from gpu_arrays import tests_that_take_xp
from helpers import to_numpy

from snack_cupy import _jit, random

lent = tests_that_take_xp(test_random, test_random_numbers)
del lent["test_uniform_is_the_top_bits"]  # skips bfloat16 with CuPy; the first test below stands in
globals().update(lent)


@pytest.fixture(scope="module")
def xp():
    return _jit.require_cupy()


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_random_uniform_has_the_bits_of_numpy(cp, dtype):
    for key in (0, 12345, 2**64 - 1):
        got = random.uniform(key, 10_000, dtype, cp)
        want = random.uniform(key, 10_000, dtype)
        assert to_numpy(got).tobytes() == want.tobytes()


@pytest.mark.parametrize(
    ("domain", "n"),
    [(1, 1), (7, 7), (1000, 1000), (65535, 10_000), (70_000, 70_000), (2**40 + 1, 10_000)],
)
def test_random_permuted_ranks_are_those_of_numpy(cp, domain, n):
    for key in (0, 12345, 2**64 - 1):
        got = random.permuted_ranks(key, n, domain, cp)
        np.testing.assert_array_equal(to_numpy(got), random.permuted_ranks(key, n, domain))


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((300, 784), {"sparsity": 0.9}),
        ((300, 784), {"density": 0.1, "distribution": "balanced"}),
        ((300, 784), {"fan_in": 17}),
        ((3, 100_000), {"nnz": 5000}),
        ((100_000, 3), {"nnz": 5000, "distribution": "balanced"}),
        ((0, 5), {"nnz": 0}),
    ],
    ids=str,
)
def test_random_topology_is_that_of_numpy(cp, shape, size):
    for seed in range(3):
        got = random.random_topology(shape, seed=seed, name="layer", xp=cp, **size)
        want = random.random_topology(shape, seed=seed, name="layer", **size)
        assert got.device == "cuda:0"
        assert got.to_device("cpu").equals(want)
        assert got.columns.dtype == want.columns.dtype
