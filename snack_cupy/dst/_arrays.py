"""An array helper of the updates."""

from __future__ import annotations

import numpy as np

from snack_cupy._xp import Array, get_array_module


def compact(mask: Array, count: int) -> Array:
    """Indices of the True entries of ``mask``, of which there are ``count``, in order (int32).

    `flatnonzero` would wait for the device to learn the count. Here each True entry is written to
    its rank, and each False one to a spare slot that is cut off.
    """
    xp = get_array_module(mask)
    slot = xp.cumsum(mask, dtype=np.int32) - np.int32(1)
    indices = xp.empty(count + 1, np.int32)
    indices[xp.where(mask, slot, np.int32(count))] = xp.arange(mask.shape[0], dtype=np.int32)
    return indices[:count]
