"""`spmm`, `spmm_transposed` and `sddmm` on NumPy arrays against dense products in a wider type."""

import tracemalloc
import warnings

import numpy as np
import pytest
from helpers import (
    DTYPES,
    LAYOUTS,
    PROBLEMS,
    assert_close,
    assert_exact,
    assert_rms,
    exact_pair,
    expected_sddmm,
    expected_spmm,
    make_topology,
    normal,
    problem,
    problem_ids,
)

from snack_cupy import Topology, ops, scratch_limit, sddmm, spmm, spmm_transposed, warmup

each_problem = pytest.mark.parametrize("p", PROBLEMS, ids=problem_ids(PROBLEMS))
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_op = pytest.mark.parametrize("op", ["spmm", "spmm_transposed", "sddmm"])
both_layouts = pytest.mark.parametrize("batch_major", [False, True], ids=["feature", "batch"])
ODD = problem("odd_sizes")


def dense_shape(features, n, batch_major):
    return (n, features) if batch_major else (features, n)


def operands(op, p, rng, dtype, batch_major, exact=False):
    """The two operands of an operation on problem ``p``: values and dense, or left and right."""
    shapes = {
        "spmm": ((p.nnz,), dense_shape(p.k, p.n, batch_major)),
        "spmm_transposed": ((p.nnz,), dense_shape(p.m, p.n, batch_major)),
        "sddmm": (dense_shape(p.m, p.n, batch_major), dense_shape(p.k, p.n, batch_major)),
    }[op]
    if exact:
        return exact_pair(rng, *shapes, dtype)
    return tuple(normal(rng, shape, dtype) for shape in shapes)


def call(op, topology, a, b, **options):
    return {"spmm": spmm, "spmm_transposed": spmm_transposed, "sddmm": sddmm}[op](
        topology, a, b, **options
    )


def expected(op, topology, a, b, batch_major):
    if op == "sddmm":
        return expected_sddmm(topology, a, b, batch_major=batch_major)
    transposed = op == "spmm_transposed"
    return expected_spmm(topology, a, b, batch_major=batch_major, transposed=transposed)


# Values


@each_op
@both_layouts
@each_dtype
@each_problem
def test_op_is_exact_and_bounded(op, p, dtype, batch_major, rng):
    topology = make_topology(p)
    a, b = operands(op, p, rng, dtype, batch_major, exact=True)
    got = call(op, topology, a, b, batch_major=batch_major)
    assert got.dtype == DTYPES[dtype]
    assert_exact(got, expected(op, topology, a, b, batch_major).want)
    a, b = operands(op, p, rng, dtype, batch_major)
    got = call(op, topology, a, b, batch_major=batch_major)
    assert_close(got, *expected(op, topology, a, b, batch_major))


@both_layouts
@each_dtype
@each_problem
def test_spmm_adds_the_bias_to_each_row_or_column(p, dtype, batch_major, rng):
    topology = make_topology(p)
    values, dense = operands("spmm", p, rng, dtype, batch_major)
    bias = normal(rng, p.m, dtype)
    got = spmm(topology, values, dense, batch_major=batch_major, bias=bias)
    want = expected_spmm(topology, values, dense, batch_major=batch_major, bias=bias)
    assert_close(got, *want)
    if p.nnz == 0:
        axis_last = got if batch_major else got.T
        np.testing.assert_array_equal(axis_last, np.broadcast_to(bias, axis_last.shape))


@both_layouts
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_spmm_error_is_that_of_a_dense_product(dtype, batch_major, rng):
    p = problem("many_blocks")
    topology = make_topology(p)
    values, dense = operands("spmm", p, rng, dtype, batch_major)
    matrix = np.zeros((p.m, p.k), DTYPES[dtype])
    matrix[topology.row, topology.col] = values
    # NumPy would sum half types in half precision; a GPU sums them in float32 and rounds once.
    wide, other = matrix.astype(np.float32), dense.astype(np.float32)
    product = (other @ wide.T if batch_major else wide @ other).astype(DTYPES[dtype])
    got = spmm(topology, values, dense, batch_major=batch_major)
    want = expected_spmm(topology, values, dense, batch_major=batch_major).want
    assert_rms(got, want, product)


