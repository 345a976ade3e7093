"""`Remap`: where each connection of a changed topology was before."""

from __future__ import annotations

from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np

from snack_cupy import _check
from snack_cupy._check import fail
from snack_cupy._xp import Array, device_of, dtype_name, get_array_module, is_array, on_device
from snack_cupy.dst import _device


class Remap:
    """For each new connection its old index, or -1 where it is new.

    Everything kept per connection (values, gradients, optimiser state, averages) follows an update
    through it. Whether a connection dropped and regrown in one update counts as a survivor is
    decided by what made the remap (see `restructure`).

    Parameters
    ----------
    new_to_old : int32 array, shape (nnz_new,)
        Entries in [-1, nnz_old), none but -1 twice. Not copied.
    nnz_old : int
    check : bool
        Check the entries, which waits for the device. The rest is always checked.

    Raises
    ------
    TypeError
        ``new_to_old`` is not an int32 array, or ``nnz_old`` not an integer.
    ValueError
        ``new_to_old`` is not 1-dimensional, holds an old index twice, or ``nnz_old`` is out of
        range.
    IndexError
        An entry is out of range.

    Examples
    --------
    >>> import numpy as np
    >>> from snack_cupy.dst import Remap
    >>> remap = Remap(np.array([1, -1, 2], np.int32), nnz_old=3)
    >>> remap, remap.kept, remap.grown, remap.dropped
    (Remap(nnz_old=3, nnz_new=3), 2, 1, 1)
    >>> remap.apply(np.array([10.0, 11.0, 12.0]))
    array([11.,  0., 12.])
    """

    def __init__(self, new_to_old: Array, nnz_old: int, *, check: bool = True) -> None:
        _check.check_array("Remap", "new_to_old", new_to_old)
        _check.check_dtype("Remap", "new_to_old", new_to_old, ("int32",))
        if new_to_old.ndim != 1:
            fail("Remap", "new_to_old", "have 1 dimension", new_to_old.ndim)
        self.nnz_old = _check.check_count("Remap", "nnz_old", nnz_old, high=_check.MAX_NNZ)
        self.new_to_old = new_to_old
        if check:
            self._check_entries()

    @classmethod
    def _from_parts(cls, new_to_old: Array, nnz_old: int) -> Remap:
        """Around an array known to be right; nothing checked or copied."""
        self = cls.__new__(cls)
        self.new_to_old, self.nnz_old = new_to_old, nnz_old
        return self

    @classmethod
    def identity(cls, nnz: int, xp: ModuleType = np) -> Remap:
        """The remap that moves nothing.

        Parameters
        ----------
        nnz : int
            Number of connections, below 2^31.
        xp : module
            ``numpy`` or ``cupy``, on its current device.

        Raises
        ------
        TypeError, ValueError
            ``nnz`` is no integer or out of range.
        """
        nnz = _check.check_count("Remap.identity", "nnz", nnz, high=_check.MAX_NNZ)
        return cls._from_parts(xp.arange(nnz, dtype=np.int32), nnz)

    @property
    def nnz_new(self) -> int:
        """Number of connections after the update."""
        return int(self.new_to_old.shape[0])

    @cached_property
    def kept(self) -> int:
        """Connections that survive; counted once, when first asked for (waits for the device)."""
        with on_device(self.new_to_old):
            return int((self.new_to_old >= 0).sum())

    @property
    def grown(self) -> int:
        """Connections that are new: ``nnz_new - kept``."""
        return self.nnz_new - self.kept

    @property
    def dropped(self) -> int:
        """Connections that are gone: ``nnz_old - kept``."""
        return self.nnz_old - self.kept

    @cached_property
    def is_identity(self) -> bool:
        """Whether nothing moves, comes or goes (waits for the device, once)."""
        if self.nnz_new != self.nnz_old:
            return False
        with on_device(self.new_to_old):
            xp = get_array_module(self.new_to_old)
            return bool((self.new_to_old == xp.arange(self.nnz_old, dtype=np.int32)).all())

    def apply(self, array: Array, fill: Any = 0, out: Array | None = None) -> Array:
        """``out[i] = array[new_to_old[i]]``, or ``fill`` where the connection is new.

        Parameters
        ----------
        array : array, shape (nnz_old, ...), any dtype, on the device of the remap
        fill : scalar, or array on the device of the remap
            For new connections; an array broadcasts to the result, e.g. one of shape
            (nnz_new, ...) with fresh values. Cast to the dtype of ``array``.
        out : array, shape (nnz_new, ...), dtype and device of `array`, optional
            Written only once the result exists; may be ``array`` itself.

        Returns
        -------
        array, shape (nnz_new, ...), dtype of `array`
            ``out`` where it is given.

        Raises
        ------
        TypeError
            ``array`` or ``out`` is no array, their dtypes differ, or ``fill`` is neither a scalar
            nor an array.
        ValueError
            A shape or a device is another one, or ``fill`` does not broadcast.

        Notes
        -----
        A pure gather: bits are copied, whatever the values are. One temporary of the result's size.

        Examples
        --------
        >>> import numpy as np
        >>> from snack_cupy.dst import Remap
        >>> remap = Remap(np.array([-1, 0], np.int32), nnz_old=1)
        >>> remap.apply(np.array([[1, 2, 3]]), fill=-5)
        array([[-5, -5, -5],
               [ 1,  2,  3]])
        """
        op = "Remap.apply"
        device = device_of(self.new_to_old)
        _check.check_array(op, "array", array)
        _check.check_same_device(op, "array", array, device)
        shape = (self.nnz_new, *array.shape[1:])
        if array.ndim == 0 or array.shape[0] != self.nnz_old:
            fail(op, "array", f"have nnz_old = {self.nnz_old} rows", f"shape {array.shape}")
        if out is not None:
            _check.check_array(op, "out", out)
            _check.check_same_device(op, "out", out, device)
            _check.check_dtype(op, "out", out, (dtype_name(array),))
            _check.check_shape(op, "out", out, shape)
        with on_device(array):
            xp = get_array_module(array)
            if isinstance(fill, int) and fill == 0 and _device.moves(array):
                result = xp.empty(shape, array.dtype)
                _device.move(array, self.new_to_old, result)
                if out is None:
                    return result
                out[...] = result
                return out
            filling = self._filling(op, fill, array.dtype, shape)
            if self.nnz_old:
                index = xp.maximum(self.new_to_old, np.int32(0))
                result = xp.take(array, index, axis=0)
                new = self.new_to_old < 0
            else:
                result = xp.empty(shape, array.dtype)
                new = xp.ones(self.nnz_new, bool)
            new = new.reshape(-1, *(1,) * (array.ndim - 1))
            xp.copyto(result, filling, where=xp.broadcast_to(new, shape))
            if out is None:
                return result
            out[...] = result
            return out

    def compose(self, later: Remap) -> Remap:
        """One remap for the update of this one followed by that of ``later``.

        A connection of the last topology is a survivor if it is one in both updates. (So one that
        was dropped here and grown later counts as new.)

        Parameters
        ----------
        later : Remap
            From the topology this one leads to, on the same device.

        Raises
        ------
        TypeError
            ``later`` is no `Remap`.
        ValueError
            Its ``nnz_old`` is not this one's ``nnz_new``, or the devices differ.

        Examples
        --------
        >>> import numpy as np
        >>> from snack_cupy.dst import Remap
        >>> first = Remap(np.array([0, 2], np.int32), nnz_old=3)
        >>> later = Remap(np.array([1, -1], np.int32), nnz_old=2)
        >>> first.compose(later).new_to_old
        array([ 2, -1], dtype=int32)
        """
        op = "Remap.compose"
        if not isinstance(later, Remap):
            fail(op, "later", "be a Remap", type(later).__name__, TypeError)
        if later.nnz_old != self.nnz_new:
            fail(op, "later.nnz_old", f"equal nnz_new ({self.nnz_new})", later.nnz_old)
        return Remap._from_parts(later.apply(self.new_to_old, fill=-1), self.nnz_old)

    def _filling(self, op: str, fill: Any, dtype: np.dtype, shape: tuple[int, ...]) -> Array:
        if not is_array(fill):
            if not np.isscalar(fill):
                fail(op, "fill", "be a scalar or an array", type(fill).__name__, TypeError)
            return dtype.type(fill)  # stays on the host: no transfer
        _check.check_same_device(op, "fill", fill, device_of(self.new_to_old))
        xp = get_array_module(fill)
        try:
            return xp.broadcast_to(fill, shape).astype(dtype, copy=False)
        except ValueError:
            fail(op, "fill", f"broadcast to {shape}", f"shape {fill.shape}")

    def _check_entries(self) -> None:
        if self.nnz_new == 0:
            return
        with on_device(self.new_to_old):
            low, high = int(self.new_to_old.min()), int(self.new_to_old.max())
            if low < -1 or high >= self.nnz_old:
                rule = f"hold entries in [-1, {self.nnz_old})"
                fail("Remap", "new_to_old", rule, low if low < -1 else high, IndexError)
            xp = get_array_module(self.new_to_old)
            twice = xp.bincount(self.new_to_old + np.int32(1), minlength=1)[1:] > 1
            if bool(twice.any()):
                fail("Remap", "new_to_old", "hold no old index twice", int(twice.argmax()))

    def __repr__(self) -> str:
        return f"Remap(nnz_old={self.nnz_old}, nnz_new={self.nnz_new})"
