"""Which connections an update grows.

A growth is a function ``(topology, n, key) -> int64 array (n,)``: strictly increasing positions
``row * k + col`` that are not active in ``topology``, the structure after the drop; ``key`` is for
its random numbers.

Growing at random places is the rule of SET (Mocanu et al., "Scalable training of artificial neural
networks with adaptive sparse connectivity inspired by network science", Nature Communications
2018).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from snack_cupy import _check
from snack_cupy._check import fail
from snack_cupy._xp import Array, on_device
from snack_cupy.dst import _device
from snack_cupy.random import check_key, permuted_ranks
from snack_cupy.topology import Topology, check_topology

Growth = Callable[[Topology, int, int], Array]


def random_growth(topology: Topology, n: int, key: int) -> Array:
    """``n`` random inactive positions, every set of them equally likely.

    Parameters
    ----------
    topology : Topology
        Of shape (m, k).
    n : int
        At most the number of inactive positions, ``m * k - nnz``.
    key : int
        See `snack_cupy.random.key`.

    Returns
    -------
    int64 array, shape (n,)
        Strictly increasing ``row * k + col``.

    Raises
    ------
    TypeError, ValueError
        ``n`` or ``key`` is not an integer, or out of range.

    Notes
    -----
    O(nnz + n) memory; on CuPy, unless the matrix is huge and nearly empty, four maps of m * k bits
    instead, and no synchronisation. Distinct ranks among the inactive positions come from
    `permuted_ranks`. Before the j-th active position there are ``position[j] - j`` inactive
    ones, so the inactive position of rank ``r`` is ``r`` plus the number of ``j`` where that count
    is at most ``r``: a binary search, since the counts do not decrease.

    Sources: Mocanu et al., "Scalable training of artificial neural networks with adaptive sparse
    connectivity inspired by network science", Nature Communications 2018 (SET); Mitchell et al.,
    "Bandwidth-Optimal Random Shuffling for GPUs", ACM TOPC 2022 (the permutation).

    Examples
    --------
    >>> import numpy as np
    >>> from snack_cupy import Topology
    >>> from snack_cupy.dst import random_growth
    >>> topology = Topology.from_mask(np.array([[1, 0, 1], [0, 1, 1]]))
    >>> random_growth(topology, 2, key=0)
    array([1, 3])
    """
    n = check_growth_count("random_growth", topology, n)
    with on_device(topology.columns):
        xp = topology.xp
        if n and _device.fits(topology):
            return _device.random_growth(topology, n, check_key("random_growth", key))
        ranks = permuted_ranks(key, n, count_inactive(topology), xp)
        ranks.sort()
        inactive_before = topology.positions - xp.arange(topology.nnz, dtype=np.int64)
        return ranks + xp.searchsorted(inactive_before, ranks, side="right")


GROWTHS: dict[str, Growth] = {"random": random_growth}


def select_growth(op: str, growth: str | Growth, topology: Topology, n: int, key: int) -> Array:
    """Evaluate a growth given by name or as a function, whose result is checked (two syncs)."""
    if isinstance(growth, str):
        if growth not in GROWTHS:
            fail(op, "growth", f"be one of {tuple(GROWTHS)} or callable", repr(growth))
        return GROWTHS[growth](topology, n, key)
    if not callable(growth):
        fail(op, "growth", f"be one of {tuple(GROWTHS)} or callable", repr(growth), TypeError)
    grown = growth(topology, n, key)
    argument = "the growth's result"
    _check.check_array(op, argument, grown)
    _check.check_dtype(op, argument, grown, ("int64",))
    _check.check_shape(op, argument, grown, (n,))
    _check.check_same_device(op, argument, grown, topology.device)
    if n == 0:
        return grown
    if bool((grown[1:] <= grown[:-1]).any()):
        fail(op, argument, "strictly increase", "a position not above its predecessor")
    low, high = int(grown[0]), int(grown[-1])
    if low < 0 or high >= topology.m * topology.k:
        rule = f"hold positions in [0, {topology.m * topology.k})"
        fail(op, argument, rule, low if low < 0 else high, IndexError)
    if bool(topology.xp.isin(grown, topology.positions, assume_unique=True).any()):
        fail(op, argument, "hold inactive positions only", "an active one")
    return grown


def count_inactive(topology: Topology) -> int:
    """Positions without an entry: ``m * k - nnz``."""
    return topology.m * topology.k - topology.nnz


def check_growth_count(op: str, topology: Topology, n: object) -> int:
    """``n`` must be an integer in [0, number of inactive positions]; returned as a plain int."""
    check_topology(op, topology)
    n = _check.check_count(op, "n", n, high=2**63 - 1)
    inactive = count_inactive(topology)
    if n > inactive:
        fail(op, "n", f"be at most the number of inactive positions ({inactive})", n)
    _check.check_nnz(op, topology.nnz + n)
    return n
