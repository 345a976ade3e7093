"""spmm_transposed on the GPU: exact and bounded, every dtype, layout, batch size and stride."""

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

from snack_cupy import Topology, spmm, spmm_transposed

BATCHES = (1, 2, 3, 4, 5, 8, 9, 33)
both_layouts = pytest.mark.parametrize(
    "batch_major", [True, False], ids=["batch_major", "feature_major"]
)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_problem = pytest.mark.parametrize("problem", PROBLEMS, ids=problem_ids(PROBLEMS))


def dense_shape(size, n, batch_major):
    return (n, size) if batch_major else (size, n)


def first(array, n, batch_major):
    """The first ``n`` batch rows, or columns."""
    return array[:n] if batch_major else array[:, :n]


def exact_operands(rng, topology, n, dtype, batch_major):
    shape = dense_shape(topology.m, n, batch_major)
    return exact_pair(rng, topology.nnz, shape, dtype)


def expected(topology, values, dense, batch_major):
    return expected_spmm(topology, values, dense, batch_major=batch_major, transposed=True)


@every_problem
@every_dtype
@both_layouts
def test_spmm_transposed_exact_and_bounded(cp, rng, problem, dtype, batch_major):
    host = make_topology(problem)
    topology = host.to_device("cuda")
    n = max(problem.n, *BATCHES)
    exact = exact_operands(rng, host, n, dtype, batch_major)
    values = normal(rng, host.nnz, dtype)
    inexact = values, normal(rng, dense_shape(host.m, n, batch_major), dtype)
    for values, dense in (exact, inexact):
        want, magnitude, products = expected(host, values, dense, batch_major)
        device_values = put(values)
        for batch in sorted({problem.n, *BATCHES}):
            part = put(first(dense, batch, batch_major))
            got = spmm_transposed(topology, device_values, part, batch_major=batch_major)
            assert got.dtype == DTYPES[dtype]
            part_want, part_magnitude = (
                first(array, batch, batch_major) for array in (want, magnitude)
            )
            if dense is exact[1]:
                assert_exact(got, part_want)
            else:
                assert_close(got, part_want, part_magnitude, products)


@every_dtype
@both_layouts
def test_spmm_transposed_rms_error_is_that_of_a_dense_product(cp, rng, dtype, batch_major):
    host = make_topology(problem("many_blocks"))
    values = normal(rng, host.nnz, dtype)
    dense = normal(rng, dense_shape(host.m, 33, batch_major), dtype)
    want = expected(host, values, dense, batch_major).want
    summed = np.float64 if dtype == "float64" else np.float32
    matrix = np.zeros(host.shape, summed)
    matrix[host.row, host.col] = values
    operand = dense.astype(summed)
    product = operand @ matrix if batch_major else matrix.T @ operand
    got = spmm_transposed(host.to_device("cuda"), put(values), put(dense), batch_major=batch_major)
    assert_rms(got, want, product.astype(DTYPES[dtype]))


@every_dtype
@both_layouts
def test_spmm_transposed_is_spmm_of_the_transpose(cp, rng, dtype, batch_major):
    host = make_topology(problem("odd_sizes"))
    other = Topology.from_coords(host.col, host.row, (host.k, host.m)).to_device("cuda")
    topology = host.to_device("cuda")
    order = topology.transposed.permutation
    for n in (1, 4, 9):
        values, dense = (put(a) for a in exact_operands(rng, host, n, dtype, batch_major))
        moved = put(to_numpy(values)[to_numpy(order)])
        want = spmm(other, moved, dense, batch_major=batch_major)
        got = spmm_transposed(topology, values, dense, batch_major=batch_major)
        assert_exact(got, to_numpy(want).astype(np.float64))


@every_dtype
@both_layouts
def test_spmm_transposed_of_a_vector(cp, rng, dtype, batch_major):
    host = make_topology(problem("odd_sizes"))
    values, dense = exact_pair(rng, host.nnz, host.m, dtype)
    topology = host.to_device("cuda")
    got = spmm_transposed(topology, put(values), put(dense), batch_major=batch_major)
    assert_exact(got, expected(host, values, dense, False).want)


