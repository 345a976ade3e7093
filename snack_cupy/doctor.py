"""``python -m snack_cupy doctor``: versions, devices, and each mismatch with its remedy.

Three steps: `collect_facts` asks the machine and survives whatever is missing or broken,
`diagnose` is a pure function from those facts to findings, `report` writes both as text.
"""

from __future__ import annotations

import dataclasses
import platform
import re
from collections.abc import Iterator, Sequence
from typing import Literal

from snack_cupy import __version__
from snack_cupy._facts import Device, Facts, collect_facts

__all__ = ["Device", "Facts", "Finding", "collect_facts", "diagnose", "main", "report"]

MIN_CUPY, MIN_TORCH, MIN_CAPABILITY = (14, 2), (2, 11), (8, 0)
# The oldest driver branch that runs programs built for a CUDA major version.
DRIVER_FOR_CUDA = {12: 525, 13: 580}
TORCH_INDEX = {12: "https://download.pytorch.org/whl/cu126", 13: None}

NO_DEVICE = "CUDA_ERROR_NO_DEVICE"

Severity = Literal["error", "warning", "note"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """A mismatch and what to do about it.

    An ``error`` keeps a GPU that is there from being used, a ``warning`` is a trap, a ``note`` is
    worth knowing.
    """

    severity: Severity
    problem: str
    remedy: str


def on_gpu_machine(facts: Facts) -> bool:
    """Whether the driver shows a GPU, or does not start; a GPU that was hidden does not count."""
    broken = facts.driver_error not in {None, NO_DEVICE, "CUDA_ERROR_STUB_LIBRARY"}
    return bool(facts.devices) or broken


def diagnose(facts: Facts) -> list[Finding]:
    """Every mismatch in ``facts``, the worst first.

    On a machine without a GPU nothing is an ``error`` but missing CUDA sources: the NumPy and CPU
    paths need neither CuPy nor a driver.

    Examples
    --------
    >>> from snack_cupy.doctor import Device, Facts, diagnose
    >>> diagnose(Facts())
    []
    >>> h200 = Device("NVIDIA H200", (9, 0), 150_000_000_000, 132)
    >>> found = diagnose(Facts(driver_present=True, driver_cuda=13000, devices=(h200,)))
    >>> print(found[0].remedy)
    pip install "snack-cupy[cuda13]"
    """
    findings = [*_driver(facts), *_cupy(facts), *_torch(facts), *_cache(facts)]
    if facts.kernel_error and not any(finding.severity == "error" for finding in findings):
        problem = f"a test kernel fails: {facts.kernel_error}"
        findings.append(Finding("error", problem, reinstall_cupy(facts)))
    if not on_gpu_machine(facts):
        findings = [
            dataclasses.replace(finding, severity="warning")
            if finding.severity == "error"
            else finding
            for finding in findings
        ]
    if facts.sources_error:
        remedy = "pip install --force-reinstall --no-deps snack-cupy"
        findings.append(Finding("error", facts.sources_error, remedy))
    return sorted(findings, key=lambda f: ("error", "warning", "note").index(f.severity))


def cuda_major(facts: Facts) -> int:
    """The CUDA major version to install for: the driver's, 12 or 13."""
    newest, oldest = max(DRIVER_FOR_CUDA), min(DRIVER_FOR_CUDA)
    return min(max((facts.driver_cuda or newest * 1000) // 1000, oldest), newest)


def install_cupy(major: int) -> str:
    """The command that installs CuPy with NVRTC for a CUDA major version."""
    return f'pip install "snack-cupy[cuda{major}]"'


def reinstall_cupy(facts: Facts) -> str:
    """The command that replaces every CuPy wheel there is by the right one."""
    uninstall = f"pip uninstall -y {' '.join(facts.cupy_wheels)} && " if facts.cupy_wheels else ""
    return uninstall + install_cupy(cuda_major(facts))


def reinstall_torch(facts: Facts) -> str:
    """The command that replaces PyTorch by a build for the driver's CUDA."""
    index = TORCH_INDEX[cuda_major(facts)]
    option = f" --index-url {index}" if index else ""
    return f'pip uninstall -y torch && pip install "torch>={_dotted(MIN_TORCH)}"{option}'


def beyond_driver(facts: Facts, major: int | None) -> bool:
    """Whether the driver runs some CUDA that CuPy and PyTorch are built for, but not ``major``."""
    return major is not None and min(DRIVER_FOR_CUDA) <= (facts.driver_cuda or 0) // 1000 < major


def update_driver(major: int) -> str:
    """The advice that makes programs of a CUDA major version run."""
    branch = DRIVER_FOR_CUDA.get(major)
    return "update the NVIDIA driver" + (f" to {branch} or newer" if branch else "")


def parse_version(text: str) -> tuple[int, ...]:
    """The leading numbers of a version, at most three: ``2.13.0+cpu`` is (2, 13, 0)."""
    return tuple(int(number) for number in re.findall(r"\d+", text.partition("+")[0])[:3])


def _driver(facts: Facts) -> list[Finding]:
    findings = []
    if on_gpu_machine(facts) and facts.driver_error:
        problem = f"the NVIDIA driver does not start: {facts.driver_error}"
        remedy = (
            "run nvidia-smi; after a driver update, restart the machine; in a container, use "
            "--gpus all and keep compatibility copies of libcuda off LD_LIBRARY_PATH"
        )
        findings.append(Finding("error", problem, remedy))
    elif facts.driver_error == NO_DEVICE and facts.visible_devices is not None:
        problem = f"CUDA_VISIBLE_DEVICES is {facts.visible_devices!r}, so no GPU is visible"
        findings.append(Finding("note", problem, "unset CUDA_VISIBLE_DEVICES to use a GPU"))
    elif facts.nvidia_hardware and not facts.devices:
        problem = "an NVIDIA GPU is in this machine, but no driver shows it"
        remedy = "install the NVIDIA driver; start a container with --gpus all"
        findings.append(Finding("warning", problem, remedy))
    if facts.devices and facts.driver_cuda and facts.driver_cuda // 1000 < min(DRIVER_FOR_CUDA):
        problem = f"{_driver_text(facts)} is too old: CUDA {min(DRIVER_FOR_CUDA)} is needed"
        findings.append(Finding("error", problem, update_driver(max(DRIVER_FOR_CUDA))))
    old = [(i, d) for i, d in enumerate(facts.devices) if d.capability < MIN_CAPABILITY]
    for index, device in old:
        problem = (
            f"GPU {index} ({device.name}) has compute capability {_dotted(device.capability)}; "
            f"the kernels need {_dotted(MIN_CAPABILITY)} or newer"
        )
        if len(old) == len(facts.devices):
            remedy = "use NumPy arrays and CPU tensors on this machine, or a newer GPU"
            findings.append(Finding("error", problem, remedy))
        else:
            remedy = "choose another GPU with CUDA_VISIBLE_DEVICES"
            findings.append(Finding("warning", problem, remedy))
    return findings


def _cupy(facts: Facts) -> list[Finding]:
    if len(facts.cupy_wheels) > 1:
        problem = f"several CuPy wheels share one folder: {', '.join(facts.cupy_wheels)}"
        return [Finding("error", problem, reinstall_cupy(facts))]
    if facts.cupy_error:
        problem = f"CuPy does not import: {facts.cupy_error}"
        return [Finding("error", problem, reinstall_cupy(facts))]
    if facts.cupy_version is None:
        remedy = install_cupy(cuda_major(facts))
        missing = Finding("error", "CuPy is missing, so the GPU cannot be used", remedy)
        return [missing] if on_gpu_machine(facts) else []
    findings = []
    version = facts.cupy_version
    if parse_version(version) < MIN_CUPY:
        problem = f"CuPy {version} is older than {_dotted(MIN_CUPY)}"
        findings.append(Finding("error", problem, reinstall_cupy(facts)))
    major = _wheel_major(facts)
    if major and beyond_driver(facts, major):
        problem = f"{facts.cupy_wheels[0]} is built for CUDA {major}, {_driver_text(facts)} is not"
        remedy = f"{reinstall_cupy(facts)}; or {update_driver(major)}"
        findings.append(Finding("error", problem, remedy))
    elif facts.nvrtc is None:
        extra = major or cuda_major(facts)
        wheel = f"cupy-cuda{extra}x[ctk]"
        problem = f"CuPy finds no NVRTC, the run-time compiler ({facts.nvrtc_error or 'unknown'})"
        remedy = f'{install_cupy(extra)}, which brings it as "{wheel}"'
        findings.append(Finding("error", problem, remedy))
    elif major and facts.nvrtc[0] != major:
        problem = f"NVRTC is of CUDA {_dotted(facts.nvrtc)}, CuPy of CUDA {major}"
        remedy = f"{install_cupy(major)}; remove other CUDA toolkits from LD_LIBRARY_PATH"
        findings.append(Finding("error", problem, remedy))
    return findings


def _torch(facts: Facts) -> list[Finding]:
    remedy = reinstall_torch(facts)
    if facts.torch_version is None:
        if facts.torch_error is None:
            return []
        return [Finding("error", f"PyTorch does not import: {facts.torch_error}", remedy)]
    findings = []
    version = facts.torch_version
    if parse_version(version) < MIN_TORCH:
        problem = f"PyTorch {version} is older than {_dotted(MIN_TORCH)}"
        findings.append(Finding("error", problem, remedy))
    if facts.torch_cuda is None:
        if on_gpu_machine(facts):
            problem = f"PyTorch {version} is a CPU build, so its layers cannot use the GPU"
            findings.append(Finding("error", problem, remedy))
        return findings
    major, wheel_major = int(facts.torch_cuda.split(".")[0]), _wheel_major(facts)
    if beyond_driver(facts, major):
        problem = f"PyTorch is built for CUDA {facts.torch_cuda}, {_driver_text(facts)} is not"
        findings.append(Finding("error", problem, f"{remedy}; or {update_driver(major)}"))
    elif facts.devices and not facts.torch_usable:
        problem = f"PyTorch cannot use the GPU: {facts.torch_error or 'no reason given'}"
        findings.append(Finding("error", problem, remedy))
    mixed = wheel_major is not None and wheel_major != major
    if mixed and not beyond_driver(facts, max(major, wheel_major or 0)):
        problem = f"{facts.cupy_wheels[0]} beside a PyTorch built for CUDA {facts.torch_cuda}"
        if major == cuda_major(facts):
            remedy = reinstall_cupy(facts)
        findings.append(
            Finding("warning", f"{problem}: each may load the other's libraries", remedy)
        )
    return findings


def _cache(facts: Facts) -> list[Finding]:
    """A trap only: snack_cupy goes on with a temporary folder, where CuPy alone may not import."""
    if facts.cache_writable or not facts.cupy_wheels or not on_gpu_machine(facts):
        return []
    folder = facts.cache_directory or "(no home folder)"
    problem = (
        f"CuPy's kernel cache {folder} is not writable, so every process compiles its kernels "
        "anew, in a temporary folder"
    )
    remedy = "set CUPY_CACHE_DIR to a writable folder, which `import cupy` by itself may need too"
    return [Finding("warning", problem, remedy)]


def _wheel_major(facts: Facts) -> int | None:
    """CUDA major version in the name of the only CuPy wheel; None for a build from source."""
    found = re.search(r"cuda(\d\d)", facts.cupy_wheels[0]) if len(facts.cupy_wheels) == 1 else None
    return int(found[1]) if found else None


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def _cuda_text(cuda: int) -> str:
    """``13000`` as ``13.0``."""
    return f"{cuda // 1000}.{cuda % 1000 // 10}"


def _driver_text(facts: Facts) -> str:
    version = facts.driver_version or "of unknown version"
    return f"the driver {version} (CUDA {_cuda_text(facts.driver_cuda or 0)})"


def _lines(facts: Facts) -> Iterator[tuple[str, str]]:
    """Label and value of each line of the table of facts."""
    missing = "not installed"
    yield "snack_cupy", __version__
    yield "Python", f"{platform.python_version()}, {platform.platform()}"
    yield "NumPy", facts.versions.get("numpy", missing)
    yield "SciPy", facts.versions.get("scipy", missing)
    yield "ml_dtypes", facts.versions.get("ml-dtypes", f"{missing}; bfloat16 arrays need it")
    wheels = ", ".join(facts.cupy_wheels)
    yield "CuPy", f"{facts.cupy_version or 'broken'} ({wheels})" if wheels else missing
    if wheels:
        yield "CUDA runtime", _cuda_text(facts.cuda_runtime) if facts.cuda_runtime else "not found"
        yield "NVRTC", _dotted(facts.nvrtc) if facts.nvrtc else "not found"
        state = "writable" if facts.cache_writable else "not writable"
        yield "kernel cache", f"{facts.cache_directory} ({state})"
    if facts.torch_version:
        build = f"CUDA {facts.torch_cuda}" if facts.torch_cuda else "CPU build"
        yield "PyTorch", f"{facts.torch_version} ({build})"
    else:
        yield "PyTorch", "broken" if facts.torch_error else missing
    if facts.driver_cuda:
        version = facts.driver_version or "version unknown"
        yield "driver", f"{version} (CUDA {_cuda_text(facts.driver_cuda)})"
    else:
        yield "driver", "none"
    for index, device in enumerate(facts.devices):
        yield (
            f"GPU {index}",
            f"{device.name}, compute capability {_dotted(device.capability)}, "
            f"{device.memory / 2**30:.1f} GiB, {device.multiprocessors} multiprocessors",
        )


def report(facts: Facts, findings: Sequence[Finding]) -> str:
    """The facts as a table, each finding with its remedy, and the verdict."""
    lines = [f"{label:<13} {value}" for label, value in _lines(facts)]
    for finding in findings:
        lines += ["", f"{finding.severity}: {finding.problem}", f"  remedy: {finding.remedy}"]
    return "\n".join([*lines, "", verdict(facts, findings)])


def verdict(facts: Facts, findings: Sequence[Finding]) -> str:
    """One sentence: what snack_cupy can use here."""
    if any(finding.severity == "error" for finding in findings):
        return "Not ready: see the errors above."
    if not on_gpu_machine(facts):
        return "Ready on the CPU; no GPU is visible."
    layers = "" if facts.torch_version else "; PyTorch is not installed, so only arrays can be used"
    return f"Ready on the GPU{layers}."


def main() -> int:
    """Print the report; 0 where snack_cupy is usable, the CPU alone included, else 1."""
    facts = collect_facts()
    findings = diagnose(facts)
    print(report(facts, findings))
    return int(any(finding.severity == "error" for finding in findings))
