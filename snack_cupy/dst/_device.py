"""Changes of a structure on the device, without a sort and without waiting for it.

The launches of ``cuda/merge.cu`` and ``cuda/grow.cu``; the results are those of the array code, bit
for bit. They work on maps of one bit for each position of the matrix, so huge matrices with few
entries are left to the array code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from snack_cupy import dispatch, kernels
from snack_cupy._counters import rounds_of
from snack_cupy._device_work import THREADS, Work, Workspace, ceil_div, pointer, runs_kernels
from snack_cupy._structure import index_dtype
from snack_cupy._xp import Array, dtype_name
from snack_cupy.dst import _gradient, _select
from snack_cupy.topology import Topology

CHUNK, PARTS = _gradient.CHUNK, _gradient.PARTS
_MARKED = 8 * THREADS  # entries that a block marks
_MOVED = 4 * THREADS
_SMALL = 2**24  # positions whose maps are always affordable: 2 MiB each
_PER_ENTRY = 256  # positions for each entry beyond that: 32 bytes for each map
_CARRIED = 51  # words of up to 4 bytes that a thread carries in registers
_LAUNCHES = 64  # of these in one update, at most
_WORDS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}


def fits(topology: Topology) -> bool:
    """Whether a change of this structure can be made by maps on the device."""
    size = topology.m * topology.k
    return (
        runs_kernels(topology.columns)
        and 0 < size < 2**31
        and size <= max(_SMALL, _PER_ENTRY * topology.nnz)
    )


class Drop(NamedTuple):
    """Which entries go: the ``n`` of smallest magnitude, or those under a mask (nnz,) of bools."""

    n: int
    values: Array | None = None
    mask: Array | None = None


class Maps:
    """The maps of one change; every method queues launches.

    ``grown`` connections come: `grow_at_random`, or `grow_by_gradient` where that is announced.
    """

    def __init__(
        self, topology: Topology, drop: Drop, grown: int, *, by_gradient: bool = False
    ) -> None:
        self.topology, self.grown, self.by_gradient = topology, grown, by_gradient and grown > 0
        self.work = Work(topology.columns)
        self.nnz_kept = topology.nnz - drop.n
        self.size = topology.m * topology.k
        self.words, self.chunks = ceil_div(self.size, 32), ceil_div(self.size, CHUNK)
        if drop.values is not None and drop.n in (0, topology.nnz):  # no threshold to look for
            everything = self.work.xp.ones(topology.nnz, bool) if drop.n else None
            drop = Drop(drop.n, mask=everything)
        self._lay_out(drop)
        self._mark(drop)

    def _lay_out(self, drop: Drop) -> None:
        self.space = space = Workspace()
        if drop.values is not None:
            _select.add_parts(space, "drop", _select.key_bits(drop.values.dtype.itemsize))
        space.add("arrivals", 4 * 8, zero=True)
        for name in ("old", "kept", "new"):
            space.add(f"{name}.counts", 4 * (self.chunks + 1), zero=True)
        for name in ("old", "kept"):
            space.add(name, 4 * self.words, zero=True)
        if self.by_gradient:
            _gradient.add_parts(space, self.size - self.nnz_kept, self.grown, self.words)
        elif self.grown:
            space.add("ranks", 4 * (self.words + 1), zero=True)
        if self.grown:
            space.add("new", 4 * self.words)
        space.allocate(self.work)

    def _mark(self, drop: Drop) -> None:
        """Old map and kept map, with their sums."""
        topology, space = self.topology, self.space
        tested, dtype = drop.mask, "uint8"
        if tested is not None:
            tested = self.work.xp.ascontiguousarray(tested)
        if drop.values is not None:
            tested = self.work.xp.ascontiguousarray(drop.values)
            dtype = dtype_name(tested)
            _select.select(self.work, space, "drop", tested, drop.n)
        self.work.launch(
            kernels.MARK_ENTRIES,
            ceil_div(topology.nnz, _MARKED),
            (topology.m, topology.k, topology.nnz, self.chunks),
            pointer(topology.row_offsets),
            pointer(topology.columns),
            pointer(tested),
            space["drop.state"] if drop.values is not None else 0,
            space["old"],
            space["kept"],
            space["old.counts"],
            space["kept.counts"],
            space["arrivals"],
            T=dtype,
            I=topology.columns.dtype.name,
        )

    def grow_at_random(self, key: int) -> None:
        """New map: the kept one, and ``grown`` random inactive positions."""
        space, domain = self.space, self.size - self.nnz_kept
        a = math.isqrt(domain - 1) + 1
        signed = key - 2**64 if key >= 2**63 else key
        self.work.launch(
            kernels.PERMUTED_RANKS,
            ceil_div(self.grown, THREADS),
            (self.grown, domain, a, ceil_div(domain, a), rounds_of(domain), signed),
            space["ranks"],
        )
        self.work.launch(
            kernels.EXPAND_RANKS,
            ceil_div(self.chunks, PARTS),
            (self.words, self.chunks),
            space["kept"],
            space["kept.counts"],
            space["ranks"],
            space["new"],
            space["new.counts"],
            space["arrivals"] + 4,
        )

    def grow_by_gradient(self, left: Array, right: Array) -> None:
        """New map: the kept one, and the ``grown`` inactive positions of largest gradient."""
        domain = self.size - self.nnz_kept
        shape = self.topology.shape
        _gradient.grow(self.work, self.space, shape, domain, self.grown, left, right)

    def structure(
        self, regrown: str, before_writing: Callable[[], None] | None = None
    ) -> tuple[Array, Array, Array]:
        """Row offsets, columns, and the old index of each new entry.

        With a function to call before, the first two are the topology's own arrays, rewritten; nnz
        must stay what it is then.
        """
        topology, space, xp = self.topology, self.space, self.work.xp
        nnz = self.nnz_kept + self.grown
        new_to_old = xp.empty(nnz, np.int32)
        if before_writing is None:
            row_offsets = xp.empty(topology.m + 1, np.int32)
            columns = xp.empty(nnz, index_dtype(topology.k))
        else:
            before_writing()
            row_offsets, columns = topology.row_offsets, topology.columns
        new = "new" if self.grown else "kept"
        self.work.launch(
            kernels.EMIT_STRUCTURE,
            self.chunks,
            (topology.m, topology.k, self.words),
            space["old"],
            space["old.counts"],
            space["old" if regrown == "survive" else "kept"],
            space[new],
            space[f"{new}.counts"],
            pointer(row_offsets),
            pointer(columns),
            pointer(new_to_old),
            I=columns.dtype.name,
        )
        return row_offsets, columns, new_to_old

    def positions(self) -> Array:
        """Positions of what has grown, in order (int64)."""
        positions = self.work.xp.empty(self.grown, np.int64)
        space = self.space
        self.work.launch(
            kernels.EMIT_POSITIONS,
            self.chunks,
            (self.words,),
            space["kept"],
            space["kept.counts"],
            space["new"],
            space["new.counts"],
            pointer(positions),
        )
        return positions


def random_growth(topology: Topology, n: int, key: int) -> Array:
    """`snack_cupy.dst.random_growth` for n > 0."""
    maps = Maps(topology, Drop(0), n)
    maps.grow_at_random(key)
    return maps.positions()


def gradient_growth(topology: Topology, left: Array, right: Array, n: int) -> Array:
    """`snack_cupy.dst.grow_by_gradient` for n > 0."""
    maps = Maps(topology, Drop(0), n, by_gradient=True)
    maps.grow_by_gradient(left, right)
    return maps.positions()


def moves(array: Array) -> bool:
    """Whether `move` can move the entries of ``array``."""
    return (
        runs_kernels(array)
        and array.ndim == 1
        and array.dtype.itemsize in _WORDS
        and array.flags.c_contiguous
    )


def move(array: Array, new_to_old: Array, out: Array) -> None:
    """``out[j] = array[new_to_old[j]]``, or zero where that is negative; no memory is shared."""
    move_addresses(new_to_old, pointer(array), pointer(out), array.dtype.itemsize)


class InPlace:
    """`move` of several arrays to where they are; what it needs is allocated beforehand.

    Parameters
    ----------
    like : array
        Of the device, which must be current.
    count : int
        Entries of each array, before and after.
    """

    def __init__(self, like: Array, count: int) -> None:
        self.work, self.count, self._launches = Work(like), count, 0
        self._space = Workspace()
        self._space.add("arrivals", 4 * _LAUNCHES, zero=True)
        self._space.allocate(self.work)

    def takes(self, itemsize: int) -> bool:
        """Whether arrays of entries of so many bytes can be moved: they are short enough."""
        return itemsize in (2, 4, 8) and self._together(itemsize) > 0

    def _together(self, itemsize: int) -> int:
        """How many arrays the grid's threads can carry at a time."""
        threads = resident_blocks(self.work.device) * THREADS
        fitting = (g for g in (3, 2, 1) if self.count <= threads * carried(itemsize, g))
        return next(fitting, 0)

    def move(self, new_to_old: Array, addresses: Sequence[int], itemsize: int) -> None:
        """Move the arrays at these addresses."""
        blocks = min(resident_blocks(self.work.device), ceil_div(self.count, THREADS))
        together = self._together(itemsize)
        for first in range(0, len(addresses), together):
            group = list(addresses[first : first + together])
            assert self._launches < _LAUNCHES
            self.work.launch(
                kernels.MOVE_IN_PLACE,
                blocks,
                (self.count,),
                pointer(new_to_old),
                *group,
                *[0] * (3 - len(group)),
                self._space["arrivals"] + 4 * self._launches,
                cooperative=True,
                W=_WORDS[itemsize],
                kTogether=len(group),
            )
            self._launches += 1


def carried(itemsize: int, together: int) -> int:
    """Entries of each of so many arrays that a thread carries, as in ``cuda/merge.cu``."""
    return _CARRIED // together // (2 if itemsize == 8 else 1)


def resident_blocks(device: int) -> int:
    """Blocks of `move_in_place` that certainly run at the same time."""
    return 3 * dispatch.device_facts(device).multiprocessors


def move_addresses(new_to_old: Array, source: int, target: int, itemsize: int) -> None:
    """`move` of entries of so many bytes (1, 2, 4 or 8) between two addresses of the device."""
    count = int(new_to_old.shape[0])
    Work(new_to_old).launch(
        kernels.MOVE_ENTRIES,
        ceil_div(count, _MOVED),
        (count,),
        pointer(new_to_old),
        source,
        target,
        W=_WORDS[itemsize],
    )