@every_dtype
def test_spmm_transposed_with_leading_axes(cp, rng, dtype):
    host = make_topology(problem("odd_sizes"))
    topology = host.to_device("cuda")
    for leading in ((2, 3), (1, 1, 1), (0, 2), (2, 0), (4, 1, 2)):
        values, dense = exact_pair(rng, host.nnz, (*leading, host.m), dtype)
        got = spmm_transposed(topology, put(values), put(dense), batch_major=True)
        assert_exact(got, expected(host, values, dense, True).want)


@every_dtype
@both_layouts
@pytest.mark.parametrize("name", ["no_entries", "no_columns", "batch_0", "no_rows"])
def test_spmm_transposed_of_nothing_is_zero(cp, dtype, batch_major, name):
    host, n = make_topology(problem(name)), problem(name).n
    values = put(np.ones(host.nnz, DTYPES[dtype]))
    dense = put(np.ones(dense_shape(host.m, n, batch_major), DTYPES[dtype]))
    out = poisoned(dense_shape(host.k, n, batch_major), DTYPES[dtype])
    topology = host.to_device("cuda")
    assert spmm_transposed(topology, values, dense, batch_major=batch_major, out=out) is out
    assert_exact(out, np.zeros(out.shape))


@pytest.mark.parametrize("layout", LAYOUTS)
@every_dtype
@both_layouts
def test_spmm_transposed_takes_operands_in_any_memory_layout(cp, rng, layout, dtype, batch_major):
    host = make_topology(problem("odd_sizes"))
    topology, lay = host.to_device("cuda"), LAYOUTS[layout]
    for n in (1, 8, 9):
        values, dense = exact_operands(rng, host, n, dtype, batch_major)
        want = expected(host, values, dense, batch_major).want
        given = [lay(cp, put(array)) for array in (values, dense)]
        before = [to_numpy(array) for array in given]
        assert_exact(spmm_transposed(topology, *given, batch_major=batch_major), want)
        for array, held in zip(given, before, strict=True):
            np.testing.assert_array_equal(to_numpy(array), held)


@every_dtype
@both_layouts
def test_spmm_transposed_writes_out_and_nothing_around_it(cp, rng, dtype, batch_major):
    host = make_topology(problem("odd_sizes"))
    topology = host.to_device("cuda")
    for n in (1, 3, 4, 9, 33):
        for margin in (64, 65):  # an aligned and an unaligned address
            values, dense = exact_operands(rng, host, n, dtype, batch_major)
            want = expected(host, values, dense, batch_major).want
            memory = poisoned(want.size + 2 * margin, DTYPES[dtype])
            out = memory[margin : margin + want.size].reshape(want.shape)
            operands = put(values, margin % 64), put(dense, margin % 64)
            got = spmm_transposed(topology, *operands, batch_major=batch_major, out=out)
            assert got is out
            assert_exact(out, want)
            around = to_numpy(memory).astype(np.float64)
            assert np.isnan(around[:margin]).all()
            assert np.isnan(around[-margin:]).all()


def test_spmm_transposed_refuses_and_changes_nothing(cp, rng):
    topology = make_topology(problem("odd_sizes")).to_device("cuda")
    values = put(normal(rng, topology.nnz, "float32"))
    dense, out = (put(normal(rng, (9, size), "float32")) for size in (topology.m, topology.k))
    held = (values, dense, out, topology.row_offsets, topology.columns, *topology.transposed)
    before = [to_numpy(array) for array in held]
    for arguments, keywords, error in (
        ((None, values, dense), {}, TypeError),
        ((topology, values[1:], dense), {}, ValueError),
        ((topology, values, dense[:, 1:]), {}, ValueError),
        ((topology, values, out), {}, ValueError),
        ((topology, values, dense.astype(np.float64)), {}, TypeError),
        ((topology, values, to_numpy(dense)), {}, ValueError),
        ((topology.to_device("cpu"), values, dense), {}, ValueError),
        ((topology, values, dense), {"out": out[1:]}, ValueError),
        ((topology, values, dense), {"out": out.astype(np.float16)}, TypeError),
        ((topology, values, dense), {"out": to_numpy(out)}, TypeError),
        ((topology, values, dense), {"out": cp.asfortranarray(out)}, ValueError),
    ):
        with pytest.raises(error, match=r"^spmm_transposed: .* must .*, got "):
            spmm_transposed(*arguments, **{"batch_major": True, "out": out, **keywords})
    for array, kept in zip(held, before, strict=True):
        np.testing.assert_array_equal(to_numpy(array), kept)
