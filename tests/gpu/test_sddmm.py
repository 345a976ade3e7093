"""sddmm on the GPU: exact and bounded, every dtype, layout, batch size, address and stride."""

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
    expected_sddmm,
    make_topology,
    normal,
    problem,
    problem_ids,
    to_numpy,
)

from snack_cupy import sddmm

BATCHES = (1, 2, 3, 4, 5, 8, 9, 33)
both_layouts = pytest.mark.parametrize(
    "batch_major", [True, False], ids=["batch_major", "feature_major"]
)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_problem = pytest.mark.parametrize("problem", PROBLEMS, ids=problem_ids(PROBLEMS))


def shapes(topology, n, batch_major):
    """Shapes of the left and the right operand."""
    sizes = (topology.m, topology.k)
    return [(n, size) if batch_major else (size, n) for size in sizes]


def first(array, n, batch_major):
    """The first ``n`` batch rows, or columns."""
    return array[:n] if batch_major else array[:, :n]


@every_problem
@every_dtype
@both_layouts
def test_sddmm_exact_and_bounded(cp, rng, problem, dtype, batch_major):
    host = make_topology(problem)
    topology = host.to_device("cuda")
    both = shapes(host, max(problem.n, *BATCHES), batch_major)
    exact = exact_pair(rng, *both, dtype)
    inexact = [normal(rng, shape, dtype) for shape in both]
    for operands in (exact, inexact):
        for batch in sorted({problem.n, *BATCHES}):
            left, right = (first(array, batch, batch_major) for array in operands)
            expected = expected_sddmm(host, left, right, batch_major=batch_major)
            got = sddmm(topology, put(left), put(right), batch_major=batch_major)
            assert got.dtype == DTYPES[dtype]
            if operands is exact:
                assert_exact(got, expected.want)
            else:
                assert_close(got, *expected)


@every_dtype
@both_layouts
def test_sddmm_of_a_long_sum(cp, rng, dtype, batch_major):
    host = make_topology(problem("constant_fan_in"))
    topology = host.to_device("cuda")
    left, right = exact_pair(rng, *shapes(host, 2000, batch_major), dtype)
    want = expected_sddmm(host, left, right, batch_major=batch_major).want
    assert_exact(sddmm(topology, put(left), put(right), batch_major=batch_major), want)


@every_dtype
@both_layouts
def test_sddmm_rms_error_is_that_of_a_dense_product(cp, rng, dtype, batch_major):
    host = make_topology(problem("many_blocks"))
    left, right = (normal(rng, shape, dtype) for shape in shapes(host, 129, batch_major))
    want = expected_sddmm(host, left, right, batch_major=batch_major).want
    summed = np.float64 if dtype == "float64" else np.float32
    wide = [array.astype(summed) for array in (left, right)]
    product = wide[0].T @ wide[1] if batch_major else wide[0] @ wide[1].T
    got = sddmm(host.to_device("cuda"), put(left), put(right), batch_major=batch_major)
    assert_rms(got, want, product[host.row, host.col].astype(DTYPES[dtype]))


@every_dtype
@both_layouts
def test_sddmm_of_vectors(cp, rng, dtype, batch_major):
    host = make_topology(problem("odd_sizes"))
    left, right = exact_pair(rng, host.m, host.k, dtype)
    want = expected_sddmm(host, left, right, batch_major=batch_major).want
    topology = host.to_device("cuda")
    assert_exact(sddmm(topology, put(left), put(right), batch_major=batch_major), want)


@every_dtype
def test_sddmm_sums_over_all_leading_axes(cp, rng, dtype):
    host = make_topology(problem("odd_sizes"))
    topology = host.to_device("cuda")
    for leading in ((2, 3), (1, 1, 1), (0, 2), (2, 0), (4, 1, 2)):
        left, right = exact_pair(rng, (*leading, host.m), (*leading, host.k), dtype)
        want = expected_sddmm(host, left, right, batch_major=True).want
        assert_exact(sddmm(topology, put(left), put(right), batch_major=True), want)


@every_dtype
@both_layouts
@pytest.mark.parametrize("name", ["no_entries", "no_columns", "batch_0", "no_rows"])
def test_sddmm_of_nothing_is_zero(cp, dtype, batch_major, name):
    host, n = make_topology(problem(name)), problem(name).n
    left, right = (put(np.ones(s, DTYPES[dtype])) for s in shapes(host, n, batch_major))
    out = poisoned(host.nnz, DTYPES[dtype])
    topology = host.to_device("cuda")
    assert sddmm(topology, left, right, batch_major=batch_major, out=out) is out
    assert_exact(out, np.zeros(host.nnz))


