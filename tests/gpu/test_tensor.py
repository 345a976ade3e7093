"""The kernels of the half types, on tensor cores and for vectors, at the sizes they are for."""

import numpy as np
import pytest
from gpu_arrays import poisoned, put
from helpers import (
    DTYPES,
    Problem,
    assert_close,
    assert_exact,
    exact_pair,
    expected_sddmm,
    expected_spmm,
    make_topology,
    normal,
    prefer_tensor,
    to_numpy,
)

from snack_cupy import Topology, _tensor, dispatch, kernels, ops, sddmm, spmm, spmm_transposed

SHAPES = ((1030, 4096), (4096, 1000), (4096, 2048))
BATCHES = (2, 8, 13, 32, 40)
TENSOR = (kernels.SPMM_TENSOR, kernels.SPMM_TENSOR_PAIR, kernels.SDDMM_TENSOR)
halves = pytest.mark.parametrize("dtype", kernels.HALVES)
pairs = pytest.mark.parametrize("pair", [False, True])
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")


@pytest.fixture(autouse=True)
def fresh_plans():
    yield
    dispatch._plan.cache_clear()


def skewed(rng, shape):
    """3 % of all entries; row 3 holds half of its row, every fifth row and column nothing.

    The entries of row 7 lie in its first columns, so that a guess by their number fails.
    """
    mask = rng.random(shape) < 0.03
    mask[3] = rng.random(shape[1]) < 0.5
    mask[7] = np.arange(shape[1]) < 350
    mask[::5] = False
    mask[:, 1::5] = False
    return Topology.from_mask(mask)


def assert_tensor(op, topology, n, dtype):
    plan = dispatch.plan(ops.problem_of(op, topology, n, dtype, True), 0)
    assert plan.choices[0].kernel in TENSOR


@shapes
@pairs
@halves
def test_tensor_products(cp, rng, monkeypatch, shape, pair, dtype):
    prefer_tensor(monkeypatch, pair)
    host = skewed(rng, shape)
    topology = host.to_device("cuda")
    m, k = shape
    values, x = exact_pair(rng, host.nnz, (max(BATCHES), k), dtype)
    dy = np.sign(rng.standard_normal((max(BATCHES), m))).astype(DTYPES[dtype])
    bias = (np.arange(m) % 7).astype(DTYPES[dtype])
    want = expected_spmm(host, values, x, batch_major=True, bias=bias).want
    back = expected_spmm(host, values, dy, batch_major=True, transposed=True).want
    on_gpu = put(values)
    for n in BATCHES:
        assert_tensor("spmm", topology, n, dtype)
        out = poisoned((n, m), DTYPES[dtype])
        given = {"batch_major": True, "out": out, "bias": put(bias)}
        assert_exact(spmm(topology, on_gpu, put(x[:n]), **given), want[:n])
        out = poisoned((n, k), DTYPES[dtype])
        got = spmm_transposed(topology, on_gpu, put(dy[:n]), batch_major=True, out=out)
        assert_exact(got, back[:n])


@shapes
@halves
def test_tensor_samples(cp, rng, monkeypatch, shape, dtype):
    prefer_tensor(monkeypatch)
    host = skewed(rng, shape)
    topology = host.to_device("cuda")
    left, right = exact_pair(rng, (max(BATCHES), shape[0]), (max(BATCHES), shape[1]), dtype)
    for n in BATCHES:
        assert_tensor("sddmm", topology, n, dtype)
        out = poisoned(host.nnz, DTYPES[dtype])
        got = sddmm(topology, put(left[:n]), put(right[:n]), batch_major=True, out=out)
        assert_exact(got, expected_sddmm(host, left[:n], right[:n], batch_major=True).want)


@pairs
@halves
def test_tensor_errors_are_bounded_and_repeat(cp, rng, monkeypatch, pair, dtype):
    prefer_tensor(monkeypatch, pair)
    host = make_topology(Problem("tensor", 800, 1024, 0, 60000))
    topology = host.to_device("cuda")
    for n in (8, 32):
        values, x = normal(rng, host.nnz, dtype), normal(rng, (n, host.k), dtype)
        dy = normal(rng, (n, host.m), dtype)
        given = put(values), put(x), put(dy)

        def run(given=given):
            v, x, dy = given
            return (
                spmm(topology, v, x, batch_major=True),
                sddmm(topology, dy, x, batch_major=True),
            )

        first, again = run(), run()
        for one, other in zip(first, again, strict=True):
            assert to_numpy(one).tobytes() == to_numpy(other).tobytes()
        assert_close(first[0], *expected_spmm(host, values, x, batch_major=True))
        assert_close(first[1], *expected_sddmm(host, dy, x, batch_major=True))


@halves
@pytest.mark.parametrize("lanes", [8, 16, 32])
def test_half_vectors(cp, rng, monkeypatch, lanes, dtype):
    monkeypatch.setattr(_tensor, "vector_lanes", lambda *sizes: lanes)
    dispatch._plan.cache_clear()
    for shape in (*SHAPES, (9000, 777), (3, 50_001)):
        host = skewed(rng, shape) if shape[0] > 8 else make_topology(Problem("v", *shape, 0, 900))
        topology = host.to_device("cuda")
        values, x = exact_pair(rng, host.nnz, (1, host.k), dtype)
        bias = (np.arange(host.m) % 7).astype(DTYPES[dtype])
        got = spmm(topology, put(values), put(x), batch_major=True, bias=put(bias))
        assert_exact(got, expected_spmm(host, values, x, batch_major=True, bias=bias).want)
