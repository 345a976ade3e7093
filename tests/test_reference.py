"""The NumPy and SciPy twins against dense products: results, layouts, paths and memory."""

import tracemalloc

import numpy as np
import pytest
from helpers import (
    DTYPES,
    LAYOUTS,
    PROBLEMS,
    assert_close,
    assert_exact,
    exact_pair,
    expected_sddmm,
    expected_spmm,
    make_topology,
    normal,
    problem,
    problem_ids,
)
from hypothesis import given
from hypothesis import strategies as st

from snack_cupy import Topology, reference

MAX_TEMPORARY = 64 << 20

WAYS = ("entries", "tiles", "small_parts")
# Parts of 128 bytes: Python would need many for the larger problems.
CASES = [
    (p, way)
    for p in PROBLEMS
    for way in WAYS
    if way != "small_parts" or max(p.nnz, p.m, p.k) <= 200
]

each_problem = pytest.mark.parametrize("p", PROBLEMS, ids=problem_ids(PROBLEMS))
each_case = pytest.mark.parametrize(
    ("p", "way"), CASES, ids=[f"{p.name}-{way}" for p, way in CASES], indirect=["way"]
)
each_way = pytest.mark.parametrize("way", WAYS, indirect=True)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_layout = pytest.mark.parametrize("layout", LAYOUTS)
with_and_without_rounding = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
each_order = pytest.mark.parametrize("batch_major", [False, True], ids=["columns", "batch_major"])


