"""Prune, grow, and both at once: new structures and the `Remap` that leads to them.

Nothing here changes its arguments: apply the result with ``topology.update(row_offsets, columns)``
and ``remap.apply(...)`` on everything kept per connection. Memory is O(nnz).

Replacing a fraction of the connections at constant nnz is SET (Mocanu et al., "Scalable training of
artificial neural networks with adaptive sparse connectivity inspired by network science", Nature
Communications 2018).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from snack_cupy import _check
from snack_cupy._check import fail
from snack_cupy._structure import split_positions
from snack_cupy._xp import Array, get_array_module, on_device
from snack_cupy.dst import _device
from snack_cupy.dst._arrays import compact
from snack_cupy.dst.drop import Criterion, check_mask, select_drop
from snack_cupy.dst.gradient import GradientGrowth
from snack_cupy.dst.grow import Growth, check_growth_count, select_growth
from snack_cupy.dst.remap import Remap
from snack_cupy.random import check_key, subkey
from snack_cupy.topology import Topology, check_topology

Change = tuple[Array, Array, Remap]
REGROWN = ("survive", "reset")


def prune(
    topology: Topology,
    values: Array | None = None,
    n: int | None = None,
    *,
    keep_mask: Array | None = None,
    criterion: str | Criterion = "magnitude",
    key: int = 0,
) -> Change:
    """Remove connections: the ``n`` a criterion selects, or all that a mask does not keep.

    Parameters
    ----------
    topology : Topology
    values : float array, shape (nnz,)
        With ``n``: what the criterion looks at.
    n : int
        In [0, nnz].
    keep_mask : bool array, shape (nnz,)
        Instead of ``values`` and ``n``: True where a connection stays. Its count is read from the
        device (one synchronisation).
    criterion : "magnitude", "random" or callable
        See `smallest_magnitude`, `random_drop`; a function ``(values, n, key)`` that returns a bool
        array, True at the ``n`` connections to drop.
    key : int
        For the criterion's random numbers.

    Returns
    -------
    row_offsets : int32 array, shape (m + 1,)
    columns : array, shape (nnz - n,), dtype of ``topology.columns``
    remap : Remap

    Raises
    ------
    TypeError, ValueError
        Not exactly one of ``n`` and ``keep_mask`` is given, or one of the arguments has another
        type, dtype, shape, device or range.

    Notes
    -----
    Source of the magnitude criterion: Han et al., "Learning both weights and connections for
    efficient neural networks", NeurIPS 2015.

    Examples
    --------
    >>> import numpy as np
    >>> from snack_cupy import Topology, dst
    >>> topology = Topology.from_mask(np.ones((2, 2)))
    >>> row_offsets, columns, remap = dst.prune(topology, np.array([3.0, -1.0, 2.0, 4.0]), 2)
    >>> row_offsets, columns, remap.new_to_old
    (array([0, 1, 2], dtype=int32), array([0, 1], dtype=uint16), array([0, 3], dtype=int32))
    """
    op = "prune"
    check_topology(op, topology)
    nnz = topology.nnz
    if (n is None) == (keep_mask is None):
        got = "neither" if n is None else "both"
        fail(op, "exactly one of n and keep_mask", "be given", got)
    if keep_mask is not None:
        check_mask(op, "keep_mask", keep_mask, nnz, topology.device)
        with on_device(topology.columns):
            count = int(keep_mask.sum())
            if _device.fits(topology):
                return _change(topology, _device.Drop(nnz - count, mask=~keep_mask))
            return _keep(topology, keep_mask, count)
    n = _check.check_count(op, "n", n, high=nnz)
    _check_values(op, topology, values)
    key = check_key(op, key)
    with on_device(topology.columns):
        if _device.fits(topology):
            return _change(topology, _drop(op, criterion, values, n, key))
        return _keep(topology, ~select_drop(op, criterion, values, n, key), nnz - n)


def grow(topology: Topology, n: int, *, growth: str | Growth = "random", key: int) -> Change:
    """Add ``n`` connections at inactive positions.

    Parameters
    ----------
    topology : Topology
    n : int
        At most the number of inactive positions, ``m * k - nnz``.
    growth : "random", GradientGrowth or callable
        See `random_growth`, `grow_by_gradient`; a function ``(topology, n, key)`` that returns
        strictly increasing inactive positions ``row * k + col``, int64.
    key : int
        For the growth's random numbers; see `snack_cupy.random.key`.

    Returns
    -------
    row_offsets : int32 array, shape (m + 1,)
    columns : array, shape (nnz + n,), dtype of ``topology.columns``
    remap : Remap

    Raises
    ------
    TypeError, ValueError
        An argument has another type or range, or nnz would reach 2^31.
    IndexError
        The growth's result is out of range.

    Notes
    -----
    Source of the random growth: Mocanu et al., "Scalable training of artificial neural networks
    with adaptive sparse connectivity inspired by network science", Nature Communications 2018.

    Examples
    --------
    >>> import numpy as np
    >>> from snack_cupy import Topology, dst
    >>> topology = Topology.from_mask(np.array([[0, 1], [1, 0]]))
    >>> row_offsets, columns, remap = dst.grow(topology, 2, key=0)
    >>> row_offsets, columns, remap.new_to_old
    (array([0, 2, 4], dtype=int32),
     array([0, 1, 0, 1], dtype=uint16),
     array([-1,  0,  1, -1], dtype=int32))
    """
    n = check_growth_count("grow", topology, n)
    key = check_key("grow", key)
    with on_device(topology.columns):
        if _on_maps("grow", topology, growth):
            return _change(topology, _device.Drop(0), n, growth, key)
        grown = select_growth("grow", growth, topology, n, key)
        positions, new_to_old, _ = _merge(topology, grown)
        return *split_positions(positions, topology.shape), Remap._from_parts(
            new_to_old, topology.nnz
        )


def restructure(
    topology: Topology,
    values: Array,
    drop_fraction: float | None = None,
    *,
    n: int | None = None,
    criterion: str | Criterion = "magnitude",
    growth: str | Growth = "random",
    key: int,
    regrown: str = "survive",
) -> Change:
    """Drop connections and grow as many at inactive positions: nnz stays what it is.

    Parameters
    ----------
    topology : Topology
    values : float array, shape (nnz,)
        What the criterion looks at.
    drop_fraction : float in [0, 1]
        ``round(drop_fraction * nnz)`` connections, halves to even, are dropped.
    n : int
        In [0, nnz]: their number itself. Exactly one of these two is given.
    criterion, growth
        As for `prune` and `grow`. The growth sees the structure after the drop, so a connection
        just dropped may grow again.
    key : int
        For the random numbers of both; see `snack_cupy.random.key`.
    regrown : "survive" or "reset"
        A connection that is dropped and grown again in this update keeps its old index in the
        remap, hence its value and state ("survive"), or is new like any other ("reset").

    Returns
    -------
    row_offsets : int32 array, shape (m + 1,)
    columns : array, shape (nnz,), dtype of ``topology.columns``
    remap : Remap
        Its ``nnz_old`` equals ``nnz_new``; ``grown`` is n, less what survives by regrowth.

    Raises
    ------
    TypeError, ValueError
        An argument has another type, dtype, shape, device or range; nothing is changed.
    IndexError
        The growth's result is out of range.

    Notes
    -----
    On CuPy nothing waits for the device, unless the matrix is huge and nearly empty (the random
    numbers take two synchronisations then), the criterion is "random" or one of the two a function,
    whose results are checked.

    Source: Mocanu et al., "Scalable training of artificial neural networks with adaptive sparse
    connectivity inspired by network science", Nature Communications 2018 (SET). Kept:
    as many connections grow at random as were dropped. Changed: the drop is by absolute value (see
    `smallest_magnitude`), and may be any criterion.

    Examples
    --------
    >>> import numpy as np
    >>> from snack_cupy import Topology, dst
    >>> topology = Topology.from_mask(np.array([[1, 1, 0], [0, 1, 0]]))
    >>> values = np.array([0.1, 2.0, 3.0])
    >>> row_offsets, columns, remap = dst.restructure(topology, values, n=1, key=5)
    >>> row_offsets, columns, remap.new_to_old
    (array([0, 1, 3], dtype=int32),
     array([1, 0, 1], dtype=uint16),
     array([ 1, -1,  2], dtype=int32))
    """
    return _restructure(topology, values, drop_fraction, n, criterion, growth, key, regrown)


def restructure_in_place(
    topology: Topology,
    values: Array,
    drop_fraction: float,
    *,
    criterion: str | Criterion,
    growth: str | Growth,
    key: int,
    regrown: str,
    reserve: Callable[[], object],
) -> Remap:
    """`restructure`, and ``topology.update`` with what it gives, but without copies of it.

    ``reserve`` is called when the decisions are made and nothing has been written: what may fail
    for want of memory goes there.
    """
    refresh: list[Callable[[], None]] = []

    def before_writing() -> None:
        reserve()
        refresh.append(topology.reserve_refresh())

    row_offsets, columns, remap = _restructure(
        topology, values, drop_fraction, None, criterion, growth, key, regrown, before_writing
    )
    if columns is topology.columns:
        refresh[0]()
    else:
        reserve()
        topology.update(row_offsets, columns)
    return remap


def _restructure(
    topology: Topology,
    values: Array,
    drop_fraction: float | None,
    n: int | None,
    criterion: str | Criterion,
    growth: str | Growth,
    key: int,
    regrown: str,
    before_writing: Callable[[], None] | None = None,
) -> Change:
    """With a function to call before, and where kernels do it, the topology's arrays are written.

    They are what is returned then.
    """
    op = "restructure"
    check_topology(op, topology)
    nnz = topology.nnz
    if (drop_fraction is None) == (n is None):
        got = "neither" if n is None else "both"
        fail(op, "exactly one of drop_fraction and n", "be given", got)
    if drop_fraction is not None:
        fraction = _check.check_fraction(op, "drop_fraction", drop_fraction, include_one=True)
        n = round(fraction * nnz)
    n = _check.check_count(op, "n", n, high=nnz)
    if regrown not in REGROWN:
        fail(op, "regrown", f"be one of {REGROWN}", repr(regrown))
    _check_values(op, topology, values)
    key = check_key(op, key)
    with on_device(topology.columns):
        if _on_maps(op, topology, growth):
            drop = _drop(op, criterion, values, n, subkey(key, 0))
            return _change(topology, drop, n, growth, subkey(key, 1), regrown, before_writing)
        dropped = select_drop(op, criterion, values, n, subkey(key, 0))
        row_offsets, columns, pruned = _keep(topology, ~dropped, nnz - n)
        remaining = Topology._from_parts(row_offsets, columns, topology.shape)
        grown = select_growth(op, growth, remaining, n, subkey(key, 1))
        positions, new_to_old, slot = _merge(remaining, grown)
        remap = pruned.compose(Remap._from_parts(new_to_old, remaining.nnz))
        if regrown == "survive":
            remap.new_to_old[slot] = _find(topology.positions, grown)
        return *split_positions(positions, topology.shape), remap


def _on_maps(op: str, topology: Topology, growth: str | Growth) -> bool:
    """Whether kernels know this growth, whose operands are checked, and this size."""
    if isinstance(growth, GradientGrowth):
        growth.check(op, topology)
    known = isinstance(growth, GradientGrowth) or growth == "random"
    return known and _device.fits(topology)


def _drop(op: str, criterion: str | Criterion, values: Array, n: int, key: int) -> _device.Drop:
    """What goes: found together with the change where magnitudes decide, else by the criterion."""
    if criterion == "magnitude":
        return _device.Drop(n, values=values)
    return _device.Drop(n, mask=select_drop(op, criterion, values, n, key))


def _change(
    topology: Topology,
    drop: _device.Drop,
    n: int = 0,
    growth: str | Growth = "random",
    key: int = 0,
    regrown: str = "survive",
    before_writing: Callable[[], None] | None = None,
) -> Change:
    """The same by kernels on maps of bits: without ``drop``, and with ``n`` more."""
    by_gradient = isinstance(growth, GradientGrowth)
    maps = _device.Maps(topology, drop, n, by_gradient=by_gradient)
    if n and isinstance(growth, GradientGrowth):
        maps.grow_by_gradient(growth.left, growth.right)
    elif n:
        maps.grow_at_random(key)
    row_offsets, columns, new_to_old = maps.structure(regrown, before_writing)
    return row_offsets, columns, Remap._from_parts(new_to_old, topology.nnz)


def _keep(topology: Topology, keep_mask: Array, count: int) -> Change:
    """The structure of the ``count`` connections that ``keep_mask`` keeps."""
    xp, nnz = topology.xp, topology.nnz
    kept = compact(keep_mask, count)
    kept_before = xp.zeros(nnz + 1, np.int32)
    kept_before[1:] = xp.cumsum(keep_mask, dtype=np.int32)
    row_offsets = kept_before[topology.row_offsets]
    return row_offsets, topology.columns[kept], Remap._from_parts(kept, nnz)


def _merge(topology: Topology, grown: Array) -> tuple[Array, Array, Array]:
    """Positions of the topology and ``grown``, in order.

    Returns them with the index each had in the topology (-1: grown), and the slots of the grown.
    """
    xp, nnz, n = topology.xp, topology.nnz, int(grown.shape[0])
    old = topology.positions
    slot = xp.searchsorted(old, grown) + xp.arange(n, dtype=np.int64)
    is_old = xp.ones(nnz + n, bool)
    is_old[slot] = False
    old_slot = compact(is_old, nnz)
    positions = xp.empty(nnz + n, np.int64)
    positions[old_slot] = old
    positions[slot] = grown
    new_to_old = xp.full(nnz + n, -1, np.int32)
    new_to_old[old_slot] = xp.arange(nnz, dtype=np.int32)
    return positions, new_to_old, slot


def _find(positions: Array, wanted: Array) -> Array:
    """Index of each ``wanted`` position in the increasing ``positions``, or -1 (int32)."""
    nnz = positions.shape[0]
    if nnz == 0:
        return wanted.astype(np.int32)  # empty too: as many grow as were dropped
    xp = get_array_module(positions)
    index = xp.minimum(xp.searchsorted(positions, wanted), nnz - 1)
    return xp.where(positions[index] == wanted, index, -1).astype(np.int32)


def _check_values(op: str, topology: Topology, values: Array) -> None:
    _check.check_array(op, "values", values)
    _check.check_dtype(op, "values", values, _check.VALUE_DTYPES)
    _check.check_shape(op, "values", values, (topology.nnz,))
    _check.check_same_device(op, "values", values, topology.device)
