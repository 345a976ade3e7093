"""Every kernel instance on small odd shapes: the subset to run under compute-sanitizer.

    compute-sanitizer --tool memcheck python -m pytest tests/gpu -m sanitize --timeout 0
    compute-sanitizer --tool racecheck python -m pytest tests/gpu -m sanitize --timeout 0

Arrays come from cudaMalloc itself, each with its own bounds: in CuPy's pool an access just outside
an array would still be inside an allocation.
"""

import itertools

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
    to_numpy,
)

from snack_cupy import (
    _cost,
    _device_work,
    _jit,
    _product,
    _tensor,
    dispatch,
    dst,
    kernels,
    ops,
    random,
    sddmm,
    spmm,
    spmm_transposed,
)
from snack_cupy._structure import Transposing
from snack_cupy.dst import _device, _gradient

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
    """(name, template values) of every instance of the table for one value dtype, or for none."""
    return {
        (kernel.name, frozenset(values.items()))
        for kernel in kernels.KERNELS
        for values in kernel.instances()
        if values.get("T") == dtype or values.get("T") not in kernels.FLOATS
    }


def force_slicing(monkeypatch, batch, slices, row_each):
    """Let `spmm` choose the sliced kernel, cut in this way and with a launch for each tile."""

    def cut(m, k, nnz, n, permuted, multiprocessors, shared_bytes):
        sizes = (m, k, nnz, n, permuted)
        return _cost.spmm_candidate(*sizes, batch, slices, row_each, multiprocessors)

    monkeypatch.setattr(_cost, "WORKSPACE", 1)
    monkeypatch.setattr(_cost, "spmm_slicing", cut)
    monkeypatch.setattr(_cost, "resident_microseconds", lambda *sizes: float("inf"))
    dispatch._plan.cache_clear()


def force_residence(monkeypatch, batch):
    """Let `spmm` choose the kernel that holds X whole, ``batch`` rows in a block."""

    def estimate(m, k, nnz, n, permuted, rows, multiprocessors):
        return 0.0 if rows == batch else float("inf")

    monkeypatch.setattr(_cost, "resident_microseconds", estimate)
    dispatch._plan.cache_clear()


def force_sampling(monkeypatch, batch, slices, chunks):
    """Let `sddmm` choose the sliced kernel, cut in this way."""

    def cut(m, k, nnz, n, multiprocessors, shared_bytes):
        return _cost.sddmm_candidate(m, k, nnz, n, batch, slices, chunks, multiprocessors)

    monkeypatch.setattr(_cost, "sddmm_slicing", cut)
    dispatch._plan.cache_clear()


@pytest.fixture
def launched(cp, monkeypatch):
    """The instances planned or launched in this test, which allocates without a pool."""
    seen = set()
    plan, launch = dispatch.plan, _device_work.Work.launch

    def recording_launch(self, kernel, blocks, sizes, *pointers, **options):
        values = {name: options[name] for name, _ in kernel.parameters}
        seen.add((kernel.name, frozenset(values.items())))
        launch(self, kernel, blocks, sizes, *pointers, **options)

    monkeypatch.setattr(_device_work.Work, "launch", recording_launch)

    def recording(problem, device):
        result = plan(problem, device)
        seen.update((c.kernel.name, frozenset(c.values.items())) for c in result.choices)
        return result

    monkeypatch.setattr(dispatch, "plan", recording)
    monkeypatch.setattr(_product, "_limit", 0)
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
        run_every_residence(rng, monkeypatch, dtype)
        run_without_slices(rng, monkeypatch, dtype)
        run_dense_forms(monkeypatch, dtype)
    for problem in PROBLEMS:
        run_updates(rng, monkeypatch, make_topology(problem), dtype)
    run_view_of_32_bits()
    run_moves(rng)
    assert launched >= instances(dtype)


def run_updates(rng, monkeypatch, host, dtype):
    """Drops, growths and both, with results that are those of NumPy; the column-major view."""
    topology = host.to_device("cuda")
    values = exact_pair(rng, host.nnz, (1, 1), dtype)[0]
    left, right = exact_pair(rng, (3, host.m), (3, host.k), dtype)
    given = put(values)
    n = host.nnz // 3
    same(dst.smallest_magnitude(given, n), dst.smallest_magnitude(values, n))
    same(dst.random_growth(topology, n, 1), dst.random_growth(host, n, 1))
    for capacity in (_gradient.capacity_of, lambda inactive, n: 1):
        monkeypatch.setattr(_gradient, "capacity_of", capacity)
        for growth in ("random", "gradient"):
            pair = [growth, growth]
            if growth == "gradient":
                pair = [
                    dst.GradientGrowth(put(left), put(right)),
                    dst.GradientGrowth(left, right),
                ]
            for criterion in ("magnitude", "random"):
                keywords = {"n": n, "criterion": criterion, "key": 3, "regrown": "reset"}
                got = dst.restructure(topology, given, growth=pair[0], **keywords)
                want = dst.restructure(host, values, growth=pair[1], **keywords)
                for array, wanted in zip(got[:2], want[:2], strict=True):
                    same(array, wanted)
                same(got[2].new_to_old, want[2].new_to_old)
    for array, wanted in zip(topology.transposed, host.transposed, strict=True):
        same(array, wanted)