@each_op
@each_dtype
def test_op_takes_vectors(op, dtype, rng):
    topology = make_topology(ODD)
    m, k = topology.shape
    a, b = {
        "spmm": (normal(rng, ODD.nnz, dtype), normal(rng, k, dtype)),
        "spmm_transposed": (normal(rng, ODD.nnz, dtype), normal(rng, m, dtype)),
        "sddmm": (normal(rng, m, dtype), normal(rng, k, dtype)),
    }[op]
    shape = {"spmm": (m,), "spmm_transposed": (k,), "sddmm": (ODD.nnz,)}[op]
    for batch_major in (False, True):
        got = call(op, topology, a, b, batch_major=batch_major)
        assert got.shape == shape
        assert_close(got, *expected(op, topology, a, b, batch_major))


def test_spmm_of_a_vector_adds_the_bias(rng):
    topology = make_topology(ODD)
    values, dense, bias = (normal(rng, size, "float64") for size in (ODD.nnz, ODD.k, ODD.m))
    for batch_major in (False, True):
        got = spmm(topology, values, dense, batch_major=batch_major, bias=bias)
        want = expected_spmm(topology, values, dense, batch_major=batch_major, bias=bias)
        assert_close(got, *want)


@each_op
@pytest.mark.parametrize("lead", [(2, 3), (1, 1, 4), (0, 3), (2, 0)], ids=str)
def test_op_takes_leading_axes(op, lead, rng):
    topology = make_topology(ODD)
    sizes = {"spmm": ODD.k, "spmm_transposed": ODD.m}
    if op == "sddmm":
        a, b = normal(rng, (*lead, ODD.m), "float32"), normal(rng, (*lead, ODD.k), "float32")
        shape = (ODD.nnz,)
    else:
        a, b = normal(rng, ODD.nnz, "float32"), normal(rng, (*lead, sizes[op]), "float32")
        shape = (*lead, ODD.m if op == "spmm" else ODD.k)
    got = call(op, topology, a, b, batch_major=True)
    assert got.shape == shape
    assert_close(got, *expected(op, topology, a, b, True))


@each_op
@both_layouts
@each_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
def test_op_takes_any_strides(op, dtype, batch_major, layout, rng):
    topology = make_topology(ODD)
    a, b = operands(op, ODD, rng, dtype, batch_major)
    want = call(op, topology, a, b, batch_major=batch_major)
    view = LAYOUTS[layout]
    with_views = call(op, topology, view(np, a), view(np, b), batch_major=batch_major)
    # The order of summation may depend on the strides, so the results need not have equal bits.
    assert_close(with_views, *expected(op, topology, a, b, batch_major))
    assert with_views.shape == want.shape
    a, b = operands(op, ODD, rng, dtype, batch_major, exact=True)
    exact = call(op, topology, view(np, a), view(np, b), batch_major=batch_major)
    assert_exact(exact, expected(op, topology, a, b, batch_major).want)


@each_op
@both_layouts
def test_op_takes_expanded_arrays(op, batch_major, rng):
    topology = make_topology(ODD)
    a, b = operands(op, ODD, rng, "float32", batch_major)
    one = b[:1] if batch_major else b[:, :1]
    expanded = np.broadcast_to(one, b.shape)
    got = call(op, topology, a, expanded, batch_major=batch_major)
    assert_close(got, *expected(op, topology, a, expanded.copy(), batch_major))


def test_spmm_takes_strided_bias_and_values(rng):
    topology = make_topology(ODD)
    values, dense = exact_pair(rng, ODD.nnz, (ODD.k, ODD.n), "float32")
    bias = exact_pair(rng, ODD.m, 1, "float32")[0]
    want = expected_spmm(topology, values, dense, bias=bias).want
    for view in LAYOUTS.values():
        assert_exact(spmm(topology, view(np, values), dense, bias=view(np, bias)), want)


@each_op
@both_layouts
@each_problem
def test_op_writes_out(op, p, batch_major, rng):
    topology = make_topology(p)
    a, b = operands(op, p, rng, "float32", batch_major)
    want = call(op, topology, a, b, batch_major=batch_major)
    out = np.full(want.shape, np.nan, np.float32)
    assert call(op, topology, a, b, batch_major=batch_major, out=out) is out
    np.testing.assert_array_equal(out, want)