@pytest.fixture
def way(request, monkeypatch):
    """A way through the code, forced whatever the problem's size."""
    if request.param == "small_parts":
        # Rows in several spans, columns too long to be copied, bands of the transposed output.
        for name, size in {
            "BYTES": 128,
            "ROWS": 3,
            "ENTRIES": 5,
            "WIDTH": 3,
            "GATHERED": 7,
        }.items():
            monkeypatch.setattr(reference, f"_MAX_{name}", size)

    def rows(op, m, k, nnz, n, dtype):
        return max(1, m // 4) if request.param == "tiles" and dtype.char in "fdFD" else 0

    monkeypatch.setattr(reference, "choose_tile_rows", rows)
    return request.param


def oriented(array, batch_major):
    """An array of samples in columns, as the operation takes it."""
    return np.ascontiguousarray(array.T) if batch_major else array


def spmm(topology, *operands, **keywords):
    return reference.spmm(topology.row_offsets, topology.columns, *operands, topology.k, **keywords)


def spmm_transposed(topology, *operands, **keywords):
    return reference.spmm_transposed(
        topology.row_offsets, topology.columns, *operands, topology.k, **keywords
    )


def sddmm(topology, *operands, **keywords):
    return reference.sddmm(topology.row_offsets, topology.columns, *operands, **keywords)


# Results


@each_case
@each_dtype
@each_order
def test_spmm_is_within_the_bound_of_the_dense_product(p, dtype, batch_major, way, rng):
    topology = make_topology(p)
    values, bias = normal(rng, topology.nnz, dtype), normal(rng, p.m, dtype)
    dense = oriented(normal(rng, (p.k, p.n), dtype), batch_major)
    got = spmm(topology, values, dense, batch_major=batch_major, bias=bias)
    assert got.dtype == values.dtype
    assert_close(got, *expected_spmm(topology, values, dense, batch_major=batch_major, bias=bias))


@each_case
@each_dtype
@each_order
def test_spmm_transposed_is_within_the_bound_of_the_dense_product(p, dtype, batch_major, way, rng):
    topology = make_topology(p)
    values = normal(rng, topology.nnz, dtype)
    dense = oriented(normal(rng, (p.m, p.n), dtype), batch_major)
    got = spmm_transposed(topology, values, dense, batch_major=batch_major)
    assert got.dtype == values.dtype
    expected = expected_spmm(topology, values, dense, batch_major=batch_major, transposed=True)
    assert_close(got, *expected)


@each_case
@each_dtype
@each_order
def test_sddmm_is_within_the_bound_of_the_dense_product(p, dtype, batch_major, way, rng):
    topology = make_topology(p)
    left = oriented(normal(rng, (p.m, p.n), dtype), batch_major)
    right = oriented(normal(rng, (p.k, p.n), dtype), batch_major)
    got = sddmm(topology, left, right, batch_major=batch_major)
    assert got.dtype == left.dtype
    assert_close(got, *expected_sddmm(topology, left, right, batch_major=batch_major))


@each_problem
@each_dtype
def test_operations_are_exact_where_sums_are(p, dtype, rng):
    topology = make_topology(p)
    values, dense = exact_pair(rng, topology.nnz, (p.k, p.n), dtype)
    bias, other = exact_pair(rng, p.m, (p.m, p.n), dtype)
    expected = expected_spmm(topology, values, dense, bias=bias)
    assert_exact(spmm(topology, values, dense, bias=bias), expected.want)
    expected = expected_spmm(topology, values, other, transposed=True)
    assert_exact(spmm_transposed(topology, values, other), expected.want)
    left, right = exact_pair(rng, (p.m, p.n), (p.k, p.n), dtype)
    assert_exact(sddmm(topology, left, right), expected_sddmm(topology, left, right).want)


@pytest.mark.parametrize("dtype", ["int32", "int64", "complex64", "complex128"])
@each_way
def test_operations_take_integers_and_complex_numbers(dtype, way, rng):
    p = problem("empty_rows_and_columns")
    topology = make_topology(p)

    def numbers(*shape):
        real, imaginary = rng.integers(-9, 10, (2, *shape))
        return (real + 1j * imaginary if dtype.startswith("c") else real).astype(dtype)

    values, dense, other = numbers(topology.nnz), numbers(p.k, p.n), numbers(p.m, p.n)
    matrix = np.zeros((p.m, p.k), dtype)
    matrix[topology.row, topology.col] = values
    for got, want in (
        (spmm(topology, values, dense), matrix @ dense),
        (spmm_transposed(topology, values, other), matrix.T @ other),
        (sddmm(topology, other, dense), (other @ dense.T)[topology.row, topology.col]),
    ):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("index", ["uint16", "int32"])
def test_columns_may_be_of_either_index_type(index, rng):
    p = problem("empty_rows_and_columns")
    topology = make_topology(p)
    values, dense = exact_pair(rng, topology.nnz, (p.k, p.n), "float32")
    columns = topology.columns.astype(index)
    got = reference.spmm(topology.row_offsets, columns, values, dense, p.k)
    assert_exact(got, expected_spmm(topology, values, dense).want)


# Layouts


@each_layout
@with_and_without_rounding
@each_order
@each_way
def test_layout_of_the_operands_changes_no_bit(layout, dtype, batch_major, way, rng):
    p = problem("empty_rows_and_columns")
    topology, place = make_topology(p), LAYOUTS[layout]
    # Exact inputs: in another layout BLAS may sum in another order.
    values, dense = exact_pair(rng, topology.nnz, (p.k, p.n), dtype)
    left, _ = exact_pair(rng, (p.m, p.n), 1, dtype)
    dense, left = oriented(dense, batch_major), oriented(left, batch_major)
    keywords = {"batch_major": batch_major}
    for op, operands in (
        (spmm, (values, dense)),
        (spmm_transposed, (values, left)),
        (sddmm, (left, dense)),
    ):
        placed = [place(np, a) for a in operands]
        got = op(topology, *placed, **keywords)
        np.testing.assert_array_equal(got, op(topology, *operands, **keywords))


@each_order
@each_way
def test_operands_may_be_expanded(batch_major, way):
    p = problem("empty_rows_and_columns")
    topology = make_topology(p)
    ones = {size: oriented(np.ones((size, p.n), np.float32), batch_major) for size in (p.m, p.k)}
    expanded = {size: np.broadcast_to(np.float32(1), ones[size].shape) for size in ones}
    values = np.ones(topology.nnz, np.float32)
    for op, size in ((spmm, p.k), (spmm_transposed, p.m)):
        got = op(topology, values, expanded[size], batch_major=batch_major)
        want = op(topology, values, ones[size], batch_major=batch_major)
        np.testing.assert_array_equal(got, want)
    got = sddmm(topology, expanded[p.m], expanded[p.k], batch_major=batch_major)
    assert (got == p.n).all()


@each_layout
@with_and_without_rounding
@each_order
@each_way
def test_out_is_written_in_place_and_never_read(layout, dtype, batch_major, way, rng):
    p = problem("empty_rows_and_columns")
    topology, place = make_topology(p), LAYOUTS[layout]
    values, dense = exact_pair(rng, topology.nnz, (p.k, p.n), dtype)
    left, bias = exact_pair(rng, (p.m, p.n), p.m, dtype)
    dense, left = oriented(dense, batch_major), oriented(left, batch_major)
    keywords = {"batch_major": batch_major}
    for op, operands, extra in (
        (spmm, (values, dense), {"bias": bias}),
        (spmm, (values, dense), {}),
        (spmm_transposed, (values, left), {}),
        (sddmm, (left, dense), {}),
    ):
        want = op(topology, *operands, **keywords, **extra)
        out = place(np, np.full_like(want, np.nan))
        got = op(topology, *operands, **keywords, **extra, out=out)
        assert got is out
        np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("name", ["no_entries", "no_columns"])
def test_out_is_filled_where_there_is_nothing_to_sum(name):
    p = problem(name)
    topology, values = make_topology(p), np.empty(0, np.float32)
    bias = np.arange(p.m, dtype=np.float32)
    dense, other = np.ones((p.k, p.n), np.float32), np.ones((p.m, p.n), np.float32)
    out = np.full((p.m, p.n), np.nan, np.float32)
    assert (spmm(topology, values, dense, bias=bias, out=out) == bias[:, None]).all()
    assert (spmm(topology, values, dense, out=out) == 0).all()
    out = np.full((p.k, p.n), np.nan, np.float32)
    assert (spmm_transposed(topology, values, other, out=out) == 0).all()
    topology = make_topology(problem("batch_0"))
    nothing, out = np.ones((0, topology.m)), np.full(topology.nnz, np.nan)
    sddmm(topology, nothing, np.ones((0, topology.k)), batch_major=True, out=out)
    assert (out == 0).all()


# Infinities and NaNs


@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan], ids=str)
@each_order
@each_way
def test_non_finite_number_reaches_only_what_is_connected_to_it(number, batch_major, way, rng):
    p = problem("empty_rows_and_columns")
    topology = make_topology(p)
    values = normal(rng, topology.nnz, "float32")
    touched = np.zeros((p.m, p.k), bool)
    touched[topology.row, topology.col] = True
    dense, other = normal(rng, (p.k, p.n), "float32"), normal(rng, (p.m, p.n), "float32")
    dense[7, 3] = other[5, 2] = number
    for op, operand, want in (
        (spmm, dense, touched[:, 7]),
        (spmm_transposed, other, touched[5]),
    ):
        got = op(topology, values, oriented(operand, batch_major), batch_major=batch_major)
        broken = ~np.isfinite(oriented(got, batch_major))
        column = 3 if op is spmm else 2
        np.testing.assert_array_equal(broken[:, column], want)
        assert broken.sum() == want.sum()


