"""The array surface of `COOTensor`, dense NumPy as the oracle; tests with ``xp`` also on a GPU."""

import os

import numpy as np
import pytest
from coo_helpers import BFLOAT16, each_shape, random_dense, shuffled
from helpers import to_numpy
from hypothesis import given, settings
from hypothesis import strategies as st

import snack_cupy
from snack_cupy import COOTensor

NAMES = ("bool", "int8", "uint16", "int64", "float16", "float32", "float64", "complex64")
each_name = pytest.mark.parametrize("dtype", NAMES)


@pytest.fixture
def xp():
    return np


def pair(rng, xp, shape, dtype, density=0.4):
    """A dense array of small integers and an unsorted tensor of it with duplicates, on a device."""
    dense = random_dense(rng, shape, np.dtype(dtype), density)
    host = shuffled(rng, dense)
    return dense, COOTensor(xp.asarray(host.coords), xp.asarray(host.data), shape)


def assert_equal(got, want):
    """Equal elements, shape and dtype; a tensor in canonical form where it says so."""
    want = np.asarray(want)
    assert tuple(got.shape) == want.shape
    assert got.dtype == want.dtype
    if isinstance(got, COOTensor):
        positions = list(zip(*to_numpy(got.coords).tolist(), strict=True))
        assert got.is_sorted == (positions == sorted(positions))
        assert got.has_duplicates == (len(set(positions)) < len(positions))
        assert got.coords.dtype == np.int32
        got = got.to_dense()
    np.testing.assert_array_equal(to_numpy(got), want)


@each_name
@each_shape
@pytest.mark.parametrize(
    "name", ["add", "subtract", "multiply", "maximum", "minimum", "not_equal", "less", "greater"]
)
def test_surface_binary(name, shape, dtype, rng, xp):
    if dtype == "bool" and name == "subtract":
        pytest.skip("NumPy subtracts no booleans")
    if dtype == "complex64" and name in ("maximum", "minimum", "less", "greater"):
        pytest.skip("complex numbers have no order")
    (a, left), (b, right) = pair(rng, xp, shape, dtype), pair(rng, xp, shape, dtype)
    function = getattr(np, name)
    assert_equal(function(left, right), function(a, b))
    row = (1, *shape[1:])
    c, single = pair(rng, xp, row, dtype)
    assert_equal(function(left, single), function(a, c))


@each_name
@each_shape
def test_surface_reductions(shape, dtype, rng, xp):
    dense, tensor = pair(rng, xp, shape, dtype, 0.7)
    axes = [None, 0, -1, tuple(range(len(shape)))] + ([(0, 1)] if len(shape) > 2 else [])
    names = ["sum", "prod", "any", "all"] + ([] if dtype == "complex64" else ["max", "min"])
    for name in names:
        for axis in axes:
            for keepdims in (False, True):
                want = getattr(dense, name)(axis=axis, keepdims=keepdims)
                assert_equal(getattr(tensor, name)(axis=axis, keepdims=keepdims), want)
    mean = tensor.mean(axis=0)
    mean = mean.to_dense() if isinstance(mean, COOTensor) else mean
    np.testing.assert_allclose(to_numpy(mean), dense.mean(axis=0), rtol=1e-3)
    assert mean.dtype == dense.mean(axis=0).dtype
    if dtype != "complex64":
        for axis in (None, 0, len(shape) - 1):
            assert_equal(tensor.argmax(axis), dense.argmax(axis))
            assert_equal(tensor.argmin(axis), dense.argmin(axis))


@pytest.mark.parametrize(
    "key",
    [
        1,
        -1,
        (1, 2),
        slice(1, None),
        slice(None, None, -1),
        (slice(3, 0, -2), slice(0, 4, 3)),
        (..., 2),
        (None, 1, ...),
        [2, 0, 0, -1],
        (slice(1, 3), [1, 1, 5]),
        np.array([True, False, True, True]),
        [],
        slice(2, 2),
    ],
    ids=repr,
)
def test_surface_indexing(key, rng, xp):
    dense, tensor = pair(rng, xp, (4, 6), "float32")
    assert_equal(tensor[key], dense[key])
    deep, tensor = pair(rng, xp, (4, 6, 3), "int64")
    assert_equal(tensor[key], deep[key])


