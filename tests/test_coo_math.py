"""Products and arithmetic of `COOTensor` against dense NumPy."""

import numpy as np
import pytest
from coo_helpers import BFLOAT16, DENSE, FLOATS, each_dtype, each_other, random_dense, shuffled
from helpers import assert_close, assert_coo, expected_spmm

from snack_cupy import COOTensor

# Linear algebra


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.name)
@pytest.mark.parametrize("duplicates", [False, True], ids=["unsorted", "duplicates"])
def test_coo_matmul_float(dtype, duplicates, rng):
    dense = random_dense(rng, (13, 17), dtype)
    tensor = shuffled(rng, dense, duplicates)
    clean = COOTensor.from_dense(dense)
    for shape in ((17,), (17, 1), (17, 5), (17, 0)):
        other = rng.standard_normal(shape).astype(dtype)
        got = tensor @ other
        assert got.dtype == dtype
        assert_close(got, *expected_spmm(clean.topology, clean.values, other))
    for shape in ((13,), (1, 13), (5, 13), (2, 3, 13), (0, 13)):
        other = rng.standard_normal(shape).astype(dtype)
        got = other @ tensor
        assert got.dtype == dtype
        transposed = {"batch_major": True, "transposed": True}
        assert_close(got, *expected_spmm(clean.topology, clean.values, other, **transposed))


@each_other
def test_coo_matmul_other_dtypes(dtype, rng):
    dense = random_dense(rng, (13, 17), dtype)
    tensor = shuffled(rng, dense)
    for shape in ((17,), (17, 5), (17, 0)):
        other = random_dense(rng, shape, dtype)
        got = tensor @ other
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, dense @ other)
    for shape in ((13,), (5, 13), (2, 3, 13), (0, 13)):
        other = random_dense(rng, shape, dtype)
        got = other @ tensor
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, other @ dense)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("float32", "float64"),
        ("float64", "float32"),
        ("float16", "float32"),
        ("int32", "float32"),
        ("float32", "int64"),
        ("bool", "float32"),
        ("int8", "int64"),
        ("float32", "complex64"),
    ],
)
def test_coo_matmul_promotes_dtypes_as_numpy_does(left, right, rng):
    dense = random_dense(rng, (4, 6), np.dtype(left))
    other = random_dense(rng, (6, 3), np.dtype(right))
    got = shuffled(rng, dense) @ other
    want = dense @ other
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)
    got = other.T @ COOTensor.from_dense(dense.T)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want.T)


def test_coo_matmul_of_bfloat16_promotes_to_float32(rng):
    dense, other = random_dense(rng, (4, 6), BFLOAT16), np.eye(6, dtype=np.float32)
    got = COOTensor.from_dense(dense) @ other
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, dense.astype(np.float32))
    for unfit in (np.float16, np.int64):
        message = "COOTensor.matmul: dense must have a dtype that promotes with bfloat16, got"
        with pytest.raises(TypeError, match=message):
            COOTensor.from_dense(dense) @ other.astype(unfit)


def test_coo_matmul_with_the_transpose(messy):
    np.testing.assert_array_equal(messy.T @ np.eye(3), DENSE.T)
    np.testing.assert_array_equal(np.eye(4) @ messy.T, DENSE.T)


def test_coo_keeps_its_topology_and_shares_it_with_scaled_tensors(messy):
    topology = messy.topology
    assert messy.topology is topology
    assert topology.positions.tolist() == [2, 4, 7, 9]
    assert (messy * 2.0).topology.positions.tolist() == [2, 4, 7, 9]
    assert messy.coalesce().topology is topology
    clean = messy.coalesce()
    assert (clean * 2.0).topology is topology
    assert clean.astype(np.float32).topology is topology
    messy.sort_indices()
    messy.sum_duplicates()
    assert messy.topology is topology
    assert messy.T.topology is not topology


def test_coo_data_may_be_written_between_products(messy):
    np.testing.assert_array_equal(messy @ np.eye(4), DENSE)
    messy.data[...] *= 2
    np.testing.assert_array_equal(messy @ np.eye(4), 2 * DENSE)
    np.testing.assert_array_equal(messy.to_dense(), 2 * DENSE)
    assert messy.values.tolist() == [26, 0, 8, 52]


def test_coo_numpy_defers_to_it(messy):
    np.testing.assert_array_equal(np.eye(3) @ messy, DENSE)
    for scale in (np.float64(2), np.array(2.0), 2, 2.0):
        assert_coo(scale * messy, 2.0 * DENSE, nnz=4)
    assert_coo(np.full((3, 4), 2.0) * messy, 2.0 * DENSE, nnz=4)
    assert_coo(messy * np.full((3, 4), 2.0), 2.0 * DENSE, nnz=4)
    with pytest.raises(ValueError, match=r"ask for a dense result with to_dense\(\)"):
        np.add(messy, 1.0)


