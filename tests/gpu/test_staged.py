"""The kernels that hold X in shared memory, at the sizes they are for: exact, and repeatable."""

import numpy as np
import pytest
from gpu_arrays import poisoned, put
from helpers import DTYPES, assert_exact, exact_pair

from snack_cupy import Topology, _product, dispatch, kernels, ops, sddmm, spmm, spmm_transposed

SHAPES = ((1024, 4096), (4096, 1000), (515, 6002))
BATCHES = (1, 8, 32, 64, 130)
GATHERING = (
    kernels.SPMM_VECTOR,
    kernels.SPMM_RESIDENT,
    kernels.SPMM_SLICED,
    kernels.SDDMM_VECTOR,
    kernels.SDDMM_SLICED,
)
TENSOR = (kernels.SPMM_TENSOR, kernels.SPMM_TENSOR_PAIR, kernels.SDDMM_TENSOR)
STAGED = (*GATHERING, *TENSOR, kernels.SPMM_VECTOR_HALF)


@pytest.fixture(autouse=True)
def nothing_dense(monkeypatch):
    monkeypatch.setattr(_product, "_limit", 0)


dtypes = pytest.mark.parametrize("dtype", [name for name in DTYPES if name != "float64"])
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")


def skewed(rng, shape):
    """3 % of all entries; row 3 holds half of its row, every fifth row and column nothing."""
    mask = rng.random(shape) < 0.03
    mask[3] = rng.random(shape[1]) < 0.5
    mask[::5] = False
    mask[:, 1::5] = False
    return Topology.from_mask(mask)


def matrix(topology, values):
    dense = np.zeros(topology.shape)
    dense[topology.row, topology.col] = values
    return dense


def assert_staged(op, topology, n, dtype):
    plan = dispatch.plan(ops.problem_of(op, topology, n, dtype, True, scratch=0), 0)
    assert plan.choices[0].kernel in STAGED


@shapes
@dtypes
def test_staged_products(cp, rng, shape, dtype):
    host = skewed(rng, shape)
    topology = host.to_device("cuda")
    m, k = shape
    values, x = exact_pair(rng, host.nnz, (max(BATCHES), k), dtype)
    dy = np.sign(rng.standard_normal((max(BATCHES), m))).astype(DTYPES[dtype])
    bias = np.arange(m).astype(np.float32) % 7
    wide = matrix(host, values.astype(np.float64))
    want, back = x.astype(np.float64) @ wide.T + bias, dy.astype(np.float64) @ wide
    on_gpu = put(values)
    for n in BATCHES:
        assert_staged("spmm", topology, n, dtype)
        out = poisoned((n, m), DTYPES[dtype])
        given = {"batch_major": True, "out": out, "bias": put(bias.astype(DTYPES[dtype]))}
        assert_exact(spmm(topology, on_gpu, put(x[:n]), **given), want[:n])
        assert_staged("spmm_transposed", topology, n, dtype)
        out = poisoned((n, k), DTYPES[dtype])
        got = spmm_transposed(topology, on_gpu, put(dy[:n]), batch_major=True, out=out)
        assert_exact(got, back[:n])


@shapes
@dtypes
def test_staged_sddmm(cp, rng, shape, dtype):
    host = skewed(rng, shape)
    topology = host.to_device("cuda")
    left, right = exact_pair(rng, (max(BATCHES), shape[0]), (max(BATCHES), shape[1]), dtype)
    for n in BATCHES:
        assert_staged("sddmm", topology, n, dtype)
        out = poisoned(host.nnz, DTYPES[dtype])
        got = sddmm(topology, put(left[:n]), put(right[:n]), batch_major=True, out=out)
        want = left[:n].astype(np.float64).T @ right[:n].astype(np.float64)
        assert_exact(got, want[host.row, host.col])


def test_staged_products_repeat(cp, rng):
    host = skewed(rng, (2048, 4096))
    topology = host.to_device("cuda")
    values = put(rng.standard_normal(host.nnz).astype(np.float32))
    for n in BATCHES:
        x = put(rng.standard_normal((n, 4096)).astype(np.float32))
        dy = put(rng.standard_normal((n, 2048)).astype(np.float32))
        for run in (
            lambda x=x: spmm(topology, values, x, batch_major=True),
            lambda dy=dy: spmm_transposed(topology, values, dy, batch_major=True),
            lambda x=x, dy=dy: sddmm(topology, dy, x, batch_major=True),
        ):
            first = run()
            for _ in range(5):
                assert bool((run() == first).all())
