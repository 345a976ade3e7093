"""The COO kernel of SNACK, a reference point for comparisons: right, though not deterministic."""

import numpy as np
import pytest
from gpu_arrays import poisoned, put
from helpers import (
    DTYPES,
    PROBLEMS,
    Problem,
    assert_close,
    assert_exact,
    exact_pair,
    expected_spmm,
    make_topology,
    normal,
    problem,
    problem_ids,
    to_numpy,
)

from snack_cupy import Topology, dispatch, spmm

BATCHES = (1, 2, 5, 33)
every_problem = pytest.mark.parametrize("problem", PROBLEMS, ids=problem_ids(PROBLEMS))
every_dtype = pytest.mark.parametrize("dtype", ["float32", "float64"])


def snack_coo(topology, values, x, **keywords):
    return spmm(topology, values, x, batch_major=True, kernel="snack_coo", **keywords)


@every_problem
@every_dtype
def test_snack_coo_exact_and_bounded(cp, rng, problem, dtype):
    host = make_topology(problem)
    topology = host.to_device("cuda")
    n = max(problem.n, *BATCHES)
    exact = exact_pair(rng, host.nnz, (n, host.k), dtype)
    inexact = normal(rng, host.nnz, dtype), normal(rng, (n, host.k), dtype)
    bias = normal(rng, host.m, dtype)
    for values, x in (exact, inexact):
        shift = None if x is exact[1] else bias
        want, magnitude, products = expected_spmm(host, values, x, batch_major=True, bias=shift)
        given = put(values), None if shift is None else put(shift)
        for batch in sorted({problem.n, *BATCHES}):
            got = snack_coo(topology, given[0], put(x[:batch]), bias=given[1])
            if shift is None:
                assert_exact(got, want[:batch])
            else:
                assert_close(got, want[:batch], magnitude[:batch], products)


@every_dtype
def test_snack_coo_with_rows_and_columns_of_32_bits(cp, rng, dtype):
    host = make_topology(Problem("int32_both", 65541, 65543, 3, 3000, "ends"))
    values, x = exact_pair(rng, host.nnz, (3, host.k), dtype)
    got = to_numpy(snack_coo(host.to_device("cuda"), put(values), put(x)))
    want = np.zeros((3, host.m))
    np.add.at(want.T, host.row, (values * x[:, host.col]).T)
    np.testing.assert_array_equal(got, want)


@every_dtype
def test_snack_coo_overwrites_out_and_nothing_around_it(cp, rng, dtype):
    host = make_topology(problem("empty_rows_and_columns"))
    topology, margin = host.to_device("cuda"), 65
    values, x = exact_pair(rng, host.nnz, (9, host.k), dtype)
    bias = np.arange(host.m).astype(DTYPES[dtype])
    want = expected_spmm(host, values, x, batch_major=True, bias=bias).want
    memory = poisoned(want.size + 2 * margin, DTYPES[dtype])
    out = memory[margin:-margin].reshape(want.shape)
    for _ in range(3):  # the sums of the call before are not in the result
        assert snack_coo(topology, put(values, 1), put(x, 1), bias=put(bias, 1), out=out) is out
        assert_exact(out, want)
    around = to_numpy(memory)
    assert np.isnan(around[:margin]).all()
    assert np.isnan(around[-margin:]).all()


@every_dtype
def test_snack_coo_of_nothing_is_the_bias(cp, dtype):
    topology = Topology(cp.zeros(6, np.int32), cp.zeros(0, np.int32), (5, 7))
    bias = cp.arange(5, dtype=dtype)
    x, values = cp.ones((3, 7), dtype), cp.zeros(0, dtype)
    np.testing.assert_array_equal(
        to_numpy(snack_coo(topology, values, x, bias=bias)), np.tile(np.arange(5), (3, 1))
    )
    assert not snack_coo(topology, values, x).any()
    assert snack_coo(topology, values, x[:0]).shape == (0, 5)


def test_snack_coo_is_the_kernel_that_runs(cp, monkeypatch):
    chosen = []
    plan = dispatch.plan

    def recording(problem, device):
        result = plan(problem, device)
        chosen.append([choice.kernel.name for choice in result.choices])
        return result

    monkeypatch.setattr(dispatch, "plan", recording)
    topology = make_topology(problem("odd_sizes")).to_device("cuda")
    values, x = cp.ones(topology.nnz), cp.ones((9, topology.k))
    snack_coo(topology, values, x)
    assert chosen == [["fill_rows", "spmm_coo_atomic"]]
    assert "snack_coo" in dispatch.NON_DETERMINISTIC


def test_snack_coo_refuses_half_types_and_the_other_layout(cp):
    topology = make_topology(problem("odd_sizes")).to_device("cuda")
    values, x = (cp.ones(shape, np.float16) for shape in (topology.nnz, (9, topology.k)))
    with pytest.raises(TypeError, match="spmm: values must be float32 or float64"):
        snack_coo(topology, values, x)
    values, x = values.astype(np.float32), x.astype(np.float32)
    with pytest.raises(ValueError, match="spmm: batch_major must be True"):
        spmm(topology, values, x.T, kernel="snack_coo")
