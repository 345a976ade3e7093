"""`Topology`: which entries of a sparse matrix exist, in canonical order, and what follows."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np

from snack_cupy import _check, _jit
from snack_cupy._check import fail
from snack_cupy._structure import (
    TransposedView,
    Transposing,
    check_coords,
    check_index_array,
    check_structure,
    check_topology_shape,
    expand_rows,
    index_dtype,
    split_positions,
)
from snack_cupy._xp import Array, device_of, get_array_module, is_numpy, on_device


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

    Notes
    -----
    Compressed rows with 16-bit columns, as in Gale et al., "Sparse GPU Kernels for Deep Learning",
    SC 2020 (their mixed-precision kernels) and in the layer of SNACK, arXiv 2610.04093.

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
        m, k = check_topology_shape("Topology", shape)
        for name, array in (("row_offsets", row_offsets), ("columns", columns)):
            check_index_array("Topology", name, array)
        _check.check_same_device("Topology", "columns", columns, device_of(row_offsets))
        _check.check_shape("Topology", "row_offsets", row_offsets, (m + 1,))
        _check.check_nnz("Topology", columns.shape[0])
        with on_device(columns):
            if check:
                check_structure("Topology", row_offsets, columns, k)
            offsets, stored = row_offsets.astype(np.int32), columns.astype(index_dtype(k))
        self._adopt(offsets, stored, (m, k), version=0)

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
        m, k = check_topology_shape(op, shape)
        with on_device(row):
            check_coords(op, row, col, (m, k))
            positions = row.astype(np.int64) * k + col
            positions.sort()
            if positions.size > 1 and bool((positions[1:] == positions[:-1]).any()):
                fail(op, "row and col", "hold no duplicate coordinates", "a pair that occurs twice")
            return cls._from_positions(positions, (m, k))

    @classmethod
    def from_mask(cls, mask: Array) -> Topology:
        """From a dense array: an entry exists where ``mask`` is non-zero.

        Parameters
        ----------
        mask : array of any dtype, shape (m, k)

        Raises
        ------
        TypeError
            ``mask`` is not a NumPy or CuPy array.
        ValueError
            It has another number of dimensions, or 2^31 non-zero elements or more.
        """
        op = "Topology.from_mask"
        _check.check_array(op, "mask", mask)
        if mask.ndim != 2:
            fail(op, "mask", "have 2 dimensions", mask.ndim)
        check_topology_shape(op, mask.shape)
        with on_device(mask):
            return cls._from_positions(get_array_module(mask).flatnonzero(mask), mask.shape)

    @classmethod
    def _from_positions(cls, positions: Array, shape: tuple[int, int]) -> Topology:
        """From strictly increasing linear positions ``row * k + col`` (int64).

        Their device must be current.
        """
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
        with on_device(self.columns):
            return self.row_offsets[1:] - self.row_offsets[:-1]

    @property
    def row(self) -> Array:
        """Row of each entry: int32 array, shape (nnz,); made anew at each call."""
        with on_device(self.columns):
            return expand_rows(self.row_offsets, self.nnz)

    @property
    def col(self) -> Array:
        """Column of each entry: int32 array, shape (nnz,); made anew at each call."""
        with on_device(self.columns):
            return self.columns.astype(np.int32)

    @property
    def positions(self) -> Array:
        """Strictly increasing ``row * k + col``: int64 array, shape (nnz,); made anew."""
        with on_device(self.columns):
            return self.row.astype(np.int64) * self.k + self.columns

    @property
    def transposed(self) -> TransposedView:
        """The column-major view, built at first use and kept until the structure changes."""
        if self._transposed is None:
            with on_device(self.columns):
                transposing = Transposing(self.columns, self.shape)
                self._transposed = transposing(self.row_offsets, self.columns)
        return self._transposed

    @property
    def packed_rows(self) -> Array:
        """Row of each entry in the narrowest index dtype, kept; only COO kernels read it."""
        if self._packed_rows is None:
            with on_device(self.columns):
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
        TypeError
            An argument is not an integer array.
        ValueError
            ``row_offsets`` has another length, or an array lives on another device.
        """
        for name, array in (("row_offsets", row_offsets), ("columns", columns)):
            check_index_array("Topology.update", name, array)
            _check.check_same_device("Topology.update", name, array, self.device)
        _check.check_shape("Topology.update", "row_offsets", row_offsets, (self.m + 1,))
        with on_device(self.columns):
            if columns.shape != self.columns.shape:
                offsets, stored = row_offsets.astype(np.int32), columns.astype(index_dtype(self.k))
                self._adopt(offsets, stored, self.shape, self.version + 1)
                return
            self.row_offsets[...] = row_offsets
            self.columns[...] = columns
            self.refresh()

    def refresh(self) -> None:
        """Recompute what is derived, in place, after the index arrays themselves were written."""
        self.reserve_refresh()()

    def reserve_refresh(self) -> Callable[[], None]:
        """`refresh`, to be called later: with most of the memory it needs allocated now."""
        with on_device(self.columns):
            transposing = None
            if self._transposed is not None:
                transposing = Transposing(self.columns, self.shape)

        def refresh() -> None:
            self.version += 1
            with on_device(self.columns):
                if transposing is not None:
                    transposing(self.row_offsets, self.columns, self._transposed)
                if self._packed_rows is not None:
                    self._packed_rows[...] = self.row

        return refresh

    def copy(self) -> Topology:
        """A topology that shares no array with this one; derived arrays are made when needed."""
        with on_device(self.columns):
            return Topology._from_parts(self.row_offsets.copy(), self.columns.copy(), self.shape)

    def to_device(self, device: str) -> Topology:
        """The topology on another device; itself where it is there already.

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
        return Topology._from_parts(move(self.row_offsets), move(self.columns), self.shape)

    def equals(self, other: Topology) -> bool:
        """Whether both have the same shape and the same entries (on one device)."""
        with on_device(self.columns):
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


def check_topology(op: str, topology: object) -> None:
    """``topology`` must be a `Topology`."""
    if not isinstance(topology, Topology):
        fail(op, "topology", "be a snack_cupy.Topology", type(topology).__name__, TypeError)


def device_name(device: str) -> str:
    """``"cpu"`` or ``"cuda:<index>"`` for what `Topology.to_device` takes, once it is there."""
    if device == "cpu":
        return device
    kind, _, index = device.partition(":") if isinstance(device, str) else ("", "", "")
    if kind != "cuda" or not (index.isdecimal() or device == "cuda"):
        fail("to_device", "device", "be 'cpu', 'cuda' or 'cuda:<index>'", repr(device))
    cuda = _jit.require_cupy().cuda
    if not index:
        return f"cuda:{cuda.Device().id}"
    count = cuda.runtime.getDeviceCount()
    if int(index) >= count:
        fail("to_device", "device", f"be one of cuda:0 to cuda:{count - 1}", repr(device))
    return f"cuda:{int(index)}"


def mover(device: str) -> Callable[[Array], Array]:
    """A function that copies an array to ``device``, as `device_name` gives it."""
    if device == "cpu":
        return lambda array: array if is_numpy(array) else array.get()
    cupy = _jit.require_cupy()

    def move(array: Array) -> Array:
        with cupy.cuda.Device(int(device.removeprefix("cuda:"))):
            return cupy.array(array)

    return move
