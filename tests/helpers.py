"""Problems, inputs, oracles and checks shared by the CPU and the GPU tests.

Every kernel and reference is checked twice. *Exact*: on inputs whose sums have no rounding error in
the type they are accumulated in, the result must equal the oracle's. *Bounded*: on normal inputs
the error must stay below what so many additions in that type can lose. No test has a tolerance of
its own. Arrays may be NumPy's or CuPy's; oracles are computed on the host in a wider type.
"""

import math
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from snack_cupy import Topology, _tensor, dispatch

DTYPES = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
# Largest relative error of one operation in the type sums are taken in, and of one conversion to
# the type of the result where that is narrower, with half its smallest subnormal number.
EPS_ACC = {"float32": 2.0**-24, "float64": 2.0**-53, "float16": 2.0**-24, "bfloat16": 2.0**-24}
EPS_OUT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
HALF_TINY = {"float16": 2.0**-25, "bfloat16": 2.0**-134}


# Problems


class Problem(NamedTuple):
    """A sparse (m, k) matrix of nnz entries beside a dense operand of n columns or batch rows."""

    name: str
    m: int
    k: int
    n: int
    nnz: int
    pattern: str = "uniform"


PROBLEMS = (
    Problem("one_element", 1, 1, 1, 1),
    Problem("no_entries", 5, 7, 3, 0),
    Problem("no_rows", 0, 6, 4, 0),
    Problem("no_columns", 6, 0, 4, 0),
    Problem("batch_0", 8, 6, 0, 20),
    Problem("one_row", 1, 40, 5, 17),
    Problem("one_column", 40, 1, 5, 17),
    Problem("one_vector", 33, 29, 1, 200),
    Problem("empty_rows_and_columns", 30, 40, 6, 60, "holes"),
    Problem("every_entry", 9, 17, 8, 153),
    Problem("odd_sizes", 67, 129, 33, 1000),
    Problem("constant_fan_in", 48, 64, 16, 384, "fan_in"),
    Problem("one_long_row", 5, 3000, 7, 2040, "long_row"),
    Problem("many_blocks", 700, 300, 70, 20000),
    Problem("int32_columns", 6, 65539, 3, 3000, "ends"),
    Problem("int32_rows", 65539, 6, 3, 3000, "ends"),
)
# Those where nothing is multiplied, so that only shape, zeros and bias are left to check.
EMPTY = tuple(p.name for p in PROBLEMS if p.nnz * p.n == 0)


def problem(name):
    """The problem of that name."""
    return next(p for p in PROBLEMS if p.name == name)


def problem_ids(problems):
    """Readable test ids."""
    return [f"{p.name}-{p.m}x{p.k}x{p.n}-nnz{p.nnz}" for p in problems]


