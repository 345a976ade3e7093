"""Every kernel instance on small odd shapes: the subset to run under compute-sanitizer.

    compute-sanitizer --tool memcheck python -m pytest tests/gpu -m sanitize --timeout 0
    compute-sanitizer --tool racecheck python -m pytest tests/gpu -m sanitize --timeout 0

Arrays come from cudaMalloc itself, each with its own bounds: in CuPy's pool an access just outside
an array would still be inside an allocation.
"""

import numpy as np
import pytest
from gpu_arrays import put
from helpers import (
    DTYPES,
    Problem,
    assert_exact,
    exact_pair,
    expected_sddmm,
    expected_spmm,
    make_topology,
    prefer_tensor,
)

from snack_cupy import _cost, _tensor, dispatch, kernels, sddmm, spmm, spmm_transposed

pytestmark = pytest.mark.sanitize

# Indices of 16 bits, of 32 bits for columns, for rows; the first also with rows that are empty.
PROBLEMS = (
    Problem("small", 37, 41, 0, 300),
    Problem("holes", 12, 14, 0, 20, "holes"),
    Problem("wide", 5, 65541, 0, 90, "ends"),
    Problem("tall", 65541, 5, 0, 90, "ends"),
)
BATCHES = (1, 2, 3, 8, 33)  # batch rows, or columns: of one and of several tiles, full and not
TILES = {4: 3, 8: 8, 16: 14, 32: 20, 64: 70}  # batch rows of a tile, and a batch for it


def instances(dtype):
    """(name, template values) of every instance of the table for one value dtype."""
    return {
        (kernel.name, frozenset(values.items()))
        for kernel in kernels.KERNELS
        for values in kernel.instances()
        if values.get("T", dtype) == dtype
    }


def force_slicing(monkeypatch, batch, slices, row_each):
    """Let `spmm` choose the sliced kernel, cut in this way and with a launch for each tile."""

    def cut(m, k, nnz, n, multiprocessors, shared_bytes):
        made = _cost.spmm_candidate(m, k, nnz, n, batch, slices, multiprocessors, shared_bytes)
        return made._replace(row_each=row_each)

    monkeypatch.setattr(_cost, "WORKSPACE", 1)
    monkeypatch.setattr(_cost, "spmm_slicing", cut)
    monkeypatch.setattr(_cost, "resident_microseconds", lambda *sizes: float("inf"))
    dispatch._plan.cache_clear()


@pytest.fixture
def launched(cp, monkeypatch):
    """The instances planned in this test, which allocates without a pool."""
    seen = set()
    plan = dispatch.plan

    def recording(problem, device):
        result = plan(problem, device)
        seen.update((c.kernel.name, frozenset(c.values.items())) for c in result.choices)
        return result

    monkeypatch.setattr(dispatch, "plan", recording)
    with cp.cuda.using_allocator(None):
        yield seen
    dispatch._plan.cache_clear()  # of what a test has forced


def run_spmm(rng, host, topology, dtype, n, batch_major, kernel=None):
    shape = (n, host.k) if batch_major else (host.k, n)
    values, x = exact_pair(rng, host.nnz, shape, dtype)
    bias = np.ones(host.m, DTYPES[dtype])
    given = put(values), put(x)
    keywords = {"batch_major": batch_major}
    got = spmm(topology, *given, bias=put(bias), kernel=kernel, **keywords)
    assert_exact(got, expected_spmm(host, values, x, bias=bias, **keywords).want)


def run_spmm_transposed(rng, host, topology, dtype, n, batch_major):
    shape = (n, host.m) if batch_major else (host.m, n)
    values, x = exact_pair(rng, host.nnz, shape, dtype)
    got = spmm_transposed(topology, put(values), put(x), batch_major=batch_major)
    want = expected_spmm(host, values, x, batch_major=batch_major, transposed=True).want
    assert_exact(got, want)