def run_view_of_32_bits():
    """Rows and columns of 32 bits, though 16 would do: both sizes beyond that are too large."""
    host = make_topology(PROBLEMS[0])
    topology = host.to_device("cuda")
    wide = topology.columns.astype(np.int32)
    view = topology.transposed._replace(rows=topology.transposed.rows.astype(np.int32))
    view.rows[...] = -1
    Transposing(wide, host.shape)(topology.row_offsets, wide, view)
    for array, wanted in zip(view, host.transposed, strict=True):
        np.testing.assert_array_equal(to_numpy(array), wanted)


def run_moves(rng):
    """Arrays of every width, to other places and in place."""
    nnz = 700
    host = random.random_topology((40, 50), nnz=nnz, seed=2)
    remap = dst.restructure(host, rng.random(nnz), 0.4, key=2)[2]
    new_to_old = put(remap.new_to_old)
    for dtype in ("uint8", "uint16", "uint32", "uint64"):
        arrays = [rng.integers(0, 255, nnz).astype(dtype) for _ in range(5)]
        held = [put(array) for array in arrays]
        out = put(arrays[0])
        _device.move(held[0], new_to_old, out)
        same(out, remap.apply(arrays[0]))
        mover = _device.InPlace(held[0], nnz)
        width = out.dtype.itemsize
        if not mover.takes(width):
            assert dtype == "uint8"
            continue
        for group in (held[:3], held[3:], held[2:3]):  # of three, two and one of them
            mover.move(new_to_old, [_device_work.pointer(array) for array in group], width)
        arrays[2] = remap.apply(arrays[2])
        for array, wanted in zip(held, arrays, strict=True):
            same(array, remap.apply(wanted))


def same(got, want):
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(to_numpy(got), want)


def run_every_slicing(rng, monkeypatch, dtype):
    """Tiles of every size; rows shared by a warp or not; one slice, and several to be added."""
    for problem in PROBLEMS[:2]:
        host = make_topology(problem)
        topology = host.to_device("cuda")
        for batch, n in TILES.items():
            for slices, chunks in ((1, 1), (3, 1), (1, 2)):
                force_sampling(monkeypatch, batch, slices, chunks)
                run_sddmm(rng, host, topology, dtype, n, True)
            if batch < 16:
                continue
            for row_each in (False, True):
                for slices in (1, 3):
                    force_slicing(monkeypatch, batch, slices, row_each)
                    run_spmm(rng, host, topology, dtype, n, True)
                    run_spmm_transposed(rng, host, topology, dtype, n, True)


def run_every_residence(rng, monkeypatch, dtype):
    """X whole in shared memory, so many batch rows in a block."""
    for problem, batch in itertools.product(PROBLEMS[:2], (4, 8)):
        force_residence(monkeypatch, batch)
        host = make_topology(problem)
        topology = host.to_device("cuda")
        for n in BATCHES[1:]:
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


def run_dense_forms(monkeypatch, dtype):
    """To the dense form of a matrix, of its transpose, and back; without the product itself."""
    monkeypatch.setattr(_cost, "product_microseconds", lambda *sizes: 0.0)
    dispatch._plan.cache_clear()
    for problem in PROBLEMS:
        host = make_topology(problem)
        topology = host.to_device("cuda")
        values = (1 + np.arange(host.nnz) % 7).astype(DTYPES[dtype])
        dense = np.zeros(host.shape, DTYPES[dtype])
        dense[host.row, host.col] = values
        indices = (topology.row_offsets, topology.columns)
        for op, structure, want in (
            ("spmm", (*indices, None), dense),
            ("spmm_transposed", topology.transposed, dense.T),
        ):
            got = put(np.full(want.shape, np.nan, DTYPES[dtype]))
            launch(op, topology, dtype, (*structure, put(values), None, None, None, got))
            assert_exact(got, want)
        got = put(np.full(host.nnz, np.nan, DTYPES[dtype]))
        launch("sddmm", topology, dtype, (*indices, None, None, got, put(dense)))
        assert_exact(got, values)


def launch(op, topology, dtype, arrays):
    """What is launched for a product by the dense form, on these arrays."""
    import cupy

    problem = ops.problem_of(op, topology, 3, dtype, True, scratch=1 << 30)
    plan = dispatch.plan(problem, 0)
    assert plan.product
    pointers = tuple(0 if array is None else array.data.ptr for array in arrays)
    _jit.launch(plan, pointers, cupy.cuda.get_current_stream().ptr)


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