@pytest.mark.parametrize("key", [4, (0, 6), (0, 0, 0), [4], (..., ...), 1.5, ([0], [0]), [True]])
def test_surface_indexing_refuses(key, xp):
    with pytest.raises(IndexError, match=r"COOTensor\[...\]: "):
        COOTensor(([0], [0]), xp.ones(1), (4, 6))[key]


@each_name
def test_surface_shape(dtype, rng, xp):
    dense, tensor = pair(rng, xp, (4, 6), dtype)
    for shape in ((24,), (2, 12), (2, -1, 3), (3, 2, 2, 2)):
        assert_equal(tensor.reshape(shape), dense.reshape(shape))
    assert_equal(tensor.mT, dense.T)
    for k in (-2, 0, 3, 9):
        assert_equal(tensor.tril(k), np.tril(dense, k))
        assert_equal(tensor.triu(k), np.triu(dense, k))
        assert_equal(tensor.diagonal(k), np.diagonal(dense, k) if k < 6 else dense[0, :0])
    tensor.eliminate_zeros()
    assert_equal(tensor, dense)
    assert bool((tensor.data != 0).all())


@each_name
def test_surface_joining(dtype, rng, xp):
    (a, left), (b, right) = pair(rng, xp, (4, 6), dtype), pair(rng, xp, (4, 6), "int8")
    for axis in (0, 1, -1):
        both = np.concatenate([a, b], axis=axis)
        assert_equal(snack_cupy.concatenate([left, right], axis), both)
        assert_equal(np.stack([left, right], axis), np.stack([a, b], axis))
    assert_equal(snack_cupy.kron(left, left), np.kron(a, a))


@each_name
def test_surface_sparse_times_sparse(dtype, rng, xp):
    if xp is not np and np.dtype(dtype).kind in "biu":
        pytest.skip("cuSPARSE multiplies floating and complex numbers")
    (a, left), (b, right) = pair(rng, xp, (4, 6), dtype), pair(rng, xp, (6, 5), dtype)
    assert_equal(left @ right, a @ b)
    empty = COOTensor.from_dense(xp.zeros((5, 0), dtype))
    assert_equal(right @ empty, np.zeros((6, 0), dtype))


def test_surface_batches(rng, xp):
    dense, tensor = pair(rng, xp, (4, 6), "float32")
    for batch in ((2,), (2, 3), (0,), (1,)):
        other = rng.integers(-3, 4, (*batch, 6, 5)).astype(np.float32)
        assert_equal(tensor @ xp.asarray(other), dense @ other)


def test_surface_dense_operands(rng, xp):
    dense, tensor = pair(rng, xp, (4, 6), "float64")
    other = rng.integers(1, 5, (4, 6)).astype(float)
    there = xp.asarray(other)
    for got in (tensor * there, there * tensor):
        assert_equal(got, dense * other)
    assert_equal(tensor / there, dense / other)
    assert_equal(tensor * there[:1], dense * other[:1])
    for refused in (lambda: tensor + there, lambda: there / tensor, lambda: tensor > there):
        with pytest.raises(ValueError, match=r"to_dense\(\)"):
            refused()


def test_surface_unary(rng, xp):
    dense, tensor = pair(rng, xp, (4, 6), "float64")
    for name in ("sin", "tanh", "expm1", "sign", "square", "absolute", "isnan", "floor"):
        got = getattr(np, name)(tensor).to_dense()
        np.testing.assert_allclose(to_numpy(got), getattr(np, name)(dense), rtol=1e-12)
    for name in ("exp", "cos", "log", "isfinite", "logical_not"):
        with pytest.raises(ValueError, match=r"to_dense\(\)"):
            getattr(np, name)(tensor)
    assert_equal(abs(tensor) ** 2, dense**2)
    assert_equal(tensor > 1, dense > 1)
    for refused in (lambda: tensor + 1, lambda: tensor**0, lambda: tensor < 1):
        with pytest.raises(ValueError, match=r"to_dense\(\)"):
            refused()


