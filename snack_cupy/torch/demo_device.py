"""Where the demo runs, and why: the GPU once a sparse layer has run on it, else the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from snack_cupy import _jit
from snack_cupy.torch.demo_data import DemoError
from snack_cupy.torch.linear import SnackLinear

NO_GPU = "no GPU is visible"


class Gpu(NamedTuple):
    """The GPU's name, or what keeps it from being used and what helps."""

    name: str | None = None
    problem: str = NO_GPU
    remedy: str | None = None


# Problem and remedy on a machine whose GPU is not usable, given the error a layer ran into.
Adviser = Callable[[str | None], tuple[str, str | None]]


def no_advice(trouble: str | None) -> tuple[str, str | None]:
    """The error as it is, and no remedy."""
    return trouble or NO_GPU, None


def find_gpu(advise: Adviser = no_advice) -> Gpu:
    """The GPU, if a sparse layer runs on it; else why not, as ``advise`` tells."""
    trouble = None
    if torch.cuda.is_available():
        trouble = _try_gpu()
        if trouble is None:
            return Gpu(torch.cuda.get_device_name())
    return Gpu(None, *advise(trouble))


def choose_device(requested: str, gpu: Gpu) -> tuple[str, str]:
    """``"cpu"`` or ``"cuda"``, and the sentence that says why.

    Raises
    ------
    DemoError
        A GPU is asked for and cannot be used.
    """
    remedy = f"\nTo use the GPU: {gpu.remedy}" if gpu.remedy else ""
    if requested == "cpu":
        return "cpu", "on the CPU, as asked"
    if gpu.name is not None:
        return "cuda", f"on the GPU ({gpu.name})"
    if requested == "cuda":
        raise DemoError(f"demo: --device cuda cannot be used: {gpu.problem}{remedy}")
    return "cpu", f"on the CPU: {gpu.problem}{remedy}"


def _try_gpu() -> str | None:
    """Run one sparse layer on the GPU; what went wrong, or None."""
    try:
        _jit.require_cupy()
        SnackLinear(8, 8, device="cuda")(torch.ones(2, 8, device="cuda"))
        torch.cuda.synchronize()
    except (RuntimeError, ImportError, OSError) as error:
        return str(error).splitlines()[0]
    return None
