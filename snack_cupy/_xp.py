"""Array modules: NumPy and CuPy told apart without importing CuPy."""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType
from typing import Any

import numpy as np

Array = Any  # numpy.ndarray or cupy.ndarray


def is_numpy(array: object) -> bool:
    """Whether ``array`` is a ``numpy.ndarray``."""
    return isinstance(array, np.ndarray)


def is_cupy(array: object) -> bool:
    """Whether ``array`` is a ``cupy.ndarray``; never imports CuPy."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(array, getattr(cupy, "ndarray", ()))


def is_array(array: object) -> bool:
    """Whether ``array`` is a NumPy or CuPy array."""
    return is_numpy(array) or is_cupy(array)


def get_array_module(*arrays: object) -> ModuleType:
    """The module (``numpy`` or ``cupy``) whose arrays these are: CuPy if any of them is CuPy's."""
    if any(is_cupy(array) for array in arrays):
        return sys.modules["cupy"]
    return np


def dtype_name(array: Array) -> str:
    """Name of the array's dtype, e.g. ``"float32"`` or ``"bfloat16"``."""
    return str(array.dtype.name)


def device_of(array: Array) -> str:
    """``"cpu"`` for a NumPy array, ``"cuda:<index>"`` for a CuPy array."""
    return f"cuda:{array.device.id}" if is_cupy(array) else "cpu"


def on_device(array: Array) -> contextlib.AbstractContextManager[Any]:
    """Makes the CUDA device of ``array`` current inside ``with``; nothing for a NumPy array."""
    return array.device if is_cupy(array) else contextlib.nullcontext()