def test_surface_numpy_functions(rng):
    dense, tensor = pair(rng, np, (4, 6), "float64")
    for name in ("sum", "max", "min", "amax", "mean", "transpose", "argmax", "tril", "diagonal"):
        assert_equal(getattr(np, name)(tensor), getattr(np, name)(dense))
    assert_equal(np.add.reduce(tensor, axis=1), dense.sum(1))
    assert np.shape(tensor) == (4, 6)
    with pytest.raises(TypeError, match=r"to_dense\(\)"):
        np.sort(tensor)
    with pytest.raises(TypeError, match="without options"):
        np.add(tensor, tensor, out=dense)


def test_surface_bfloat16(rng):
    dense, tensor = pair(rng, np, (4, 6), BFLOAT16)
    assert_equal(tensor + tensor, dense + dense)
    assert_equal(tensor.max(axis=1), dense.max(axis=1))
    assert_equal(tensor[:, ::2], dense[:, ::2])
    both = (dense.astype(np.float32) @ dense.T.astype(np.float32)).astype(BFLOAT16)
    assert_equal(tensor @ tensor.T, both)


def test_surface_beyond_64_bits():
    size = 2**62
    tensor = COOTensor(([0, size - 1], [size - 1, 3]), [2, 3], (size, size))
    total = tensor + tensor.T
    assert total.nnz == 4
    assert total.is_canonical
    assert total.sum(axis=0).coords.tolist() == [[0, 3, size - 1]]
    with pytest.raises(ValueError, match="less than 2\\^63 elements"):
        tensor.reshape((size * size,))


def test_surface_empty(xp):
    for shape in ((0, 4), (4, 0), (3, 4)):
        tensor = COOTensor(xp.zeros((2, 0), np.int32), xp.zeros(0), shape)
        dense = np.zeros(shape)
        assert_equal(tensor + tensor, dense)
        assert_equal(tensor.sum(axis=0), dense.sum(axis=0))
        assert_equal(tensor.sum(), dense.sum())
        assert_equal(tensor[:, :2], dense[:, :2])
        if tensor.size:
            assert_equal(tensor.reshape(-1), dense.ravel())


def test_surface_construct(xp):
    device = "cpu" if xp is np else "cuda"
    for m, k, offset in ((3, 3, 0), (2, 5, 1), (5, 2, -3), (2, 2, 7)):
        got = snack_cupy.eye(m, k, offset=offset, device=device)
        assert_equal(got, np.eye(m, k, offset))
    for offset in (-1, 0, 2):
        got = snack_cupy.diag(xp.asarray([1.0, 2.0]), offset=offset)
        assert_equal(got, np.diag([1.0, 2.0], offset))


shapes = st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple)


def check_random(shape, dtype, density, seed):
    rng = np.random.default_rng(seed)
    (a, left), (b, right) = (pair(rng, np, shape, dtype, density) for _ in range(2))
    assert_equal(left + right, a + b)
    assert_equal(left * right, a * b)
    axis = int(rng.integers(len(shape)))
    assert_equal(left.sum(axis=axis), a.sum(axis=axis))
    key = tuple(slice(*rng.integers(-6, 6, 2), int(rng.choice([-2, -1, 1, 3]))) for _ in shape)
    assert_equal(left[key], a[key])
    assert_equal(left.transpose().reshape((-1,)) if a.size else left, a.T.ravel() if a.size else a)


CASES = {
    "shape": shapes,
    "dtype": st.sampled_from(NAMES),
    "density": st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    "seed": st.integers(0, 2**32 - 1),
}


@given(**CASES)
def test_surface_any_tensor(shape, dtype, density, seed):
    check_random(shape, dtype, density, seed)


@pytest.mark.slow
@pytest.mark.skipif("SNACK_SLOW" not in os.environ, reason="SNACK_SLOW is not set")
@settings(max_examples=3000)
@given(**CASES)
def test_surface_many_tensors(shape, dtype, density, seed):
    check_random(shape, dtype, density, seed)
