"""`StoredEntries`: coordinates and data of a sparse tensor, their order, duplicates and copies."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

import numpy as np

from snack_cupy import _coords
from snack_cupy._check import fail
from snack_cupy._coords import Merge
from snack_cupy._structure import MAX_SIZE
from snack_cupy._xp import Array, device_of, get_array_module, is_numpy, on_device
from snack_cupy.topology import Topology, device_name, mover

Method = TypeVar("Method", bound=Callable[..., Any])


def on_own_device(method: Method) -> Method:
    """Run a method with the tensor's own device current."""

    @functools.wraps(method)
    def wrapped(self: StoredEntries, *args: Any, **options: Any) -> Any:
        with on_device(self.data):
            return method(self, *args, **options)

    return wrapped  # type: ignore[return-value]


class StoredEntries:
    """Coordinates, data and truthful flags of a sparse tensor; base class of `COOTensor`.

    Flags that are not known are found out when asked for. The canonical form is described by a
    `snack_cupy._coords.Merge` and a `Topology`, both kept until coordinates are replaced; they
    depend on coordinates alone, so `data` may be written in place.
    """

    shape: tuple[int, ...]

    def _adopt(
        self,
        coords: Array,
        data: Array,
        shape: tuple[int, ...],
        *,
        is_sorted: bool | None = None,
        has_duplicates: bool | None = None,
    ) -> None:
        if is_numpy(coords):
            coords = coords.view()
            coords.flags.writeable = False
        self._coords = coords
        self._data = data
        self.shape = shape
        # None: not known yet.
        self._is_sorted = is_sorted
        self._has_duplicates = has_duplicates
        self._merge: Merge | None = None
        self._topology: Topology | None = None
        self._topology_version = 0

    @classmethod
    def _from_parts(
        cls,
        coords: Array,
        data: Array,
        shape: tuple[int, ...],
        *,
        is_sorted: bool | None = None,
        has_duplicates: bool | None = None,
    ) -> Self:
        """Around arrays known to be right and of the stored dtypes; nothing checked or copied.

        Flags left None are found out when asked for.
        """
        self = cls.__new__(cls)
        self._adopt(coords, data, shape, is_sorted=is_sorted, has_duplicates=has_duplicates)
        return self

    # What is stored

    @property
    def coords(self) -> Array:
        """Position of each stored entry: int32 or int64 array, shape (ndim, nnz). Not writable."""
        return self._coords

    @property
    def data(self) -> Array:
        """Value of each stored entry: array, shape (nnz,), in the order of `coords`."""
        return self._data

    @property
    def row(self) -> Array:
        """Row of each stored entry of a 2-D tensor: ``coords[0]``."""
        self._check_matrix("row", AttributeError)
        return self._coords[0]

    @property
    def col(self) -> Array:
        """Column of each stored entry of a 2-D tensor: ``coords[1]``."""
        self._check_matrix("col", AttributeError)
        return self._coords[1]

    @property
    def nnz(self) -> int:
        """Number of stored entries: zeros that are stored and duplicates count."""
        return int(self._data.shape[0])

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements, stored or not."""
        return math.prod(self.shape)

    @property
    def density(self) -> float:
        """``nnz / size``; 0 for a tensor without elements."""
        return self.nnz / self.size if self.size else 0.0

    @property
    def dtype(self) -> np.dtype:
        """Dtype of `data`."""
        return self._data.dtype

    @property
    def device(self) -> str:
        """``"cpu"`` or ``"cuda:<index>"``."""
        return device_of(self._data)

    @property
    def nbytes(self) -> int:
        """Bytes of every array held, those kept for linear algebra included."""
        held = [self._coords, self._data, *(self._merge or ())]
        kept = self._topology.nbytes if self._topology is not None else 0
        return kept + sum(array.nbytes for array in held if array is not None)

    # Order and duplicates

    @property
    def is_sorted(self) -> bool:
        """Whether the coordinates are in row-major order; equal neighbours are allowed."""
        if self._is_sorted is None:
            with on_device(self._data):
                self._is_sorted = _coords.find_sorted(self._coords, self.shape)
        return self._is_sorted

    @property
    def has_duplicates(self) -> bool:
        """Whether some position is stored twice; found by sorting where it is not known."""
        if self._has_duplicates is None:
            self._find_merge()
        return bool(self._has_duplicates)

    @property
    def is_canonical(self) -> bool:
        """Whether the coordinates are sorted and none occurs twice."""
        return self.is_sorted and not self.has_duplicates

    def _find_merge(self) -> Merge:
        """How the stored entries become canonical; sets the flags."""
        if self._merge is None:
            if self._is_sorted and self._has_duplicates is False:
                self._merge = Merge(None, None)
            else:
                with on_device(self._data):
                    self._merge = _coords.find_merge(self._coords, self.shape)
            self._is_sorted = self._merge.order is None
            self._has_duplicates = self._merge.starts is not None
        return self._merge

    @on_own_device
    def coalesce(self) -> Self:
        """The tensor in canonical form: sorted, duplicates summed; itself where it is already.

        Sums are taken in the tensor's dtype (half types: in float32, then rounded once); entries
        that cancel to zero are kept.

        Examples
        --------
        >>> from snack_cupy import COOTensor
        >>> A = COOTensor(([1, 0, 1], [0, 0, 0]), [1, 2, 3], shape=(2, 2)).coalesce()
        >>> A.coords.tolist(), A.data.tolist()
        ([[0, 1], [0, 0]], [2, 4])
        """
        merge = self._find_merge()
        if self.is_canonical:
            return self
        chosen = _coords.first_entries(merge)
        data = _coords.merge_data(merge, self._data)
        result = self._from_parts(
            self._coords[:, chosen], data, self.shape, is_sorted=True, has_duplicates=False
        )
        if self._topology is not None:
            result._keep_topology(self.topology)
        return result

    @on_own_device
    def sort_indices(self) -> None:
        """Sort the entries in row-major order, in place; duplicates stay, in their own order."""
        order = self._find_merge().order
        if order is not None:
            self._replace(self._coords[:, order], self._data[order], is_sorted=True)

    @on_own_device
    def sum_duplicates(self) -> None:
        """Sum entries of equal position, in place; the order is that of their first ones."""
        merge = self._find_merge()
        if merge.starts is None:
            return
        data = _coords.merge_data(merge, self._data)
        chosen = merge.starts
        if merge.order is not None:
            chosen = merge.order[merge.starts]
            order = chosen.argsort()
            chosen, data = chosen[order], data[order]
        known = True if merge.order is None else None  # what is left may happen to be sorted
        self._replace(self._coords[:, chosen], data, is_sorted=known, has_duplicates=False)

    def _replace(
        self,
        coords: Array,
        data: Array,
        *,
        is_sorted: bool | None,
        has_duplicates: bool | None = None,
    ) -> None:
        """Store the same tensor in another way; the canonical topology stays valid."""
        if has_duplicates is None:
            has_duplicates = self._has_duplicates
        topology, version = self._topology, self._topology_version
        self._adopt(coords, data, self.shape, is_sorted=is_sorted, has_duplicates=has_duplicates)
        self._topology, self._topology_version = topology, version

    # Linear algebra

    @property
    @on_own_device
    def topology(self) -> Topology:
        """Canonical structure of a 2-D tensor, made at first use and kept; do not update it.

        Raises
        ------
        ValueError
            The tensor is not 2-D, has 2^31 entries or more, or a size beyond 2^31 - 1.
        """
        self._check_matrix("topology")
        if self._topology is None or self._topology.version != self._topology_version:
            m, k = self.shape
            if max(m, k) > MAX_SIZE:
                rule = f"have no entry above {MAX_SIZE} (indices are 32-bit)"
                fail("COOTensor.topology", "shape", rule, self.shape)
            chosen = _coords.first_entries(self._find_merge())
            row, col = self._coords if chosen is None else self._coords[:, chosen]
            xp = get_array_module(row)
            row_offsets = xp.searchsorted(row, xp.arange(m + 1, dtype=row.dtype), side="left")
            self._keep_topology(Topology(row_offsets, col, (m, k), check=False))
        return self._topology  # type: ignore[return-value]

    def _keep_topology(self, topology: Topology) -> None:
        self._topology = topology
        self._topology_version = topology.version

    @property
    @on_own_device
    def values(self) -> Array:
        """Values in the canonical order of `topology`: array, shape (topology.nnz,).

        `data` itself where the tensor is canonical; else made anew at each call, so that `data`
        may be written between two products. `coalesce` once where that counts.
        """
        return _coords.merge_data(self._find_merge(), self._data)

    # Shape

    @on_own_device
    def transpose(self, axes: Sequence[int] | None = None) -> Self:
        """Axes in another order, reversed by default; the result shares `data`.

        Raises
        ------
        ValueError, TypeError
            `axes` is not a permutation of the axes (negative ones count from the end).
        """
        order = _coords.read_axes("COOTensor.transpose", axes, self.ndim)
        shape = tuple(self.shape[axis] for axis in order)
        kept = order == tuple(range(self.ndim))
        return self._from_parts(
            self._coords[list(order)],
            self._data,
            shape,
            is_sorted=self._is_sorted if kept else None,
            has_duplicates=self._has_duplicates,
        )

    @property
    def T(self) -> Self:
        """The tensor with its axes reversed; shares `data`."""
        return self.transpose()

    def _with_data(self, data: Array) -> Self:
        """Other values at the same coordinates, which are shared with what is derived from them."""
        result = self._from_parts(
            self._coords,
            data,
            self.shape,
            is_sorted=self._is_sorted,
            has_duplicates=self._has_duplicates,
        )
        result._merge = self._merge
        result._topology, result._topology_version = self._topology, self._topology_version
        return result

    # Copies

    @on_own_device
    def copy(self) -> Self:
        """A tensor that shares no array with this one."""
        return self._from_parts(
            self._coords.copy(),
            self._data.copy(),
            self.shape,
            is_sorted=self._is_sorted,
            has_duplicates=self._has_duplicates,
        )

    def to_device(self, device: str) -> Self:
        """The tensor on another device; itself where it is there already.

        Parameters
        ----------
        device : str
            ``"cpu"``, ``"cuda"`` (the current device) or ``"cuda:<index>"``.

        Raises
        ------
        ValueError
            ``device`` has another form, or is none of the visible devices.
        CudaUnavailableError
            There is no CuPy or no GPU.
        """
        target = device_name(device)
        if target == self.device:
            return self
        move = mover(target)
        return self._from_parts(
            move(self._coords),
            move(self._data),
            self.shape,
            is_sorted=self._is_sorted,
            has_duplicates=self._has_duplicates,
        )

    def get(self) -> Self:
        """The tensor in host memory, as CuPy's ``get``; itself where it is there already."""
        return self.to_device("cpu")

    # Python's own

    def __len__(self) -> int:
        return self.shape[0]

    def __bool__(self) -> bool:
        raise ValueError("COOTensor: the truth of a tensor must not be asked for, got bool()")

    def __repr__(self) -> str:
        return (
            f"<COOTensor: shape={self.shape}, dtype={self.dtype.name}, nnz={self.nnz}, "
            f"device={self.device!r}>"
        )

    def _check_matrix(self, name: str, error: type[Exception] = ValueError) -> None:
        if self.ndim != 2:
            fail(f"COOTensor.{name}", "the tensor", "have 2 dimensions", self.ndim, error)
