"""Facts about a machine: what is installed, what the driver sees, what works."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from snack_cupy import _jit

PROBE_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class Device:
    """One CUDA device as the driver describes it; ``memory`` in bytes."""

    name: str
    capability: tuple[int, int]
    memory: int
    multiprocessors: int


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of a machine. CUDA versions are integers, as in 13000 for 13.0; None: unknown.

    The defaults describe a machine without a GPU where only the required packages are installed.
    """

    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    nvidia_hardware: bool = False
    visible_devices: str | None = None
    driver_present: bool = False
    driver_version: str | None = None
    driver_cuda: int | None = None
    driver_error: str | None = None
    devices: tuple[Device, ...] = ()
    cupy_wheels: tuple[str, ...] = ()
    cupy_version: str | None = None
    cupy_error: str | None = None
    cuda_runtime: int | None = None
    nvrtc: tuple[int, int] | None = None
    nvrtc_error: str | None = None
    kernel_error: str | None = None
    torch_version: str | None = None
    torch_cuda: str | None = None
    torch_usable: bool = False
    torch_error: str | None = None
    cache_directory: str | None = None
    cache_writable: bool = True
    sources_error: str | None = None


def collect_facts() -> Facts:
    """Ask this machine; whatever is missing or broken becomes a fact, never an exception."""
    installed = _installed()
    wheels = tuple(sorted(name for name in installed if re.match(r"cupy(-cuda|-rocm|$)", name)))
    questions = ["driver"] + ["cupy"] * bool(wheels) + ["torch"] * ("torch" in installed)
    directory, writable = _kernel_cache()
    _jit._ensure_cache_folder()  # as before every use of a GPU: CuPy answers as it will then
    answers = _ask(questions)
    driver, cupy, torch = (answers.get(name, {}) for name in ("driver", "cupy", "torch"))
    return Facts(
        versions=installed,
        nvidia_hardware=_nvidia_hardware(),
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        driver_present=driver.get("present", False),
        driver_version=driver.get("version"),
        driver_cuda=driver.get("cuda"),
        driver_error=driver.get("error"),
        devices=tuple(
            Device(**{**device, "capability": tuple(device["capability"])})
            for device in driver.get("devices", ())
        ),
        cupy_wheels=wheels,
        cupy_version=cupy.get("version"),
        cupy_error=cupy.get("error"),
        cuda_runtime=cupy.get("runtime"),
        nvrtc=tuple(cupy["nvrtc"]) if cupy.get("nvrtc") else None,
        nvrtc_error=cupy.get("nvrtc_error"),
        kernel_error=cupy.get("kernel_error"),
        torch_version=torch.get("version"),
        torch_cuda=torch.get("cuda"),
        torch_usable=torch.get("usable", False),
        torch_error=torch.get("error"),
        cache_directory=directory,
        cache_writable=writable,
        sources_error=_sources_error(),
    )


def _installed() -> dict[str, str]:
    """Version of each installed distribution by its normalised name; a broken one is left out."""
    versions: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"] if distribution.metadata else None
        if name:
            versions.setdefault(re.sub(r"[-_.]+", "-", name).lower(), distribution.version)
    return versions


def _ask(questions: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Answers of ``_probe.py`` to all questions, asked at the same time."""
    script = str(Path(__file__).with_name("_probe.py"))
    running = {
        question: subprocess.Popen(
            [sys.executable, "-P", script, question],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for question in questions
    }
    return {question: _answer(process) for question, process in running.items()}


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The object a probe printed last, or how it died."""
    try:
        output, errors = process.communicate(timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"error": f"no answer within {PROBE_SECONDS:.0f} s"}
    last = (output.strip().splitlines() or [""])[-1]
    try:
        answer = json.loads(last)
    except ValueError:
        answer = None
    if isinstance(answer, dict):
        return answer
    reason = (errors.strip().splitlines() or ["no message"])[-1]
    return {"error": f"the process ended with code {process.returncode}: {reason}"}


def _nvidia_hardware(devices: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Whether the PCI bus has a display controller of NVIDIA; False where that is not known."""
    try:
        return any(
            (device / "vendor").read_text().strip() == "0x10de"
            and (device / "class").read_text().startswith("0x03")
            for device in devices.iterdir()
        )
    except OSError:
        return False


def _kernel_cache() -> tuple[str | None, bool]:
    """Folder of CuPy's compiled kernels, and whether CuPy can store some."""
    in_memory = os.environ.get("CUPY_CACHE_IN_MEMORY", "0") not in {"", "0"}
    try:
        folder = Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache")
    except RuntimeError:  # no home folder
        return None, in_memory
    return str(folder), in_memory or _can_write(folder)


def _can_write(folder: Path) -> bool:
    """Whether a file can be written in ``folder``, or the folder be made where it is missing."""
    if not folder.exists():
        parent = next(path for path in folder.absolute().parents if path.exists())
        return parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _sources_error() -> str | None:
    try:
        _jit.cuda_directory()
    except FileNotFoundError as error:
        return str(error)
    return None