@every_dtype
@both_layouts
def test_sddmm_non_finite_numbers_stay_where_they_belong(cp, dtype, batch_major):
    host = make_topology(problem("odd_sizes"))
    left, right = (np.ones(shape, DTYPES[dtype]) for shape in shapes(host, 9, batch_major))
    column = int(host.col[0])
    left[(2, 3) if batch_major else (3, 2)] = np.nan
    right[(4, column) if batch_major else (column, 4)] = np.inf
    got = sddmm(host.to_device("cuda"), put(left), put(right), batch_major=batch_major)
    got = to_numpy(got).astype(np.float64)
    np.testing.assert_array_equal(np.isnan(got), host.row == 3)
    np.testing.assert_array_equal(np.isposinf(got), (host.col == column) & (host.row != 3))


@pytest.mark.parametrize("layout", LAYOUTS)
@every_dtype
@both_layouts
def test_sddmm_takes_operands_in_any_memory_layout(cp, rng, layout, dtype, batch_major):
    host = make_topology(problem("odd_sizes"))
    topology, lay = host.to_device("cuda"), LAYOUTS[layout]
    for n in (1, 8, 9):
        operands = exact_pair(rng, *shapes(host, n, batch_major), dtype)
        want = expected_sddmm(host, *operands, batch_major=batch_major).want
        given = [lay(cp, put(array)) for array in operands]
        before = [to_numpy(array) for array in given]
        assert_exact(sddmm(topology, *given, batch_major=batch_major), want)
        for array, held in zip(given, before, strict=True):
            np.testing.assert_array_equal(to_numpy(array), held)


@every_dtype
@both_layouts
def test_sddmm_writes_out_and_nothing_around_it(cp, rng, dtype, batch_major):
    host = make_topology(problem("odd_sizes"))
    topology = host.to_device("cuda")
    for n in (1, 3, 4, 9, 33):
        for margin in (64, 65):  # an aligned and an unaligned address
            operands = exact_pair(rng, *shapes(host, n, batch_major), dtype)
            want = expected_sddmm(host, *operands, batch_major=batch_major).want
            memory = poisoned(want.size + 2 * margin, DTYPES[dtype])
            out = memory[margin : margin + want.size]
            given = [put(array, margin % 64) for array in operands]
            assert sddmm(topology, *given, batch_major=batch_major, out=out) is out
            assert_exact(out, want)
            around = to_numpy(memory).astype(np.float64)
            assert np.isnan(around[:margin]).all()
            assert np.isnan(around[-margin:]).all()


def test_sddmm_refuses_and_changes_nothing(cp, rng):
    topology = make_topology(problem("odd_sizes")).to_device("cuda")
    left, right = (put(normal(rng, shape, "float32")) for shape in shapes(topology, 9, True))
    out = put(normal(rng, topology.nnz, "float32"))
    memory = put(normal(rng, topology.nnz + 9 * topology.m, "float32"))
    inside = memory[: 9 * topology.m].reshape(9, topology.m)
    held = (left, right, out, memory, topology.row_offsets, topology.columns)
    before = [to_numpy(array) for array in held]
    for arguments, keywords, error in (
        ((None, left, right), {}, TypeError),
        ((topology, right, left), {}, ValueError),
        ((topology, left[1:], right), {}, ValueError),
        ((topology, left, right[:, 1:]), {}, ValueError),
        ((topology, left, right.astype(np.float64)), {}, TypeError),
        ((topology, left, to_numpy(right)), {}, ValueError),
        ((topology, to_numpy(left), right), {}, ValueError),
        ((topology.to_device("cpu"), left, right), {}, ValueError),
        ((topology, left, right), {"out": out[1:]}, ValueError),
        ((topology, left, right), {"out": out[:, None]}, ValueError),
        ((topology, left, right), {"out": out.astype(np.float16)}, TypeError),
        ((topology, left, right), {"out": to_numpy(out)}, TypeError),
        ((topology, inside, right), {"out": memory[: topology.nnz]}, ValueError),
    ):
        with pytest.raises(error, match=r"^sddmm: .* must .*, got "):
            sddmm(*arguments, **{"batch_major": True, "out": out, **keywords})
    for array, kept in zip(held, before, strict=True):
        np.testing.assert_array_equal(to_numpy(array), kept)
