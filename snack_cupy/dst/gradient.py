"""Growth by gradient: the inactive connections whose weights' gradients are largest.

The rule of RigL (Evci et al., "Rigging the lottery: making all tickets winners", ICML 2020). The
dense gradient exists block by block only.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import numpy as np

from snack_cupy import _check
from snack_cupy._xp import Array, on_device
from snack_cupy.dst import _device
from snack_cupy.dst._gradient import widened
from snack_cupy.dst.grow import check_growth_count
from snack_cupy.topology import Topology, check_topology

_BLOCK = 2**21  # elements of the gradient that exist at a time, on NumPy
_LARGEST = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)
_SMALLEST_NORMAL = np.uint32(0x00800000)


def grow_by_gradient(topology: Topology, left: Array, right: Array, n: int) -> Array:
    """The ``n`` inactive positions where ``|left.T @ right|`` is largest.

    Parameters
    ----------
    topology : Topology
        Of shape (m, k).
    left : float array, shape (batch, m)
        Gradient of a layer's result.
    right : array, shape (batch, k), dtype of `left`
        The layer's input. The gradient of weight (i, j) is ``sum_b left[b, i] * right[b, j]``.
    n : int
        At most the number of inactive positions, ``m * k - nnz``.

    Returns
    -------
    int64 array, shape (n,)
        Strictly increasing ``row * k + col``.

    Raises
    ------
    TypeError
        An argument is of another kind or dtype.
    ValueError
        A shape or a device is another one, or ``n`` is out of range.

    Notes
    -----
    Exact: what the dense gradient's n largest magnitudes among the inactive positions are. Sums are
    float32 (those of float64 operands float64, then rounded to float32), on CuPy by fused
    multiply-adds in the order of the batch; so NumPy and CuPy agree where rounding does not decide.
    Subnormal sums count as zero, NaN above infinity; of equal magnitudes the lower position grows.

    Memory: O(nnz + n) and a block of the gradient; on CuPy five maps of m * k bits and no block,
    unless the matrix is huge and nearly empty. There nothing waits for the device; the gradient is
    computed once and sampled before, four times where that has failed (many equal magnitudes).

    Source: Evci et al., "Rigging the lottery: making all tickets winners", ICML 2020.

    Examples
    --------
    >>> import numpy as np
    >>> from snack_cupy import Topology
    >>> from snack_cupy.dst import grow_by_gradient
    >>> topology = Topology.from_mask(np.array([[1, 0, 1], [0, 1, 0]]))
    >>> grow_by_gradient(topology, np.array([[1.0, 2.0]]), np.array([[3.0, 4.0, -5.0]]), 2)
    array([3, 5])
    """
    return GradientGrowth(left, right).select("grow_by_gradient", topology, n)


@dataclass(frozen=True, eq=False)
class GradientGrowth:
    """`grow_by_gradient` as a growth, for `grow` and `restructure`.

    Parameters
    ----------
    left, right : float arrays, shapes (batch, m) and (batch, k)
        As for `grow_by_gradient`.

    Raises
    ------
    TypeError, ValueError
        When it is used: as `grow_by_gradient`.

    Examples
    --------
    >>> import numpy as np
    >>> from snack_cupy import Topology, dst
    >>> topology = Topology.from_mask(np.array([[1, 0, 1], [0, 1, 0]]))
    >>> growth = dst.GradientGrowth(np.array([[1.0, 2.0]]), np.array([[3.0, 4.0, -5.0]]))
    >>> dst.grow(topology, 1, growth=growth, key=0)[1]
    array([0, 2, 1, 2], dtype=uint16)
    """

    left: Array
    right: Array

    def __call__(self, topology: Topology, n: int, key: int = 0) -> Array:
        """The positions; the key is not used."""
        return self.select("GradientGrowth", topology, n)

    def check(self, op: str, topology: Topology) -> None:
        """Raise unless the operands fit ``topology``."""
        check_topology(op, topology)
        operands = {"left": (self.left, None), "right": (self.right, None)}
        _check.check_linear_operands(op, topology, operands)
        batch = self.left.shape[0] if self.left.ndim else 0
        _check.check_shape(op, "left", self.left, (batch, topology.m))
        _check.check_shape(op, "right", self.right, (batch, topology.k))

    def select(self, op: str, topology: Topology, n: int) -> Array:
        """`grow_by_gradient`, with errors in the name of ``op``."""
        self.check(op, topology)
        n = check_growth_count(op, topology, n)
        with on_device(topology.columns):
            if n and _device.fits(topology):
                return _device.gradient_growth(topology, self.left, self.right, n)
            return _by_blocks(topology, self.left, self.right, n)


def _by_blocks(topology: Topology, left: Array, right: Array, n: int) -> Array:
    """Block after block of rows, keeping the best ``n`` so far."""
    xp, (m, k) = topology.xp, topology.shape
    left, right = widened(left), widened(right)
    scores, positions = xp.empty(0, np.uint32), xp.empty(0, np.int64)
    step = max(1, _BLOCK // max(k, 1))
    active = topology.positions
    for row in range(0, m if n else 0, step):
        end = min(row + step, m)
        with np.errstate(over="ignore", invalid="ignore"):  # scored like any other
            fresh = _scores(xp, left[:, row:end].T @ right).ravel()
        inactive = xp.ones(fresh.shape[0], bool)
        first, last = int(topology.row_offsets[row]), int(topology.row_offsets[end])
        inactive[active[first:last] - row * k] = False
        here = xp.flatnonzero(inactive)
        scores = xp.concatenate([scores, fresh[here]])
        positions = xp.concatenate([positions, here + row * k])
        if scores.shape[0] > n:
            best = _smallest(xp, scores, n)
            scores, positions = scores[best], positions[best]
    return positions


def _scores(xp: ModuleType, gradient: Array) -> Array:
    """The better the smaller: the bits of the magnitude as float32, from the largest down."""
    rounded = xp.ascontiguousarray(gradient.astype(np.float32, copy=False))
    keys = rounded.view(np.uint32) & _LARGEST
    keys[keys > _INFINITY] = _LARGEST
    keys[keys < _SMALLEST_NORMAL] = 0
    return _LARGEST - keys


def _smallest(xp: ModuleType, scores: Array, n: int) -> Array:
    """Indices of the ``n`` smallest scores; of equal ones the lower index."""
    threshold = xp.partition(scores, n - 1)[n - 1]
    below, tied = scores < threshold, scores == threshold
    missing = n - int(below.sum())
    return xp.flatnonzero(below | (tied & (xp.cumsum(tied) <= missing)))
