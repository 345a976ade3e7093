"""A stand-in for CuPy with two devices: NumPy arrays that refuse work while the other is current.

Every function of it, and every operator and method of its arrays that CuPy would launch a kernel
for, raises where an array is not on the current device, as CuPy does between devices without peer
access. Only ``array`` copies from one device to another.
"""

import types

import numpy as np

current = [0]


class Device:
    """A device, current inside ``with``."""

    def __init__(self, id):
        self.id = id

    def __enter__(self):
        current.append(self.id)
        return self

    def __exit__(self, *error):
        current.pop()


class Array(np.ndarray):
    """A NumPy array on one of the devices."""

    def __array_finalize__(self, parent):
        self._id = getattr(parent, "_id", current[-1])

    @property
    def device(self):
        return Device(self._id)

    def __array_ufunc__(self, ufunc, method, *inputs, **keywords):
        return guarded(getattr(ufunc, method))(*inputs, **keywords)


def plain_array(value):
    """The NumPy array behind ``value``, whatever device is current."""
    return value.view(np.ndarray) if isinstance(value, Array) else value


def current_array(value):
    """As `plain_array`, also in lists; raises where an array is not on the current device."""
    if isinstance(value, list | tuple):
        return type(value)(map(current_array, value))
    if isinstance(value, Array) and value._id != current[-1]:
        raise RuntimeError(f"an array of device {value._id} while {current[-1]} is current")
    return plain_array(value)


def new(result):
    """``result`` on the current device."""
    if not isinstance(result, np.ndarray | np.generic):
        return result
    array = np.asarray(result).view(Array)
    array._id = current[-1]
    return array


def guarded(function):
    """``function`` of NumPy, on arrays of the current device."""

    def call(*arguments, **keywords):
        plain = {name: current_array(value) for name, value in keywords.items()}
        return new(function(*map(current_array, arguments), **plain))

    return call


for name in ("__getitem__", "__setitem__", "astype", "copy", "sort", "argsort", "argmax"):
    setattr(Array, name, guarded(getattr(np.ndarray, name)))


def module():
    """The stand-in, to be put in the place of ``sys.modules["cupy"]``."""
    fake = types.ModuleType("cupy")
    fake.__getattr__ = lambda name: guarded(getattr(np, name))
    fake.ndarray = Array
    fake.array = lambda *args, **keywords: new(np.array(*map(plain_array, args), **keywords))
    fake.cuda = types.SimpleNamespace(
        Device=lambda index=None: Device(current[-1] if index is None else index),
        runtime=types.SimpleNamespace(getDeviceCount=lambda: 2),
    )
    return fake
