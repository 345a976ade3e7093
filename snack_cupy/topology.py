"""`Topology`: which entries of a sparse matrix exist, in canonical order, and what follows."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse

from snack_cupy import _check, _jit
from snack_cupy._check import fail
from snack_cupy._xp import Array, device_of, dtype_name, get_array_module, is_numpy

NARROW_LIMIT = 65536  # sizes up to this have 16-bit indices
MAX_SIZE = 2**31 - 1


def index_dtype(size: int) -> np.dtype:
    """Dtype of indices below ``size``: uint16 where they fit, else int32."""
    return np.dtype(np.uint16 if size <= NARROW_LIMIT else np.int32)


class TransposedView(NamedTuple):
    """The same entries in column-major order.

    Attributes
    ----------
    col_offsets : int32 array, shape (k + 1,)
    rows : uint16 (where m <= 65536) or int32 array, shape (nnz,)
    permutation : int32 array, shape (nnz,)
        Entry ``j`` of the column-major order is entry ``permutation[j]`` of the canonical one.
    """

    col_offsets: Array
    rows: Array
    permutation: Array


class Topology:
    """Structure of a sparse (m, k) matrix: row-major sorted entries without duplicates.

    Rows are output features and columns input features when the matrix is a layer's weight. The
    values live elsewhere, in one dense array of length nnz in the same order.

    Parameters
    ----------
    row_offsets : integer array, shape (m + 1,)
        Entry ``i`` is where row ``i`` starts; the last one is nnz. Stored as int32.
    columns : integer array, shape (nnz,)
        Column of each entry, strictly increasing within a row. Stored as uint16 where
        k <= 65536, else int32.
    shape : (m, k)
    check : bool
        Check offsets and columns. Skipping the check on wrong arrays is undefined behaviour.

    Raises
    ------
    TypeError
        An argument is not an integer array.
    ValueError
        Sizes disagree, offsets decrease, columns of a row are not strictly increasing, or there
        are 2^31 entries or more.
    IndexError
        A column is negative or not below k.

    Examples
    --------
    >>> import numpy as np
    >>> from snack_cupy import Topology
    >>> topology = Topology.from_coords(np.array([1, 0, 1]), np.array([2, 1, 0]), (2, 3))
    >>> topology
    Topology(shape=(2, 3), nnz=3, density=0.5, device='cpu')
    >>> topology.row, topology.col
    (array([0, 1, 1], dtype=int32), array([1, 0, 2], dtype=int32))
    """

    def __init__(
        self, row_offsets: Array, columns: Array, shape: tuple[int, int], *, check: bool = True
    ) -> None:
        m, k = _check_topology_shape("Topology", shape)
        for name, array in (("row_offsets", row_offsets), ("columns", columns)):
            _check_index_array("Topology", name, array)
        _check.check_same_device("Topology", "columns", columns, device_of(row_offsets))
        _check.check_shape("Topology", "row_offsets", row_offsets, (m + 1,))
        _check.check_nnz("Topology", columns.shape[0])
        if check:
            _check_structure("Topology", row_offsets, columns, k)
        self._adopt(row_offsets.astype(np.int32), columns.astype(index_dtype(k)), (m, k), version=0)

    def _adopt(
        self, row_offsets: Array, columns: Array, shape: tuple[int, int], version: int
    ) -> None:
        self.shape = shape
        self.row_offsets = row_offsets
        self.columns = columns
        self.version = version
        self._transposed: TransposedView | None = None
        self._packed_rows: Array | None = None

    @classmethod
    def _from_parts(cls, row_offsets: Array, columns: Array, shape: tuple[int, int]) -> Topology:
        """Around arrays known to be right and of the stored dtypes; nothing checked or copied."""
        self = cls.__new__(cls)
        self._adopt(row_offsets, columns, shape, version=0)
        return self

    @classmethod
    def from_coords(cls, row: Array, col: Array, shape: tuple[int, int]) -> Topology:
        """From coordinates in any order.

        Parameters
        ----------
        row, col : integer arrays, shape (nnz,)
        shape : (m, k)

        Raises
        ------
        ValueError
            A coordinate pair occurs twice (`COOTensor` sums duplicates; a topology has no values).
        IndexError
            A coordinate is out of range.
        TypeError
            The coordinates are not integer arrays.
        """
        op = "Topology.from_coords"
        m, k = _check_topology_shape(op, shape)
        check_coords(op, row, col, (m, k))
        positions = row.astype(np.int64) * k + col
        positions.sort()
        if positions.size > 1 and bool((positions[1:] == positions[:-1]).any()):
            fail(op, "row and col", "hold no duplicate coordinates", "a pair that occurs twice")
        return cls._from_positions(positions, (m, k))

    @classmethod
    def from_mask(cls, mask: Array) -> Topology:
        """From a dense (m, k) array: an entry exists where ``mask`` is non-zero."""
        op = "Topology.from_mask"
        _check.check_array(op, "mask", mask)
        if mask.ndim != 2:
            fail(op, "mask", "have 2 dimensions", mask.ndim)
        _check_topology_shape(op, mask.shape)
        xp = get_array_module(mask)
        return cls._from_positions(xp.flatnonzero(mask), mask.shape)

    @classmethod
    def _from_positions(cls, positions: Array, shape: tuple[int, int]) -> Topology:
        """From strictly increasing linear positions ``row * k + col`` (int64)."""
        _check.check_nnz("Topology", positions.shape[0])
        row_offsets, columns = split_positions(positions, shape)
        return cls._from_parts(row_offsets, columns, (int(shape[0]), int(shape[1])))

    # Sizes

    @property
    def m(self) -> int:
        """Number of rows."""
        return self.shape[0]

    @property
    def k(self) -> int:
        """Number of columns."""
        return self.shape[1]

    @property
    def nnz(self) -> int:
        """Number of entries."""
        return int(self.columns.shape[0])

    @property
    def density(self) -> float:
        """``nnz / (m * k)``; 0 for a matrix without elements."""
        size = self.m * self.k
        return self.nnz / size if size else 0.0

    @property
    def sparsity(self) -> float:
        """``1 - density``."""
        return 1.0 - self.density

    @property
    def device(self) -> str:
        """``"cpu"`` or ``"cuda:<index>"``."""
        return device_of(self.columns)

    @property
    def xp(self) -> ModuleType:
        """The module of its arrays, ``numpy`` or ``cupy``."""
        return get_array_module(self.columns)

    @property
    def nbytes(self) -> int:
        """Bytes of every array held, derived ones included."""
        held = [self.row_offsets, self.columns, self._packed_rows, *(self._transposed or ())]
        return sum(array.nbytes for array in held if array is not None)

    # Derived from the indices

    @property
    def fan_in(self) -> Array:
        """Number of entries in each row: int32 array, shape (m,)."""
        return self.row_offsets[1:] - self.row_offsets[:-1]

    @property
    def row(self) -> Array:
        """Row of each entry: int32 array, shape (nnz,); made anew at each call."""
        return _expand_rows(self.row_offsets, self.nnz)

    @property
    def col(self) -> Array:
        """Column of each entry: int32 array, shape (nnz,); made anew at each call."""
        return self.columns.astype(np.int32)

    @property
    def positions(self) -> Array:
        """Strictly increasing ``row * k + col``: int64 array, shape (nnz,); made anew."""
        return self.row.astype(np.int64) * self.k + self.columns

    @property
    def transposed(self) -> TransposedView:
        """The column-major view, built at first use and kept until the structure changes."""
        if self._transposed is None:
            self._transposed = transpose(self.row_offsets, self.columns, self.shape)
        return self._transposed

    @property
    def packed_rows(self) -> Array:
        """Row of each entry in the narrowest index dtype, kept; only COO kernels read it."""
        if self._packed_rows is None:
            self._packed_rows = self.row.astype(index_dtype(self.m))
        return self._packed_rows

    # Changes and copies

    def update(self, row_offsets: Array, columns: Array) -> None:
        """Replace the structure; ``version`` goes up by one.

        Where nnz is unchanged every array, derived ones included, is rewritten in place, so that
        whatever holds their addresses (a captured CUDA graph, a module's buffer) stays valid.

        Parameters
        ----------
        row_offsets : int32 array, shape (m + 1,)
        columns : integer array, shape (new nnz,)
            Both canonical, as for the constructor; they are not checked again.

        Raises
        ------
        ValueError
            ``row_offsets`` has another length, or an array lives on another device.
        """
        for name, array in (("row_offsets", row_offsets), ("columns", columns)):
            _check_index_array("Topology.update", name, array)
            _check.check_same_device("Topology.update", name, array, self.device)
        _check.check_shape("Topology.update", "row_offsets", row_offsets, (self.m + 1,))
        columns = columns.astype(index_dtype(self.k), copy=False)
        if columns.shape != self.columns.shape:
            version = self.version + 1
            self._adopt(row_offsets.astype(np.int32), columns.copy(), self.shape, version)
            return
        self.row_offsets[...] = row_offsets
        self.columns[...] = columns
        self.refresh()

    def refresh(self) -> None:
        """Recompute what is derived, in place, after the index arrays themselves were written."""
        self.version += 1
        if self._transposed is not None:
            fresh = transpose(self.row_offsets, self.columns, self.shape)
            for held, new in zip(self._transposed, fresh, strict=True):
                held[...] = new
        if self._packed_rows is not None:
            self._packed_rows[...] = self.row

    def copy(self) -> Topology:
        """A topology that shares no array with this one; derived arrays are made when needed."""
        return Topology._from_parts(self.row_offsets.copy(), self.columns.copy(), self.shape)

    def to_device(self, device: str) -> Topology:
        """The topology on ``"cpu"``, ``"cuda"`` (the current device) or ``"cuda:<index>"``.

        Returns itself where it is there already.

        Raises
        ------
        ValueError
            ``device`` has another form.
        CudaUnavailableError
            There is no CuPy or no GPU.
        """
        if device == self.device or (device == "cuda" and self.device != "cpu"):
            return self
        move = mover(device)
        return Topology._from_parts(move(self.row_offsets), move(self.columns), self.shape)

    def equals(self, other: Topology) -> bool:
        """Whether both have the same shape and the same entries (on one device)."""
        return (
            self.shape == other.shape
            and self.nnz == other.nnz
            and bool((self.row_offsets == other.row_offsets).all())
            and bool((self.columns == other.columns).all())
        )

    def __repr__(self) -> str:
        return (
            f"Topology(shape={self.shape}, nnz={self.nnz}, density={self.density:.4g}, "
            f"device={self.device!r})"
        )


def mover(device: str) -> Any:
    """A function that copies an array to ``device``: "cpu", "cuda" or "cuda:<index>"."""
    if device == "cpu":
        return lambda array: array if is_numpy(array) else array.get()
    kind, _, index = device.partition(":")
    if kind != "cuda" or not (index.isdigit() or (not index and device == "cuda")):
        fail("to_device", "device", "be 'cpu', 'cuda' or 'cuda:<index>'", repr(device))
    cupy = _jit.require_cupy()

    def move(array: Array) -> Array:
        with cupy.cuda.Device(int(index) if index else None):
            return cupy.array(array)

    return move


def transpose(row_offsets: Array, columns: Array, shape: tuple[int, int]) -> TransposedView:
    """Column-major view of a canonical structure; the arrays of `TransposedView`."""
    (m, k), nnz = shape, columns.shape[0]
    xp = get_array_module(columns)
    if xp is np:
        entries = np.arange(nnz, dtype=np.int32)
        matrix = sparse.csr_array((entries, columns.astype(np.int32), row_offsets), shape=shape)
        view = matrix.tocsc()
        return TransposedView(
            view.indptr.astype(np.int32, copy=False),
            view.indices.astype(index_dtype(m)),
            view.data,
        )
    permutation = xp.argsort(columns, kind="stable").astype(np.int32)
    rows = _expand_rows(row_offsets, nnz)[permutation].astype(index_dtype(m))
    bounds = xp.arange(k + 1, dtype=np.int32)
    ordered = columns[permutation].astype(np.int32)
    return TransposedView(
        xp.searchsorted(ordered, bounds, side="left").astype(np.int32), rows, permutation
    )


def split_positions(positions: Array, shape: tuple[int, int]) -> tuple[Array, Array]:
    """Row offsets (int32) and columns (stored dtype) of sorted linear positions (int64)."""
    m, k = int(shape[0]), int(shape[1])
    xp = get_array_module(positions)
    starts = xp.arange(m + 1, dtype=np.int64) * k
    row_offsets = xp.searchsorted(positions, starts, side="left").astype(np.int32)
    columns = (positions % max(k, 1)).astype(index_dtype(k))
    return row_offsets, columns


def check_coords(op: str, row: Array, col: Array, shape: tuple[int, int]) -> None:
    """Coordinates must be equally long 1-D integer arrays on one device, within ``shape``."""
    for name, array in (("row", row), ("col", col)):
        _check_index_array(op, name, array)
    if row.shape != col.shape:
        fail(op, "row and col", "have the same length", (row.shape[0], col.shape[0]))
    _check.check_same_device(op, "col", col, device_of(row))
    _check.check_nnz(op, row.shape[0])
    if row.shape[0] == 0:
        return
    xp = get_array_module(row)
    # One copy to the host for the four bounds.
    extremes = (row.min(), row.max(), col.min(), col.max())
    bounds = xp.stack([extreme.astype(np.int64) for extreme in extremes])
    row_min, row_max, col_min, col_max = bounds.tolist()
    for name, low, high, size in (
        ("row", row_min, row_max, shape[0]),
        ("col", col_min, col_max, shape[1]),
    ):
        if low < 0 or high >= size:
            got = low if low < 0 else high
            fail(op, name, f"hold indices in [0, {size})", got, IndexError)


def _check_index_array(op: str, name: str, array: object) -> None:
    _check.check_array(op, name, array)
    if array.dtype.kind not in "iu":  # type: ignore[attr-defined]
        fail(op, name, "have an integer dtype", dtype_name(array), TypeError)
    if array.ndim != 1:  # type: ignore[attr-defined]
        fail(op, name, "have 1 dimension", array.ndim)  # type: ignore[attr-defined]


def _check_structure(op: str, row_offsets: Array, columns: Array, k: int) -> None:
    """Offsets must run from 0 to nnz without decreasing; columns must increase in each row."""
    nnz = columns.shape[0]
    first, last = int(row_offsets[0]), int(row_offsets[-1])
    if first != 0 or last != nnz:
        fail(op, "row_offsets", f"run from 0 to nnz ({nnz})", (first, last))
    offsets = row_offsets.astype(np.int64)
    if bool((offsets[1:] < offsets[:-1]).any()):
        fail(op, "row_offsets", "not decrease", "an entry below its predecessor")
    if nnz == 0:
        return
    low, high = int(columns.min()), int(columns.max())
    if low < 0 or high >= k:
        fail(op, "columns", f"hold indices in [0, {k})", low if low < 0 else high, IndexError)
    positions = _expand_rows(offsets, nnz).astype(np.int64) * k + columns
    if bool((positions[1:] <= positions[:-1]).any()):
        fail(op, "columns", "strictly increase within each row", "an entry out of order")


def _check_topology_shape(op: str, shape: Any) -> tuple[int, int]:
    m, k = _check.check_matrix_shape(op, shape)
    if max(m, k) > MAX_SIZE:
        fail(op, "shape", f"have no entry above {MAX_SIZE} (indices are 32-bit)", (m, k))
    return m, k


def _expand_rows(row_offsets: Array, nnz: int) -> Array:
    xp = get_array_module(row_offsets)
    if xp is np:
        rows = np.arange(row_offsets.shape[0] - 1, dtype=np.int32)
        return np.repeat(rows, np.diff(row_offsets))
    entries = xp.arange(nnz, dtype=row_offsets.dtype)
    return (xp.searchsorted(row_offsets, entries, side="right") - 1).astype(np.int32)
