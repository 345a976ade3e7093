"""The kernels themselves, run on the host by `emulator`: every launch of a plan, exact results."""

import itertools

import emulator
import numpy as np
import pytest
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
)

from snack_cupy import _cost, _jit, _product, _tensor, dispatch, kernels, ops
from snack_cupy.dispatch import Device

pytestmark = pytest.mark.skipif(bool(emulator.missing()), reason=emulator.missing())

# Few multiprocessors, so that blocks are few; shared memory that holds few rows of X.
DEVICE = Device(multiprocessors=2, shared_bytes=64 * 1024)
OPS = ("spmm", "spmm_transposed", "sddmm")
PROBLEMS = (
    Problem("small", 37, 41, 0, 300),
    Problem("holes", 12, 16, 0, 20, "holes"),
)
TILES = {4: 3, 8: 8, 16: 14, 32: 20, 64: 70}  # batch rows of a tile, and a batch for it


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setattr(_jit, "compile_instance", emulator.compile_instance)
    monkeypatch.setattr(dispatch, "device_facts", lambda device: DEVICE)
    dispatch._plan.cache_clear()
    yield
    dispatch._plan.cache_clear()


def aligned(array, distance=0):
    """A copy that starts ``distance`` elements past a 16-byte boundary, amid other bytes."""
    memory = np.full(array.nbytes + 128, 0xA5, np.uint8)
    start = -memory.ctypes.data % 16 + 32 + distance * array.itemsize
    made = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    made[...] = array
    return made


def assert_nothing_beside(array):
    """The bytes before and behind what `aligned` made are as they were."""
    memory = array.base
    start = array.ctypes.data - memory.ctypes.data
    assert (memory[:start] == 0xA5).all()
    assert (memory[start + array.nbytes :] == 0xA5).all()


def address(array):
    return 0 if array is None else array.ctypes.data


def run(op, topology, dtype, batch_major, inputs, shape, kernel=None, distance=0, product=False):
    """The result of a plan's launches, from an output that is full of NaN."""
    bias = inputs[2] if len(inputs) > 2 else None
    given = [aligned(each, distance) for each in inputs[:2]]
    n = inputs[0 if op == "sddmm" else 1].shape[0 if batch_major else 1]
    out = aligned(np.full(shape, np.nan, DTYPES[dtype]), distance)
    options = {"aligned": distance == 0, "kernel": kernel, "scratch": None if product else 0}
    problem = ops.problem_of(op, topology, n, dtype, batch_major, **options)
    plan = dispatch.plan(problem, 0)
    assert plan.product is product
    if op == "sddmm":
        held = [topology.row_offsets, aligned(topology.columns), *given, out]
    else:
        view = topology.transposed if op == "spmm_transposed" else None
        indices = topology.packed_rows if kernel == "snack_coo" else topology.row_offsets
        first = view if view is not None else (indices, aligned(topology.columns), None)
        held = [*first, *given, bias, out]
    workspace = aligned(np.full(plan.workspace, 0xFF, np.uint8))
    pointers = [address(each) for each in held]
    if plan.workspace:
        pointers.append(address(workspace))
    if product:
        shape = topology.shape[::-1] if op == "spmm_transposed" else topology.shape
        dense = workspace.view(out.dtype).reshape(shape)
    if product and op == "sddmm":
        _product.sample(dense, *given, batch_major)
    _jit.launch(plan, tuple(pointers), None)
    if product and op != "sddmm":
        _product.multiply(dense, given[1], bias, out, batch_major)
    for array in (*given, out, workspace):
        assert_nothing_beside(array)
    return out


