"""A stand-in for CuPy with two devices: NumPy arrays that refuse work while the other is current.

It knows what `Topology` calls. Every function and method raises where one of its arrays is not on
the current device, as CuPy does between devices without peer access.
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
        check(inputs)
        plain = [plain_array(value) for value in inputs]
        if out := keywords.pop("out", None):
            keywords["out"] = tuple(plain_array(value) for value in out)
        return new(getattr(ufunc, method)(*plain, **keywords))


def plain_array(value):
    return value.view(np.ndarray) if isinstance(value, Array) else value


def check(values):
    """Raise where an array among ``values`` is not on the current device."""
    for value in values:
        if isinstance(value, Array) and value._id != current[-1]:
            raise RuntimeError(f"an array of device {value._id} while {current[-1]} is current")


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
        check(arguments)
        return new(function(*map(plain_array, arguments), **keywords))

    return call


for name in ("__getitem__", "__setitem__", "astype", "copy", "sort", "min", "max", "any", "all"):
    setattr(Array, name, guarded(getattr(np.ndarray, name)))


def module():
    """The stand-in, to be put in the place of ``sys.modules["cupy"]``."""
    functions = ("arange", "argsort", "array", "flatnonzero", "searchsorted")
    fake = types.ModuleType("cupy")
    vars(fake).update({name: guarded(getattr(np, name)) for name in functions})
    fake.stack = lambda arrays: guarded(lambda *rows: np.stack(rows))(*arrays)
    fake.ndarray = Array
    fake.cuda = types.SimpleNamespace(
        Device=lambda index=None: Device(current[-1] if index is None else index),
        runtime=types.SimpleNamespace(getDeviceCount=lambda: 2),
    )
    return fake
