"""Where the demo runs, and why: the GPU once a sparse layer has run on it, else the CPU."""

from __future__ import annotations

from typing import NamedTuple

import torch

from snack_cupy import _facts, _jit, _probe, doctor
from snack_cupy.torch.demo_data import DemoError
from snack_cupy.torch.linear import SnackLinear


class Gpu(NamedTuple):
    """The GPU's name, or what keeps it from being used and what helps."""

    name: str | None = None
    problem: str = "no GPU is visible"
    remedy: str | None = None


def find_gpu() -> Gpu:
    """The GPU, if a sparse layer runs on it; else why not, as the doctor finds it."""
    trouble = None
    if torch.cuda.is_available():
        trouble = _try_gpu()
        if trouble is None:
            return Gpu(torch.cuda.get_device_name())
    elif not _probe.ask_driver()["present"] and not _facts._nvidia_hardware():
        return Gpu()  # nothing to diagnose, and the doctor takes seconds
    facts = _facts.collect_facts()
    return explain(facts, trouble)


def explain(facts: _facts.Facts, trouble: str | None = None) -> Gpu:
    """Why the GPU cannot be used: the doctor's worst finding on ``facts``, else ``trouble``."""
    findings = doctor.diagnose(facts)
    if findings:
        return Gpu(None, findings[0].problem, findings[0].remedy)
    return Gpu(None, trouble) if trouble else Gpu()


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
