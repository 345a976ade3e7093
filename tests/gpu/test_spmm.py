"""spmm on the GPU: exact and bounded, every dtype, layout, batch size, address and stride."""

import numpy as np
import pytest
from gpu_arrays import poisoned, put
from helpers import (
    DTYPES,
    LAYOUTS,
    PROBLEMS,
    assert_close,
    assert_exact,
    assert_rms,
    exact_pair,
    expected_spmm,
    make_topology,
    normal,
    problem,
    problem_ids,
    to_numpy,
)

from snack_cupy import spmm

BATCHES = (1, 2, 3, 4, 5, 8, 9, 33)
both_layouts = pytest.mark.parametrize(
    "batch_major", [True, False], ids=["batch_major", "feature_major"]
)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_problem = pytest.mark.parametrize("problem", PROBLEMS, ids=problem_ids(PROBLEMS))


def dense_shape(size, n, batch_major):
    return (n, size) if batch_major else (size, n)


def first(array, n, batch_major):
    """The first ``n`` batch rows, or columns; a scalar or a column vector as it is."""
    return array[:n] if batch_major else array[:, :n]


def exact_operands(rng, topology, n, dtype, batch_major):
    shape = dense_shape(topology.k, n, batch_major)
    return exact_pair(rng, topology.nnz, shape, dtype)


# Values


@pytest.mark.parametrize("kernel", [None, "csr"], ids=["chosen", "csr"])
@every_problem
@every_dtype
@both_layouts
def test_spmm_exact(cp, rng, problem, dtype, batch_major, kernel):
    host = make_topology(problem)
    n = max(problem.n, *BATCHES)
    values, dense = exact_operands(rng, host, n, dtype, batch_major)
    want = expected_spmm(host, values, dense, batch_major=batch_major).want
    topology, values = host.to_device("cuda"), put(values)
    for batch in sorted({problem.n, *BATCHES}):
        part = put(first(dense, batch, batch_major))
        got = spmm(topology, values, part, batch_major=batch_major, kernel=kernel)
        assert got.dtype == DTYPES[dtype]
        assert_exact(got, first(want, batch, batch_major))


@every_problem
@every_dtype
@both_layouts
def test_spmm_bounded_with_bias(cp, rng, problem, dtype, batch_major):
    host = make_topology(problem)
    n = max(problem.n, *BATCHES)
    values, bias = normal(rng, host.nnz, dtype), normal(rng, host.m, dtype)
    dense = normal(rng, dense_shape(host.k, n, batch_major), dtype)
    expected = expected_spmm(host, values, dense, batch_major=batch_major, bias=bias)
    topology, values, bias = host.to_device("cuda"), put(values), put(bias)
    for batch in sorted({problem.n, *BATCHES}):
        part = put(first(dense, batch, batch_major))
        got = spmm(topology, values, part, batch_major=batch_major, bias=bias)
        want, magnitude = (first(a, batch, batch_major) for a in expected[:2])
        assert_close(got, want, magnitude, expected.products)


@every_dtype
@both_layouts
def test_spmm_rms_error_is_that_of_a_dense_product(cp, rng, dtype, batch_major):
    host = make_topology(problem("many_blocks"))
    values = normal(rng, host.nnz, dtype)
    dense = normal(rng, dense_shape(host.k, 33, batch_major), dtype)
    want = expected_spmm(host, values, dense, batch_major=batch_major).want
    summed = np.float64 if dtype == "float64" else np.float32
    matrix = np.zeros(host.shape, summed)
    matrix[host.row, host.col] = values
    operand = dense.astype(summed)
    product = operand @ matrix.T if batch_major else matrix @ operand
    got = spmm(host.to_device("cuda"), put(values), put(dense), batch_major=batch_major)
    assert_rms(got, want, product.astype(DTYPES[dtype]))


@every_dtype
@both_layouts
def test_spmm_non_finite_numbers_stay_where_they_belong(cp, dtype, batch_major):
    host = make_topology(problem("odd_sizes"))
    column = int(host.col[0])
    dense = np.ones(dense_shape(host.k, 9, batch_major), DTYPES[dtype])
    dense[(4, column) if batch_major else (column, 4)] = np.inf
    values = np.ones(host.nnz, DTYPES[dtype])
    values[host.row == 3] = np.nan
    got = spmm(host.to_device("cuda"), put(values), put(dense), batch_major=batch_major)
    got = to_numpy(got).astype(np.float64)
    got = got.T if batch_major else got  # (m, n)
    reads_inf = np.isin(np.arange(host.m), host.row[host.col == column])
    assert np.isnan(got[3]).all()
    assert np.isfinite(np.delete(got[np.arange(host.m) != 3], 4, axis=1)).all()
    np.testing.assert_array_equal(np.isposinf(got[:, 4]), reads_inf & (np.arange(host.m) != 3))


