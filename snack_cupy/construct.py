"""Sparse tensors made from few numbers: identity and diagonals."""

from __future__ import annotations

from typing import Any

import numpy as np

from snack_cupy import _check, _coords
from snack_cupy._check import fail
from snack_cupy._xp import Array, get_array_module, is_array, on_device
from snack_cupy.coo import COOTensor
from snack_cupy.topology import device_name, mover


def eye(
    m: int, k: int | None = None, *, offset: int = 0, dtype: Any = np.float64, device: str = "cpu"
) -> COOTensor:
    """Ones on one diagonal of an (m, k) matrix.

    Parameters
    ----------
    m, k : int
        Sizes; `k` is `m` by default.
    offset : int
        Which diagonal: elements (i, i + offset).
    dtype : dtype
    device : str
        ``"cpu"``, ``"cuda"`` or ``"cuda:<index>"``.

    Raises
    ------
    TypeError, ValueError
        A size is no integer or negative.

    Examples
    --------
    >>> import snack_cupy
    >>> snack_cupy.eye(2, 3, offset=1).to_dense()
    array([[0., 1., 0.],
           [0., 0., 1.]])
    """
    m, k = _check.check_matrix_shape("eye", (m, m if k is None else k))
    length = max(min(m, k - offset) if offset >= 0 else min(m + offset, k), 0)
    return _on_diagonal(mover(device_name(device))(np.ones(length, dtype)), offset, (m, k))


def diag(values: Array, *, offset: int = 0) -> COOTensor:
    """Square matrix with ``values`` (n,) on diagonal ``offset``; zeros among them are stored.

    Parameters
    ----------
    values : array, shape (n,)
        Copied; a CuPy array gives a tensor on its device.
    offset : int
        Which diagonal: elements (i, i + offset).

    Raises
    ------
    TypeError, ValueError
        `values` is no numeric array of 1 dimension.
    """
    array: Array = values if is_array(values) else np.asarray(values)
    if array.ndim != 1:
        fail("diag", "values", "have 1 dimension", array.ndim)
    _coords.check_value_dtype("diag", "values", array.dtype)
    size = array.shape[0] + abs(offset)
    return _on_diagonal(array.copy(), offset, (size, size))


def _on_diagonal(data: Array, offset: int, shape: tuple[int, ...]) -> COOTensor:
    with on_device(data):
        xp = get_array_module(data)
        index = xp.arange(data.shape[0], dtype=_coords.coords_dtype(shape))
        coords = xp.stack([index + max(-offset, 0), index + max(offset, 0)])
        coords = coords.astype(_coords.coords_dtype(shape), copy=False)
        return COOTensor._from_parts(coords, data, shape, is_sorted=True, has_duplicates=False)