def run_sddmm(rng, host, topology, dtype, n, batch_major):
    shapes = [(n, size) if batch_major else (size, n) for size in host.shape]
    left, right = exact_pair(rng, *shapes, dtype)
    got = sddmm(topology, put(left), put(right), batch_major=batch_major)
    assert_exact(got, expected_sddmm(host, left, right, batch_major=batch_major).want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sanitize_every_instance(cp, rng, launched, monkeypatch, dtype):
    for problem in PROBLEMS:
        host = make_topology(problem)
        topology = host.to_device("cuda")
        for n in BATCHES:
            for batch_major in (True, False):
                for run in (run_spmm, run_spmm_transposed, run_sddmm):
                    run(rng, host, topology, dtype, n, batch_major)
                run_spmm(rng, host, topology, dtype, n, batch_major, "csr")
            if dtype in ("float32", "float64"):
                run_spmm(rng, host, topology, dtype, n, True, "snack_coo")
    if dtype in ("float32", "float64"):
        run_snack_coo_of_32_bits(rng, dtype)
    if dtype != "float64":  # several chunks of the batch
        host = make_topology(PROBLEMS[0])
        run_sddmm(rng, host, host.to_device("cuda"), dtype, 70, True)
    if dtype in kernels.HALVES:
        run_half_types(rng, monkeypatch, dtype)
    if dtype != "float64":
        run_every_slicing(rng, monkeypatch, dtype)
        run_without_slices(rng, monkeypatch, dtype)
    assert launched == instances(dtype)


def run_every_slicing(rng, monkeypatch, dtype):
    """Tiles of every size; rows shared by a warp or not; one slice, and several to be added."""
    for problem in PROBLEMS[:2]:
        host = make_topology(problem)
        topology = host.to_device("cuda")
        for batch, n in TILES.items():
            run_sddmm(rng, host, topology, dtype, n, True)
            if batch < 16:
                continue
            for row_each in (False, True):
                for slices in (1, 3):
                    force_slicing(monkeypatch, batch, slices, row_each)
                    run_spmm(rng, host, topology, dtype, n, True)
                    run_spmm_transposed(rng, host, topology, dtype, n, True)


def run_half_types(rng, monkeypatch, dtype):
    """Tensor cores where they are not the best choice; every number of lanes of a vector."""
    shapes = Problem("narrow", 40, 48, 0, 300), Problem("square", 2056, 2072, 0, 40000)
    for problem in (*shapes, Problem("long_row", 8, 3000, 0, 2040, "long_row")):
        host = make_topology(problem)
        topology = host.to_device("cuda")
        for lanes in (8, 16, 32):
            with monkeypatch.context() as patch:
                patch.setattr(_tensor, "vector_lanes", lambda *sizes, lanes=lanes: lanes)
                dispatch._plan.cache_clear()
                run_spmm(rng, host, topology, dtype, 1, True)
        with monkeypatch.context() as patch:
            patch.setattr(_tensor, "vector_microseconds", lambda nnz: float("inf"))
            dispatch._plan.cache_clear()
            run_spmm(rng, host, topology, dtype, 1, True)
        for pair in (False, True):
            with monkeypatch.context() as patch:
                prefer_tensor(patch, pair)
                for n in (3, 16, 20, 35):
                    for run in (run_spmm, run_spmm_transposed, run_sddmm):
                        run(rng, host, topology, dtype, n, True)
    dispatch._plan.cache_clear()


def run_snack_coo_of_32_bits(rng, dtype):
    """Rows and columns of 32 bits; the dense matrix of the oracle would not fit."""
    host = make_topology(Problem("both", 65541, 65543, 0, 90, "ends"))
    values, x = exact_pair(rng, host.nnz, (3, host.k), dtype)
    keywords = {"batch_major": True, "kernel": "snack_coo"}
    got = spmm(host.to_device("cuda"), put(values), put(x), **keywords)
    want = np.zeros((3, host.m))
    np.add.at(want.T, host.row, (values * x[:, host.col]).T)
    assert_exact(got, want)


def run_without_slices(rng, monkeypatch, dtype):
    """X whole in shared memory where it could be cut, and not there where it could."""
    host = make_topology(PROBLEMS[0])
    topology = host.to_device("cuda")
    for target, name in ((_cost, "spmm_slicing"), (dispatch, "_may_stage")):
        monkeypatch.setattr(target, name, lambda *arguments: None)
        dispatch._plan.cache_clear()
        for n in BATCHES:
            for run in (run_spmm, run_spmm_transposed, run_sddmm):
                run(rng, host, topology, dtype, n, True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sanitize_unaligned_addresses(cp, rng, launched, dtype):
    host = make_topology(PROBLEMS[0])
    topology = host.to_device("cuda")
    for n in (4, 8):
        for batch_major in (True, False):
            shape = (n, host.k) if batch_major else (host.k, n)
            values, x = exact_pair(rng, host.nnz, shape, dtype)
            want = expected_spmm(host, values, x, batch_major=batch_major).want
            out = put(np.full(want.shape, np.nan, DTYPES[dtype]), 1)
            spmm(topology, put(values, 1), put(x, 1), batch_major=batch_major, out=out)
            assert_exact(out, want)
    assert launched


def test_sanitize_nothing_to_do(cp, rng, launched):
    for problem in (Problem("empty", 5, 7, 0, 0), Problem("rows", 0, 7, 0, 0)):
        host = make_topology(problem)
        topology = host.to_device("cuda")
        for n in (0, 3):
            for run in (run_spmm, run_spmm_transposed, run_sddmm):
                run(rng, host, topology, "float32", n, True)
    assert not launched