# Shapes


@every_dtype
@both_layouts
def test_spmm_of_a_vector(cp, rng, dtype, batch_major):
    host = make_topology(problem("odd_sizes"))
    values, dense = exact_pair(rng, host.nnz, host.k, dtype)
    topology = host.to_device("cuda")
    got = spmm(topology, put(values), put(dense), batch_major=batch_major)
    assert_exact(got, expected_spmm(host, values, dense).want)


@every_dtype
def test_spmm_with_leading_axes(cp, rng, dtype):
    host = make_topology(problem("odd_sizes"))
    topology = host.to_device("cuda")
    for leading in ((2, 3), (1, 1, 1), (0, 2), (2, 0), (4, 1, 2)):
        values, dense = exact_pair(rng, host.nnz, (*leading, host.k), dtype)
        got = spmm(topology, put(values), put(dense), batch_major=True)
        assert_exact(got, expected_spmm(host, values, dense, batch_major=True).want)


@every_dtype
@both_layouts
@pytest.mark.parametrize("name", ["no_entries", "no_columns", "batch_0", "no_rows"])
def test_spmm_of_nothing_is_the_bias(cp, dtype, batch_major, name):
    host = make_topology(problem(name))
    topology, n = host.to_device("cuda"), problem(name).n
    values = put(np.ones(host.nnz, DTYPES[dtype]))
    dense = put(np.ones(dense_shape(host.k, n, batch_major), DTYPES[dtype]))
    bias = np.arange(host.m).astype(DTYPES[dtype])
    for given in (None, bias):
        out = poisoned(dense_shape(host.m, n, batch_major), DTYPES[dtype])
        device_bias = None if given is None else put(given)
        got = spmm(topology, values, dense, batch_major=batch_major, bias=device_bias, out=out)
        assert got is out
        want = np.zeros(host.m) if given is None else bias
        want = np.broadcast_to(want if batch_major else want[:, None], out.shape)
        assert_exact(got, want)


# Memory


@pytest.mark.parametrize("layout", LAYOUTS)
@every_dtype
@both_layouts
def test_spmm_takes_operands_in_any_memory_layout(cp, rng, layout, dtype, batch_major):
    host = make_topology(problem("odd_sizes"))
    topology = host.to_device("cuda")
    lay = LAYOUTS[layout]
    bias = np.arange(host.m).astype(DTYPES[dtype])
    for n in (1, 8, 9):
        values, dense = exact_operands(rng, host, n, dtype, batch_major)
        want = expected_spmm(host, values, dense, batch_major=batch_major, bias=bias).want
        given = [lay(cp, put(array)) for array in (values, dense, bias)]
        before = [to_numpy(array) for array in given]
        got = spmm(topology, *given[:2], batch_major=batch_major, bias=given[2])
        assert_exact(got, want)
        for array, held in zip(given, before, strict=True):
            np.testing.assert_array_equal(to_numpy(array), held)


