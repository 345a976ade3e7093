"""Tensors and parametrisations shared by the tests of `COOTensor`."""

import ml_dtypes
import numpy as np
import pytest

from snack_cupy import COOTensor

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = [np.dtype(name) for name in ("float32", "float64", "float16")] + [BFLOAT16]
OTHERS = [np.dtype(name) for name in ("bool", "int8", "uint16", "int64", "complex64")]
each_dtype = pytest.mark.parametrize("dtype", FLOATS + OTHERS, ids=lambda d: d.name)
each_other = pytest.mark.parametrize("dtype", OTHERS, ids=lambda d: d.name)
SHAPES = [(7,), (4, 6), (3, 4, 5), (2, 3, 2, 3)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
EMPTY_SHAPES = [(0,), (5,), (0, 4), (4, 0), (0, 0), (3, 4), (2, 0, 3), (2, 3, 4)]

# Unsorted, with the positions (0, 2) and (2, 1) stored twice and a zero stored at (1, 0):
#   [[0  0 13  0]
#    [0  0  0  4]
#    [0 26  0  0]]
ROW, COL = [2, 0, 1, 2, 0, 1], [1, 2, 0, 1, 2, 3]
DATA = [20, 10, 0, 6, 3, 4]
DENSE = np.array([[0, 0, 13, 0], [0, 0, 0, 4], [0, 26, 0, 0]])


def random_dense(rng, shape, dtype, density=0.4):
    """Small integers (exact in every dtype) with about that share of elements not zero."""
    dense = rng.integers(-4, 5, shape) * (rng.random(shape) < density)
    return abs(dense).astype(dtype) if dtype.kind in "bu" else dense.astype(dtype)


def shuffled(rng, dense, duplicates=True):
    """An unsorted tensor of ``dense``, most elements split into two entries."""
    tensor = COOTensor.from_dense(dense)
    coords, data = tensor.coords, tensor.data
    if duplicates:
        if data.dtype.kind == "b":
            coords, data = np.tile(coords, 2), np.tile(data, 2)
        else:
            one = np.ones_like(data)
            coords, data = np.tile(coords, 2), np.concatenate([data - one, one])
    order = rng.permutation(data.size)
    return COOTensor(coords[:, order], data[order], dense.shape)