@pytest.mark.filterwarnings("error")
@each_way
def test_overflow_of_a_half_type_is_an_infinity_without_a_warning(way):
    topology = Topology(np.array([0, 2]), np.array([0, 1]), (1, 2))
    large = np.array([60000, 60000], np.float16)
    assert spmm(topology, large, np.ones((2, 1), np.float16)) == np.inf
    # Summed in float32, so that only the final result must fit.
    assert spmm(topology, large, np.array([[1], [-1]], np.float16)) == 0


# Memory and choice of the way


def temporaries(call, *operands, **keywords):
    """Largest number of bytes held during a call, besides its result."""
    tracemalloc.start()
    try:
        result = call(*operands, **keywords)
        return tracemalloc.get_traced_memory()[1] - result.nbytes
    finally:
        tracemalloc.stop()


def random_layer(rng, m, k, per_row):
    """Rows of `per_row` columns at a constant distance from a random one, quick to make."""
    columns = np.arange(per_row) * (k // per_row) + rng.integers(0, k // per_row, (m, 1))
    offsets = np.arange(m + 1) * per_row
    return Topology(offsets.astype(np.int32), columns.ravel().astype(np.uint16), (m, k))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_temporaries_of_a_large_layer_are_bounded(dtype, rng):
    # 64 MiB is also what the dense matrix would take in float32.
    topology = random_layer(rng, 4096, 4096, 200)
    values, ones = np.ones(topology.nnz, DTYPES[dtype]), np.ones((256, 4096), DTYPES[dtype])
    keywords = {"batch_major": True}
    assert temporaries(spmm, topology, values, ones, **keywords) < MAX_TEMPORARY
    assert temporaries(spmm_transposed, topology, values, ones, **keywords) < MAX_TEMPORARY
    assert temporaries(sddmm, topology, ones, ones, **keywords) < MAX_TEMPORARY


@pytest.mark.parametrize(
    ("m", "k", "n", "per_row"),
    [(20000, 12, 32, 2), (50, 60000, 4, 500), (64, 64, 20000, 10), (3, 65536, 2, 60000)],
    ids=["tall", "wide", "large_batch", "full_rows"],
)
@each_dtype
@each_order
def test_temporaries_shrink_with_the_limits(m, k, n, per_row, dtype, batch_major, monkeypatch, rng):
    for name in ("BYTES", "ROWS", "ENTRIES", "GATHERED"):
        monkeypatch.setattr(reference, f"_MAX_{name}", getattr(reference, f"_MAX_{name}") // 32)
    monkeypatch.setattr(reference, "choose_tile_rows", lambda *_: 0)
    topology = random_layer(rng, m, k, per_row)
    values = np.ones(topology.nnz, DTYPES[dtype])
    left, right = (oriented(np.ones((size, n), DTYPES[dtype]), batch_major) for size in (m, k))
    limit, keywords = MAX_TEMPORARY // 32, {"batch_major": batch_major}
    assert temporaries(spmm, topology, values, right, **keywords) < limit
    assert temporaries(spmm_transposed, topology, values, left, **keywords) < limit
    assert temporaries(sddmm, topology, left, right, **keywords) < limit


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@each_order
def test_temporaries_of_a_giant_row_are_bounded(dtype, batch_major):
    # Row 1 alone holds 2 million entries, and one column of the operand, in float32, 16 MB.
    k, n = 4_000_000, 3
    columns = np.concatenate([[0], np.arange(0, k, 2, dtype=np.int32), [k - 1]], dtype=np.int32)
    offsets = np.array([0, 1, len(columns) - 1, len(columns)], np.int32)
    topology = Topology._from_parts(offsets, columns, (3, k))
    values = np.ones(len(columns), DTYPES[dtype])
    wide = np.broadcast_to(np.ones(k, DTYPES[dtype]), (n, k)).copy()
    wide, small = (a if batch_major else a.T for a in (wide, np.ones((n, 3), DTYPES[dtype])))
    results = []

    def measured(op, *operands):
        results.append(op(topology, *operands, batch_major=batch_major))
        return results[-1]

    assert temporaries(measured, spmm, values, wide) < MAX_TEMPORARY
    assert temporaries(measured, spmm_transposed, values, small) < MAX_TEMPORARY
    assert temporaries(measured, sddmm, small, wide) < MAX_TEMPORARY
    product, transposed, sampled = results
    assert_exact(oriented(product, batch_major)[:, 0], np.array([1, k / 2, 1]))
    want = np.zeros(k)
    want[::2] = 1
    want[[0, -1]] += 1
    np.testing.assert_array_equal(oriented(transposed, batch_major)[:, 0], want)
    assert (sampled == n).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_no_dense_matrix_is_made_of_a_dense_enough_one(dtype, rng):
    m = k = 2048
    topology = random_layer(rng, m, k, 1536)
    assert reference.choose_tile_rows("spmm", m, k, topology.nnz, 128, dtype)
    values, x = normal(rng, topology.nnz, dtype), normal(rng, (128, k), dtype)
    limit = m * k * values.itemsize
    assert temporaries(spmm, topology, values, x, batch_major=True) < limit
    assert temporaries(spmm_transposed, topology, values, x, batch_major=True) < limit
    assert temporaries(sddmm, topology, x, x, batch_major=True) < limit


@pytest.mark.parametrize("op", ["spmm", "spmm_transposed", "sddmm"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex128"])
def test_choose_tile_rows_bounds_the_tile(op, dtype):
    size = np.dtype(dtype).itemsize
    for m in (0, 1, 127, 128, 1024, 10**6):
        for k in (0, 1, 784, 4096, 10**5, 10**9):
            rows = reference.choose_tile_rows(op, m, k, m * k, 256, dtype)
            assert rows == 0 or 32 <= rows <= m // 4
            assert rows * k * size <= 4 << 20
            assert reference.choose_tile_rows(op, m, k, 0, 256, dtype) == 0
            assert reference.choose_tile_rows(op, m, k, m * k, 256, "int64") == 0


@pytest.mark.parametrize("op", ["spmm", "spmm_transposed", "sddmm"])
def test_choose_tile_rows_prefers_entries_where_few(op):
    chosen = [
        reference.choose_tile_rows(op, 1024, 1024, round(2**20 * density), 64, "float32") > 0
        for density in (0.01, 0.05, 0.2, 0.5, 1.0)
    ]
    assert chosen == sorted(chosen)
    assert chosen[0] is False
    assert chosen[-1] is True


@pytest.mark.parametrize("density", [0.1, 1.0])
def test_operations_are_deterministic(density, rng):
    topology = random_layer(rng, 512, 512, round(512 * density))
    values, x = normal(rng, topology.nnz, "float32"), normal(rng, (64, 512), "float32")
    for op, operands in ((spmm, (values, x)), (spmm_transposed, (values, x)), (sddmm, (x, x))):
        first = op(topology, *operands, batch_major=True)
        np.testing.assert_array_equal(first, op(topology, *operands, batch_major=True))


@given(st.lists(st.integers(0, 12), max_size=30), st.integers(1, 8), st.integers(1, 10))
def test_spans_cover_rows_and_entries_once(counts, max_rows, max_entries):
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    spans = list(reference._spans(offsets, max_rows, max_entries))
    runs = list(dict.fromkeys((rows.start, rows.stop) for rows, _ in spans))
    assert [r for start, stop in runs for r in range(start, stop)] == list(range(len(counts)))
    entries = [e for _, span in spans for e in range(span.start, span.stop)]
    assert entries == list(range(offsets[-1]))
    for rows, span in spans:
        assert 1 <= rows.stop - rows.start <= max_rows
        assert span.stop - span.start <= max_entries
        assert offsets[rows.start] <= span.start <= span.stop <= offsets[rows.stop]