@every_dtype
@both_layouts
def test_spmm_at_every_alignment(cp, rng, dtype, batch_major):
    # Addresses that are multiples of the element's size and of nothing more, up to 32 bytes.
    host = make_topology(problem("odd_sizes"))
    topology = host.to_device("cuda")
    size = DTYPES[dtype].itemsize
    for n in (1, 4, 8, 16):
        values, dense = exact_operands(rng, host, n, dtype, batch_major)
        want = expected_spmm(host, values, dense, batch_major=batch_major).want
        for skip in (1, 2, 4, 8, 16, 32):
            skip = -(-skip // size)
            out = put(np.full(want.shape, np.nan, DTYPES[dtype]), skip)
            for operands in (
                (put(values, skip), put(dense), None),
                (put(values), put(dense, skip), None),
                (put(values), put(dense), out),
                (put(values, skip), put(dense, skip), out),
            ):
                got = spmm(topology, *operands[:2], batch_major=batch_major, out=operands[2])
                assert_exact(got, want)


@every_dtype
@both_layouts
def test_spmm_writes_out_and_nothing_around_it(cp, rng, dtype, batch_major):
    host = make_topology(problem("odd_sizes"))
    topology, margin = host.to_device("cuda"), 64
    for n in (1, 3, 4, 9, 33):
        values, dense = exact_operands(rng, host, n, dtype, batch_major)
        want = expected_spmm(host, values, dense, batch_major=batch_major).want
        memory = poisoned(want.size + 2 * margin, DTYPES[dtype])
        out = memory[margin : margin + want.size].reshape(want.shape)
        got = spmm(topology, put(values), put(dense), batch_major=batch_major, out=out)
        assert got is out
        assert_exact(out, want)
        around = to_numpy(memory).astype(np.float64)
        assert np.isnan(around[:margin]).all()
        assert np.isnan(around[-margin:]).all()


# Bad input


def wrong_calls(cp, topology, values, dense, bias, out):
    """(arguments, keywords, error) of calls that must fail."""
    host = np.ones((9, topology.k), np.float32)
    return [
        ((None, values, dense), {}, TypeError),
        ((topology, values[1:], dense), {}, ValueError),
        ((topology, values[:, None], dense), {}, ValueError),
        ((topology, values, dense[:, 1:]), {}, ValueError),
        ((topology, values, dense[0, 0]), {}, ValueError),
        ((topology, values, dense.astype(np.float64)), {}, TypeError),
        ((topology, values.astype(np.int32), dense.astype(np.int32)), {}, TypeError),
        ((topology, values, host), {}, ValueError),
        ((topology, to_numpy(values), dense), {}, ValueError),
        ((topology.to_device("cpu"), values, dense), {}, ValueError),
        ((topology, values, [1.0]), {}, TypeError),
        ((topology, values, dense), {"bias": bias[1:]}, ValueError),
        ((topology, values, dense), {"bias": to_numpy(bias)}, ValueError),
        ((topology, values, dense), {"out": out[1:]}, ValueError),
        ((topology, values, dense), {"out": out.astype(np.float64)}, TypeError),
        ((topology, values, dense), {"out": to_numpy(out)}, TypeError),
        ((topology, values, dense), {"out": cp.asfortranarray(out)}, ValueError),
        ((topology, values, dense), {"kernel": "fastest"}, ValueError),
        ((topology, values, dense.T), {"batch_major": False, "kernel": "snack_coo"}, ValueError),
    ]


def test_spmm_refuses_and_changes_nothing(cp, rng):
    topology = make_topology(problem("odd_sizes")).to_device("cuda")
    values = put(normal(rng, topology.nnz, "float32"))
    dense, bias = put(normal(rng, (9, topology.k), "float32")), cp.ones(topology.m, np.float32)
    out = put(normal(rng, (9, topology.m), "float32"))
    held = (values, dense, bias, out, topology.row_offsets, topology.columns)
    before = [to_numpy(array) for array in held]
    for arguments, keywords, error in wrong_calls(cp, topology, values, dense, bias, out):
        with pytest.raises(error, match=r"^spmm: .* must .*, got "):
            spmm(*arguments, **{"batch_major": True, "out": out, **keywords})
    for array, kept in zip(held, before, strict=True):
        np.testing.assert_array_equal(to_numpy(array), kept)


def test_spmm_refuses_an_out_that_overlaps(cp, rng):
    topology = make_topology(problem("constant_fan_in")).to_device("cuda")
    memory = put(normal(rng, 20 * 64, "float32"))
    dense = memory[: 9 * topology.k].reshape(9, topology.k)
    values = cp.ones(topology.nnz, np.float32)
    overlapping = memory[9 * topology.k - 1 :][: 9 * topology.m].reshape(9, topology.m)
    beside = memory[9 * topology.k :][: 9 * topology.m].reshape(9, topology.m)
    before = to_numpy(memory)
    with pytest.raises(ValueError, match="spmm: out must not overlap an input"):
        spmm(topology, values, dense, batch_major=True, out=overlapping)
    np.testing.assert_array_equal(to_numpy(memory), before)
    assert spmm(topology, values, dense, batch_major=True, out=beside) is beside


@every_dtype
def test_spmm_a_row_sees_no_value_of_its_neighbours(cp, rng, dtype):
    # Loads of four entries reach into the rows beside; an infinity or NaN there must not matter.
    host = make_topology(problem("odd_sizes"))
    values, dense = exact_operands(rng, host, 5, dtype, True)
    want = expected_spmm(host, values, dense, batch_major=True).want
    poison = host.row % 2 == 1
    values[poison] = np.where(np.arange(poison.sum()) % 2, np.nan, np.inf).astype(values.dtype)
    got = to_numpy(spmm(host.to_device("cuda"), put(values), put(dense), batch_major=True))
    assert_exact(put(got[:, ::2]), want[:, ::2])