def make_topology(problem, seed=0):
    """The structure of a problem, in NumPy arrays."""
    rng = np.random.default_rng([seed, *problem.name.encode()])
    _, m, k, _, nnz, pattern = problem
    if pattern == "fan_in":
        per_row = nnz // m
        columns = np.concatenate([rng.choice(k, per_row, replace=False) for _ in range(m)])
        return Topology.from_coords(np.repeat(np.arange(m), per_row), columns, (m, k))
    if pattern == "holes":
        # Only odd rows and odd columns hold entries, so the first ones are empty.
        cells = rng.choice((m // 2) * (k // 2), nnz, replace=False)
        return Topology.from_coords(cells // (k // 2) * 2 + 1, cells % (k // 2) * 2 + 1, (m, k))
    if pattern == "long_row":
        # Row 2 holds 2000 entries, so that 32 lanes turn many times; the others share the rest.
        long = rng.choice(k, 2000, replace=False)
        rest = rng.choice(4 * k, nnz - 2000, replace=False)
        row = np.concatenate([np.full(2000, 2), np.array([0, 1, 3, 4])[rest // k]])
        return Topology.from_coords(row, np.concatenate([long, rest % k]), (m, k))
    cells = rng.choice(m * k, nnz, replace=False) if nnz else np.empty(0, np.int64)
    if pattern == "ends":
        cells = np.union1d(cells[2:], [0, m * k - 1])  # the largest index needs 32 bits
    return Topology.from_coords(cells // max(k, 1), cells % max(k, 1), (m, k))


# Choices


def prefer_tensor(monkeypatch, pair=None):
    """Let the kernels on tensor cores be expected to take no time; of the two the one asked for."""
    for name in ("spmm_tiling", "sddmm_tiling"):
        made = getattr(_tensor, name)

        def tiling(*sizes, made=made):
            wanted = pair is None or len(sizes) < 7 or sizes[5] is pair
            return made(*sizes)._replace(microseconds=1e-9 if wanted else 1.0)

        monkeypatch.setattr(_tensor, name, tiling)
    dispatch._plan.cache_clear()


# Inputs


def normal(rng, shape, dtype):
    """Normally distributed numbers, rounded to the dtype of that name."""
    return rng.standard_normal(shape).astype(DTYPES[dtype])


def exact_pair(rng, shape, other_shape, dtype):
    """Two operands whose products, and sums of up to 2047 products, are exact.

    For float32 and float64: odd integers of 13 bits, which TF32 and the half types cannot hold,
    and signs; sums stay below 2^24. For the half types: small integers, exact in them.
    """
    signs = rng.choice([-1.0, 1.0], other_shape)
    if dtype in ("float32", "float64"):
        integers = rng.integers(2048, 4096, shape) * 2 + 1
        return integers.astype(DTYPES[dtype]), signs.astype(DTYPES[dtype])
    integers = rng.integers(1, 9, shape) * rng.choice([-1, 1], shape)
    return integers.astype(DTYPES[dtype]), signs.astype(DTYPES[dtype])


def _as_offset(xp, array):
    memory = xp.empty(array.size + 1, array.dtype)[1:]
    memory[...] = array.ravel()
    return memory.reshape(array.shape)


def _as_sliced(xp, array):
    memory = xp.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
    memory[..., ::2] = array
    return memory[..., ::2]


# Each gives an equal array that lies in memory another way.
LAYOUTS = {
    "transposed": lambda xp, array: xp.ascontiguousarray(array.T).T,
    "sliced": _as_sliced,
    "offset": _as_offset,
    "reversed": lambda xp, array: xp.ascontiguousarray(array[::-1])[::-1],
}


def to_numpy(array):
    """A NumPy copy of a NumPy or CuPy array; bfloat16 travels as 16-bit words."""
    if not hasattr(array, "get"):
        return np.array(array)
    if array.dtype.name == "bfloat16":
        return array.view(np.uint16).get().view(DTYPES["bfloat16"])
    return array.get()


# Oracles


class Expected(NamedTuple):
    """The exact result, the same sum over absolute values, and the number of summands.

    All three have the shape of the result (or broadcast to it).
    """

    want: np.ndarray
    magnitude: np.ndarray
    products: np.ndarray


def expected_spmm(topology, values, dense, *, batch_major=False, bias=None, transposed=False):
    """What `spmm`, or with ``transposed`` `spmm_transposed`, has to give."""
    matrix = _dense_matrix(topology, values)
    count = _dense_matrix(topology, np.ones(topology.nnz))
    if transposed:
        matrix, count = matrix.T, count.T
    operand = _widen(dense)
    products = count.sum(axis=1)
    shift = _widen(np.zeros(len(products)) if bias is None else bias)
    if bias is not None:
        products = products + 1
    if batch_major:
        want, magnitude = operand @ matrix.T + shift, abs(operand) @ abs(matrix.T) + abs(shift)
        return Expected(want, magnitude, products)
    if operand.ndim == 2:
        shift, products = shift[:, None], products[:, None]
    want, magnitude = matrix @ operand + shift, abs(matrix) @ abs(operand) + abs(shift)
    return Expected(want, magnitude, products)


def expected_sddmm(topology, left, right, *, batch_major=False):
    """What `sddmm` has to give."""
    row, col = to_numpy(topology.row), to_numpy(topology.col)
    left, right = _widen(left), _widen(right)
    if left.ndim == 1:
        left, right = (a[None] if batch_major else a[:, None] for a in (left, right))
    if batch_major:
        batch = math.prod(left.shape[:-1])
        left, right = (a.reshape(batch, a.shape[-1]).T for a in (left, right))
    terms = left[row] * right[col]
    return Expected(terms.sum(axis=1), abs(terms).sum(axis=1), np.asarray(terms.shape[1]))


def _widen(array):
    """A NumPy copy in a type that makes far smaller errors: float64, for float64 longdouble."""
    array = to_numpy(array)
    return array.astype(np.longdouble if array.dtype == np.float64 else np.float64)


def _dense_matrix(topology, values):
    values = _widen(values)
    matrix = np.zeros(topology.shape, values.dtype)
    matrix[to_numpy(topology.row), to_numpy(topology.col)] = values
    return matrix


# Checks


def assert_exact(got, want):
    """Every element equals the exact result, rounded once to the dtype of ``got``."""
    got = to_numpy(got)
    assert got.shape == want.shape
    np.testing.assert_array_equal(got.astype(np.float64), want.astype(got.dtype).astype(np.float64))


def assert_close(got, want, magnitude, products):
    """``|got - want| <= (products + 1) * eps_acc * magnitude``, plus one rounding to the dtype.

    Call it as ``assert_close(got, *expected_spmm(...))``.
    """
    got = to_numpy(got)
    name = got.dtype.name
    assert got.shape == want.shape
    eps = EPS_ACC[name] + np.finfo(want.dtype).eps / 2  # the oracle rounds as well
    bound = (products + 1) * eps * magnitude
    bound = bound + EPS_OUT.get(name, 0.0) * (abs(want) + bound) + HALF_TINY.get(name, 0.0)
    error = abs(got.astype(want.dtype) - want)
    worst = np.argmax(error - bound) if error.size else 0
    assert (error <= bound).all(), (  # a NaN is not within the bound
        f"element {np.unravel_index(worst, error.shape)} is off by {error.flat[worst]:.3g}, "
        f"more than {np.broadcast_to(bound, error.shape).flat[worst]:.3g}"
    )


def assert_rms(got, want, same_type_dense):
    """The RMS error is at most twice that of the dense product in the same type."""
    got, dense = to_numpy(got), to_numpy(same_type_dense)
    assert got.shape == dense.shape == want.shape
    assert got.dtype == dense.dtype
    error, limit = _rms(got.astype(want.dtype) - want), 2 * _rms(dense.astype(want.dtype) - want)
    assert error <= limit, f"RMS error {error:.3g}, dense has {limit / 2:.3g}"


def _rms(errors):
    return float(np.sqrt(np.mean(errors**2))) if errors.size else 0.0


def assert_coo(x, dense, *, nnz=None):
    """``x`` holds the elements of ``dense``, and everything it says about itself is true.

    ``nnz`` is the number of stored entries; by default the number of elements that are not zero.
    """
    dense: Any = to_numpy(dense)
    coords, data = to_numpy(x.coords), to_numpy(x.data)
    assert x.shape == dense.shape
    assert len(x) == dense.shape[0]
    assert (x.ndim, x.size) == (dense.ndim, dense.size)
    assert x.nnz == data.size == (np.count_nonzero(dense) if nnz is None else nnz)
    assert coords.shape == (dense.ndim, x.nnz)
    assert x.dtype == data.dtype == dense.dtype
    assert coords.dtype == (np.int32 if max(x.shape) <= 2**31 else np.int64)
    assert (coords >= 0).all()
    assert (coords < np.array(x.shape)[:, None]).all()
    # Flags, by comparison of Python tuples.
    positions = list(zip(*coords.tolist(), strict=True))
    assert x.is_sorted == (positions == sorted(positions))
    assert x.has_duplicates == (len(set(positions)) < len(positions))
    assert x.is_canonical == (x.is_sorted and not x.has_duplicates)
    # Values, summed one by one; half types in float32, then rounded once.
    narrow = data.dtype.name in EPS_OUT
    total = np.zeros(x.shape, np.float32 if narrow else data.dtype)
    np.add.at(total, tuple(coords), data.astype(total.dtype))
    np.testing.assert_array_equal(total.astype(data.dtype), dense)
    np.testing.assert_array_equal(to_numpy(x.to_dense()), dense)
