"""The workspace of several launches, and how a launch passes its arguments."""

import numpy as np
import pytest

from snack_cupy import _device_work
from snack_cupy._device_work import Work, Workspace, ceil_div, pointer, runs_kernels
from snack_cupy.kernels import Kernel

KERNEL = Kernel("file.cu", "example", (("T", ("float32", "float64")),))


def test_workspace_has_aligned_parts_and_clears_the_first_ones(monkeypatch):
    space, work = Workspace(), Work(np.zeros(1))
    space.add("a", 5, zero=True)
    space.add("b", 300, zero=True)
    space.add("c", 7)
    memory = []

    def empty(size, dtype):
        memory.append(np.full(size, 0xA5, dtype))
        return memory[-1]

    monkeypatch.setattr(work, "xp", type("module", (), {"empty": staticmethod(empty)}))
    space.allocate(work)
    start = memory[0].ctypes.data
    assert [space[name] - start for name in "abc"] == [0, 256, 768]
    assert not memory[0][:768].any()
    assert (memory[0][768:] == 0xA5).all()


def test_workspace_wants_zeroed_parts_first():
    space = Workspace()
    space.add("a", 5)
    with pytest.raises(AssertionError):
        space.add("b", 5, zero=True)


def test_work_passes_sizes_first_and_launches_nothing_for_no_blocks(monkeypatch):
    calls = []

    def compiled(kernel, device, values):
        assert (kernel, device, values) == (KERNEL, 0, (("T", "float64"),))
        return lambda *arguments, **options: calls.append((arguments, options))

    monkeypatch.setattr(_device_work, "_function", compiled)
    work = Work(np.zeros(1))
    work.launch(KERNEL, 0, (1,), 2, T="float64")
    assert calls == []
    work.launch(KERNEL, 3, (1, 2), 30, 40, T="float64")
    work.launch(KERNEL, 3, (1,), 30, threads=64, cooperative=True, T="float64")
    assert calls == [
        (((3,), (256,), (1, 2, 30, 40), 0, 0, False), {}),
        (((3,), (64,), (1, 30), 0, 0, True), {}),
    ]


def test_device_work_pointers_and_sizes():
    array = np.zeros(3)
    assert pointer(array) == array.ctypes.data
    assert pointer(None) == 0
    assert not runs_kernels(array)
    assert [ceil_div(a, 4) for a in (0, 1, 4, 5)] == [0, 1, 1, 2]