@pytest.mark.parametrize("other", [[1, 2, 3, 4], "x", None, 3.0], ids=str)
def test_coo_matmul_takes_arrays_only(messy, other):
    with pytest.raises(TypeError, match="unsupported operand"):
        messy @ other
    with pytest.raises(TypeError, match="unsupported operand"):
        other @ messy


@pytest.mark.parametrize(
    ("product", "message"),
    [
        (lambda a: a @ np.ones(3), r"dense must have shape \(4,\) or \(..., 4, n\), got \(3,\)"),
        (
            lambda a: a @ np.ones((3, 4)),
            r"must have shape \(4,\) or \(..., 4, n\), got \(3, 4\)",
        ),
        (lambda a: a @ np.ones((1, 3, 2)), r"dense must have shape \(4,\) or \(..., 4, n\), got"),
        (lambda a: a @ np.array(1.0), "dense must have at least 1 dimension, got 0"),
        (lambda a: np.ones(4) @ a, r"dense must have shape \(..., 3\), got \(4,\)"),
        (lambda a: np.ones((3, 4)) @ a, r"dense must have shape \(..., 3\), got \(3, 4\)"),
        (lambda a: np.array(1.0) @ a, "dense must have at least 1 dimension, got 0"),
    ],
    ids=["vector", "matrix", "3d", "0d", "rvector", "rmatrix", "r0d"],
)
def test_coo_matmul_rejects_shapes(messy, product, message):
    for tensor in (messy, messy.astype(np.int64)):
        with pytest.raises(ValueError, match=f"COOTensor.matmul: .*{message}"):
            product(tensor)


@pytest.mark.parametrize(
    "use", ["topology", "matmul", "to_scipy", "row", "col"], ids=lambda name: name
)
def test_coo_of_3_dimensions_has_no_linear_algebra(use):
    tensor = COOTensor.from_dense(np.ones((2, 2, 2)))
    uses = {"matmul": lambda t: t @ np.ones(2), "to_scipy": lambda t: t.to_scipy()}
    error = AttributeError if use in ("row", "col") else ValueError
    message = f"COOTensor.{use}: the tensor must have 2 dimensions, got 3"
    with pytest.raises(error, match=message):
        uses.get(use, lambda t: getattr(t, use))(tensor)


# Elementwise


@each_dtype
def test_coo_scalar_arithmetic_has_numpys_dtypes(dtype, rng):
    dense = random_dense(rng, (4, 6), dtype)
    scalars = [2, 2.0, np.float32(2), True]
    if dtype != BFLOAT16:
        scalars += [2j, np.int16(2), np.bool_(True), np.array(2.0)]
    for tensor in (COOTensor.from_dense(dense), shuffled(rng, dense)):
        for scalar in scalars:
            assert_scaled(tensor * scalar, dense, dense * scalar, scalar)
            assert_scaled(scalar * tensor, dense, scalar * dense, scalar)
            assert_scaled(tensor / scalar, dense, dense / scalar, scalar)


def assert_scaled(got, dense, want, scalar):
    if dense.dtype == BFLOAT16 and isinstance(scalar, int | float):
        want = want.astype(BFLOAT16)  # a Python number does not decide the dtype
    assert_coo(got, want, nnz=np.count_nonzero(dense))


@each_dtype
def test_coo_negation(dtype, rng):
    dense = random_dense(rng, (4, 6), dtype)
    tensor = shuffled(rng, dense)
    if dtype.kind == "b":
        with pytest.raises(TypeError):
            _ = -tensor
    else:
        assert_coo(-tensor, -dense, nnz=tensor.nnz)
        assert_coo(tensor, dense, nnz=tensor.nnz)


def test_coo_scalars_act_on_stored_entries_only(messy):
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient = messy / 0.0
        assert (messy * np.inf).to_dense()[0, 0] == 0
    assert np.isnan(quotient.data).sum() == 1
    assert np.count_nonzero(quotient.to_dense()) == 4


@pytest.mark.parametrize(
    "scalar", ["2", None, [2], object()], ids=["str", "None", "list", "object"]
)
def test_coo_arithmetic_takes_numbers_only(messy, scalar):
    for product in (lambda: messy * scalar, lambda: scalar * messy, lambda: messy / scalar):
        with pytest.raises(TypeError):
            product()
    with pytest.raises(ValueError, match="must keep zeros zero"):
        _ = 2 / messy


def test_coo_astype(messy):
    assert_coo(messy.astype(np.int16), DENSE.astype(np.int16), nnz=4)
    assert_coo(messy.astype("complex128"), DENSE.astype(complex), nnz=4)
    assert messy.astype(np.float64, copy=False) is messy
    same = messy.astype(float)
    assert not np.shares_memory(same.data, messy.data)
    assert_coo(same, DENSE.astype(float), nnz=6)
    message = "COOTensor.astype: dtype must have a boolean or numeric dtype, got object"
    with pytest.raises(TypeError, match=message):
        messy.astype(object)
