"""Which connections an update drops.

A criterion is a function ``(values, n, key) -> bool array (nnz,)`` that is True at exactly ``n``
connections, those to drop; ``key`` is for its random numbers.

Dropping the weakest connections is the rule of SET (Mocanu et al., "Scalable training of artificial
neural networks with adaptive sparse connectivity inspired by network science", Nature
Communications 2018), by absolute value as in RigL (Evci et al., "Rigging the lottery: making all
tickets winners", ICML 2020).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from snack_cupy import _check
from snack_cupy._check import fail
from snack_cupy._device_work import runs_kernels
from snack_cupy._xp import Array, device_of, get_array_module, on_device
from snack_cupy.dst import _select
from snack_cupy.random import permuted_ranks

Criterion = Callable[[Array, int, int], Array]


def smallest_magnitude(values: Array, n: int, key: int = 0) -> Array:
    """The ``n`` connections of smallest ``|value|``; of equal ones the lower index goes first.

    Parameters
    ----------
    values : float16, bfloat16, float32 or float64 array, shape (nnz,)
    n : int
        In [0, nnz].
    key : int
        Not used.

    Returns
    -------
    bool array, shape (nnz,)
        True at exactly ``n`` entries.

    Raises
    ------
    TypeError
        ``values`` is no array of those dtypes, or ``n`` no integer.
    ValueError
        ``values`` is not 1-dimensional, or ``n`` is out of range.

    Notes
    -----
    Magnitudes are compared as the bits of the value without its sign. So -0 equals 0, subnormals
    are told apart, and non-finite weights go last: infinity is above every finite value and NaN
    above infinity (NaNs by payload). An update must not hide that a weight has become NaN.

    A selection, not a sort; on CuPy a radix selection without synchronisation.

    Source: Han et al., "Learning both weights and connections for efficient neural networks",
    NeurIPS 2015; in dynamic training Evci et al., "Rigging the lottery: making all tickets
    winners", ICML 2020.

    Examples
    --------
    >>> import numpy as np
    >>> from snack_cupy.dst import smallest_magnitude
    >>> smallest_magnitude(np.array([0.5, -0.1, 3.0, 0.1]), 1)
    array([False,  True, False, False])
    """
    op = "smallest_magnitude"
    nnz = _check_values(op, values)
    n = _check.check_count(op, "n", n, high=nnz)
    with on_device(values):
        xp = get_array_module(values)
        if n in (0, nnz):
            return xp.full(nnz, n > 0)
        if runs_kernels(values):
            return _select.smallest(values, n)
        word = np.dtype(f"u{values.dtype.itemsize}")
        magnitude = values.view(word) & word.type(2 ** (8 * word.itemsize - 1) - 1)
        threshold = xp.partition(magnitude, n - 1)[n - 1]
        below = magnitude < threshold
        tied = magnitude == threshold
        missing = n - below.sum(dtype=np.int64)
        return below | (tied & (xp.cumsum(tied, dtype=np.int64) <= missing))


def random_drop(values: Array, n: int, key: int) -> Array:
    """``n`` random connections, every set of them equally likely.

    Parameters
    ----------
    values : float array, shape (nnz,)
        Only its length matters.
    n : int
        In [0, nnz].
    key : int
        See `snack_cupy.random.key`.

    Returns
    -------
    bool array, shape (nnz,)
        True at exactly ``n`` entries.

    Raises
    ------
    TypeError, ValueError
        As for `smallest_magnitude`; ``key`` is out of range.

    Examples
    --------
    >>> import numpy as np
    >>> from snack_cupy.dst import random_drop
    >>> int(random_drop(np.ones(10), 3, key=5).sum())
    3
    """
    nnz = _check_values("random_drop", values)
    n = _check.check_count("random_drop", "n", n, high=nnz)
    with on_device(values):
        xp = get_array_module(values)
        dropped = xp.zeros(nnz, bool)
        dropped[permuted_ranks(key, n, nnz, xp)] = True
        return dropped


CRITERIA: dict[str, Criterion] = {"magnitude": smallest_magnitude, "random": random_drop}


def select_drop(op: str, criterion: str | Criterion, values: Array, n: int, key: int) -> Array:
    """Evaluate a criterion given by name or as a function, whose result is checked (one sync)."""
    if isinstance(criterion, str):
        if criterion not in CRITERIA:
            fail(op, "criterion", f"be one of {tuple(CRITERIA)} or callable", repr(criterion))
        return CRITERIA[criterion](values, n, key)
    if not callable(criterion):
        rule = f"be one of {tuple(CRITERIA)} or callable"
        fail(op, "criterion", rule, repr(criterion), TypeError)
    dropped = criterion(values, n, key)
    argument = "the criterion's result"
    check_mask(op, argument, dropped, values.shape[0], device_of(values))
    if int(dropped.sum()) != n:
        fail(op, argument, f"be True at exactly n = {n} entries", int(dropped.sum()))
    return dropped


def check_mask(op: str, argument: str, mask: Array, nnz: int, device: str) -> None:
    """``mask`` must be a bool array of shape (nnz,) on ``device``."""
    _check.check_array(op, argument, mask)
    _check.check_dtype(op, argument, mask, ("bool",))
    _check.check_shape(op, argument, mask, (nnz,))
    _check.check_same_device(op, argument, mask, device)


def _check_values(op: str, values: Array) -> int:
    _check.check_array(op, "values", values)
    _check.check_dtype(op, "values", values, _check.VALUE_DTYPES)
    if values.ndim != 1:
        fail(op, "values", "have 1 dimension", values.ndim)
    return int(values.shape[0])