def test_spmm_writes_out_with_leading_axes_and_bias(rng):
    topology = make_topology(ODD)
    values, dense = normal(rng, ODD.nnz, "float16"), normal(rng, (2, 3, ODD.k), "float16")
    bias = normal(rng, ODD.m, "float16")
    out = np.full((2, 3, ODD.m), np.nan, np.float16)
    assert spmm(topology, values, dense, batch_major=True, bias=bias, out=out) is out
    assert_close(out, *expected_spmm(topology, values, dense, batch_major=True, bias=bias))


@each_op
def test_op_does_not_change_its_inputs(op, rng):
    topology = make_topology(ODD)
    a, b = operands(op, ODD, rng, "float32", True)
    kept = a.copy(), b.copy(), topology.row_offsets.copy(), topology.columns.copy()
    for array in (a, b, topology.row_offsets, topology.columns):
        array.flags.writeable = False
    call(op, topology, a, b, batch_major=True)
    for got, want in zip((a, b, topology.row_offsets, topology.columns), kept, strict=True):
        np.testing.assert_array_equal(got, want)


@each_op
@both_layouts
@each_dtype
def test_op_is_deterministic(op, dtype, batch_major, rng):
    p = problem("many_blocks")
    topology = make_topology(p)
    a, b = operands(op, p, rng, dtype, batch_major)
    first = call(op, topology, a, b, batch_major=batch_major)
    again = call(op, topology, a.copy(), b.copy(), batch_major=batch_major)
    assert first.tobytes() == again.tobytes()


@both_layouts
def test_op_passes_on_infinities_and_nan_only_where_an_entry_is(batch_major):
    topology = Topology.from_mask(np.array([[1, 0], [0, 1]]))
    dense = np.array([[np.inf, 1.0], [1.0, np.nan]], np.float32)
    values = np.ones(2, np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = spmm(topology, values, dense, batch_major=batch_major)
    np.testing.assert_array_equal(got, dense)


@both_layouts
def test_float16_sum_beyond_its_range_is_infinite(batch_major):
    topology = Topology.from_mask(np.ones((1, 2)))
    values = np.full(2, 300, np.float16)
    dense = np.full((1, 2) if batch_major else (2, 1), 300, np.float16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert spmm(topology, values, dense, batch_major=batch_major).item() == np.inf
    # 300 * 300 alone is beyond float16; sums are not in it.
    values[1] = -300
    assert spmm(topology, values, dense, batch_major=batch_major).item() == 0


@each_op
def test_op_allocates_no_dense_matrix(op, rng):
    m = k = 8192  # 256 MiB as a dense float32 matrix
    cells = np.unique(rng.integers(0, m * k, 60_000))
    topology = Topology.from_coords(cells // k, cells % k, (m, k))
    _ = topology.transposed
    values, x = normal(rng, topology.nnz, "float32"), normal(rng, (64, k), "float32")
    a, b = (x, x) if op == "sddmm" else (values, x)
    call(op, topology, a, b, batch_major=True)
    tracemalloc.start()
    try:
        result = call(op, topology, a, b, batch_major=True)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak - result.nbytes <= 64 << 20


# Kernel names and warm-up


@pytest.mark.parametrize("kernel", [None, "csr", "snack_coo"])
def test_every_kernel_name_gives_the_same_on_the_cpu(kernel, rng):
    topology = make_topology(ODD)
    values, x = exact_pair(rng, ODD.nnz, (ODD.n, ODD.k), "float32")
    got = spmm(topology, values, x, batch_major=True, kernel=kernel)
    assert_exact(got, expected_spmm(topology, values, x, batch_major=True).want)


def test_warmup_does_nothing_on_the_cpu():
    topology = make_topology(ODD)
    before = topology.nbytes
    assert warmup(topology, 64) is None
    assert topology.nbytes == before


def test_problem_of_describes_the_topology():
    topology = make_topology(problem("int32_columns"))
    made = ops.problem_of("spmm", topology, 3, "float16", True, aligned=False, kernel="csr")
    assert made._asdict() == {
        "op": "spmm",
        "m": 6,
        "k": 65539,
        "nnz": 3000,
        "n": 3,
        "dtype": "float16",
        "index": "int32",
        "row_index": "uint16",
        "batch_major": True,
        "aligned": False,
        "kernel": "csr",
        "scratch": scratch_limit(),
        "tf32": False,
    }