def check(rng, topology, op, n, dtype, batch_major=True, **options):
    """Exact against the oracle."""
    m, k = topology.shape
    if op == "sddmm":
        shapes = [(n, size) if batch_major else (size, n) for size in (m, k)]
        pair = exact_pair(rng, *shapes, dtype)
        got = run(op, topology, dtype, batch_major, pair, (topology.nnz,), **options)
        assert_exact(got, expected_sddmm(topology, *pair, batch_major=batch_major).want)
        return
    transposed = op == "spmm_transposed"
    inside, outside = (m, k) if transposed else (k, m)
    shape = (n, inside) if batch_major else (inside, n)
    values, dense = exact_pair(rng, topology.nnz, shape, dtype)
    bias = None if transposed else (np.arange(m) % 5).astype(DTYPES[dtype])
    out_shape = (n, outside) if batch_major else (outside, n)
    got = run(op, topology, dtype, batch_major, (values, dense, bias), out_shape, **options)
    keywords = {"batch_major": batch_major, "bias": bias, "transposed": transposed}
    assert_exact(got, expected_spmm(topology, values, dense, **keywords).want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", PROBLEMS, ids=lambda p: p.name)
def test_emulated_choices(rng, p, dtype):
    topology = make_topology(p)
    for n, batch_major, op in itertools.product((1, 3, 9, 33), (True, False), OPS):
        check(rng, topology, op, n, dtype, batch_major)


@pytest.mark.parametrize("batch_major", [True, False])
def test_emulated_columns_of_32_bits(rng, batch_major):
    topology = make_topology(Problem("wide", 3, 65541, 0, 90, "ends"))
    for op in ("spmm", "sddmm"):
        check(rng, topology, op, 3, "float32", batch_major)


@pytest.mark.parametrize("kernel", ["csr", "snack_coo"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_emulated_kernels_that_are_asked_for(rng, kernel, dtype):
    for p in PROBLEMS:
        for n in (1, 5, 12):
            check(rng, make_topology(p), "spmm", n, dtype, kernel=kernel)


@pytest.mark.parametrize("op", OPS)
def test_emulated_unaligned_addresses(rng, op):
    for n, batch_major in itertools.product((1, 4, 9), (True, False)):
        check(rng, make_topology(PROBLEMS[0]), op, n, "float32", batch_major, distance=1)


@pytest.mark.parametrize("row_each", [False, True])
@pytest.mark.parametrize("batch", [16, 32, 64])
def test_emulated_slices(rng, monkeypatch, batch, row_each):
    def cut_into(slices):
        def cut(m, k, nnz, n, permuted, multiprocessors, shared_bytes):
            sizes = (m, k, nnz, n, permuted, batch, slices, row_each, multiprocessors)
            return _cost.spmm_candidate(*sizes)

        return cut

    monkeypatch.setattr(_cost, "WORKSPACE", 1)  # a launch for each tile
    monkeypatch.setattr(_cost, "resident_microseconds", lambda *sizes: float("inf"))
    for dtype, p, slices in itertools.product(("float32", "float16"), PROBLEMS, (1, 3)):
        monkeypatch.setattr(_cost, "spmm_slicing", cut_into(slices))
        dispatch._plan.cache_clear()
        for op in OPS[:2]:
            check(rng, make_topology(p), op, TILES[batch], dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_emulated_sampled_tiles(rng, monkeypatch, dtype):
    for p, (batch, n) in itertools.product(PROBLEMS, TILES.items()):
        topology = make_topology(p)
        cut = _cost.sddmm_candidate(*topology.shape, topology.nnz, n, batch, 1, 1, 2)
        monkeypatch.setattr(_cost, "sddmm_slicing", lambda *sizes, cut=cut: cut)
        dispatch._plan.cache_clear()
        check(rng, topology, "sddmm", n, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("n", [130, 200])
def test_emulated_chunks_of_the_batch(rng, monkeypatch, n, dtype):
    topology = make_topology(PROBLEMS[0])
    m, k = topology.shape
    for slices, chunks in itertools.product((1, 3), (1, 2, 3)):
        cut = _cost.sddmm_candidate(m, k, topology.nnz, n, 64, slices, chunks, 2)
        monkeypatch.setattr(_cost, "sddmm_slicing", lambda *sizes, cut=cut: cut)
        dispatch._plan.cache_clear()
        check(rng, topology, "sddmm", n, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_emulated_products_by_the_dense_form(rng, monkeypatch, dtype):
    monkeypatch.setattr(_cost, "product_microseconds", lambda *sizes: 0.0)
    wide = Problem("wide", 3, 9000, 0, 700, "ends")  # rows longer than what a warp has in hand
    for p, op in itertools.product((*PROBLEMS, wide), OPS):
        for n, batch_major in ((1, True), (5, True), (5, False)):
            check(rng, make_topology(p), op, n, dtype, batch_major, product=True)


# Sizes that the tensor cores' kernels take: rows of X on 16-byte boundaries. Rows that are empty,
# rows of several windows, columns of several slices.
TENSOR_PROBLEMS = (
    Problem("small", 40, 48, 0, 300),
    Problem("holes", 16, 24, 0, 20, "holes"),
    Problem("long", 24, 520, 0, 9000),
    Problem("long_row", 8, 3000, 0, 2040, "long_row"),
)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("pair", [False, True])
def test_emulated_tensor_products(rng, monkeypatch, pair, dtype):
    device = Device(multiprocessors=2, shared_bytes=_tensor.CLUSTER_BYTES)
    monkeypatch.setattr(dispatch, "device_facts", lambda device_id: device)
    prefer_tensor(monkeypatch, pair)
    for p, n in itertools.product(TENSOR_PROBLEMS, (20, 35) if pair else (3, 11)):
        topology = make_topology(p)
        for op in OPS[:2]:
            problem = ops.problem_of(op, topology, n, dtype, True)
            wanted = kernels.SPMM_TENSOR_PAIR if pair else kernels.SPMM_TENSOR
            assert dispatch.choose_spmm(problem, device).kernel is wanted
            check(rng, topology, op, n, dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_emulated_tensor_samples(rng, monkeypatch, dtype):
    device = Device(multiprocessors=2, shared_bytes=_tensor.CLUSTER_BYTES)
    monkeypatch.setattr(dispatch, "device_facts", lambda device_id: device)
    prefer_tensor(monkeypatch)
    for p, n in itertools.product(TENSOR_PROBLEMS, (3, 19, 35)):
        topology = make_topology(p)
        problem = ops.problem_of("sddmm", topology, n, dtype, True)
        assert dispatch.choose_sddmm(problem, device).kernel is kernels.SDDMM_TENSOR
        check(rng, topology, "sddmm", n, dtype)


@pytest.mark.parametrize("lanes", [8, 16, 32])
def test_emulated_half_vectors(rng, monkeypatch, lanes):
    monkeypatch.setattr(_tensor, "vector_lanes", lambda *sizes: lanes)
    for p, dtype in itertools.product((*PROBLEMS, *TENSOR_PROBLEMS), ("float16", "bfloat16")):
        check(rng, make_topology(p), "spmm", 1, dtype)


def test_emulated_rows_longer_than_a_turn(rng):
    topology = make_topology(Problem("long_row", 5, 3000, 0, 2040, "long_row"))
    for op, n in itertools.product(OPS, (1, 4, 40)):
        check(rng, topology, op, n, "float32")


@pytest.mark.parametrize("op", OPS[:2])
def test_emulated_infinities_stay_in_their_rows(rng, op):
    topology = make_topology(PROBLEMS[0])
    m, k = topology.shape
    inside, outside = (m, k) if op == "spmm_transposed" else (k, m)
    for n in (1, 4, 20):
        values, dense = normal(rng, topology.nnz, "float32"), normal(rng, (n, inside), "float32")
        values[100] = np.inf
        got = run(op, topology, "float32", True, (values, dense, None), (n, outside))
        index = topology.col if op == "spmm_transposed" else topology.row
        assert np.isinf(got[:, index[100]]).all()
        others = np.delete(got, index[100], axis=1)
        values[100] = 0
        transposed = op == "spmm_transposed"
        expected = expected_spmm(topology, values, dense, batch_major=True, transposed=transposed)
        parts = (np.delete(np.broadcast_to(a, got.shape), index[100], axis=1) for a in expected)
        assert_close(others, *parts)
