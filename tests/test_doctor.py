"""The doctor: every mismatch is found and its remedy named, on machines made up here."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from snack_cupy import _facts, doctor
from snack_cupy.doctor import Device, Facts, collect_facts, diagnose, report

ROOT = Path(__file__).resolve().parent.parent
H200 = Device("NVIDIA H200", (9, 0), 150_000_000_000, 132)
TURING = Device("Tesla T4", (7, 5), 15_000_000_000, 40)

CPU_MACHINE = Facts(versions={"numpy": "2.4.6", "scipy": "1.17.1"})
GPU_MACHINE = Facts(
    versions={"numpy": "2.4.6", "scipy": "1.17.1", "ml-dtypes": "0.6.0"},
    nvidia_hardware=True,
    driver_present=True,
    driver_version="580.65.06",
    driver_cuda=13000,
    devices=(H200,),
    cupy_wheels=("cupy-cuda13x",),
    cupy_version="14.2.0",
    cuda_runtime=13000,
    nvrtc=(13, 0),
    torch_version="2.13.0",
    torch_cuda="13.0",
    torch_usable=True,
    cache_directory="/cache/kernel_cache",
)

# name: changes to GPU_MACHINE, severity, words of the problem, words of the remedy
MISMATCHES = {
    "cupy_missing": (
        {"cupy_wheels": (), "cupy_version": None, "nvrtc": None},
        "error",
        "CuPy is missing",
        'pip install "snack-cupy[cuda13]"',
    ),
    "cupy_missing_cuda12_driver": (
        {
            "cupy_wheels": (),
            "cupy_version": None,
            "driver_cuda": 12040,
            "torch_cuda": "12.6",
        },
        "error",
        "CuPy is missing",
        'pip install "snack-cupy[cuda12]"',
    ),
    "cupy_broken": (
        {"cupy_version": None, "cupy_error": "ImportError: libcudart", "nvrtc": None},
        "error",
        "CuPy does not import: ImportError: libcudart",
        'pip uninstall -y cupy-cuda13x && pip install "snack-cupy[cuda13]"',
    ),
    "cupy_old": ({"cupy_version": "13.6.0"}, "error", "CuPy 13.6.0 is older than 14.2", "[cuda13]"),
    "two_cupy_wheels": (
        {"cupy_wheels": ("cupy-cuda12x", "cupy-cuda13x")},
        "error",
        "several CuPy wheels share one folder: cupy-cuda12x, cupy-cuda13x",
        'pip uninstall -y cupy-cuda12x cupy-cuda13x && pip install "snack-cupy[cuda13]"',
    ),
    "nvrtc_missing": (
        {"nvrtc": None, "nvrtc_error": "RuntimeError: no libnvrtc"},
        "error",
        "no NVRTC, the run-time compiler (RuntimeError: no libnvrtc)",
        "cupy-cuda13x[ctk]",
    ),
    "nvrtc_other_major": ({"nvrtc": (12, 9)}, "error", "NVRTC is of CUDA 12.9", "LD_LIBRARY_PATH"),
    "cupy12_beside_torch13": (
        {"cupy_wheels": ("cupy-cuda12x",), "nvrtc": (12, 9)},
        "warning",
        "cupy-cuda12x beside a PyTorch built for CUDA 13.0",
        'pip uninstall -y cupy-cuda12x && pip install "snack-cupy[cuda13]"',
    ),
    "cupy13_beside_torch12": (
        {"torch_cuda": "12.6"},
        "warning",
        "cupy-cuda13x beside a PyTorch built for CUDA 12.6",
        'pip uninstall -y torch && pip install "torch>=2.11"',
    ),
    "driver_older_than_cupy": (
        {"driver_cuda": 12080, "driver_version": "570.1", "torch_cuda": "12.6"},
        "error",
        "cupy-cuda13x is built for CUDA 13, the driver 570.1 (CUDA 12.8) is not",
        'pip install "snack-cupy[cuda12]"; or update the NVIDIA driver to 580 or newer',
    ),
    "driver_older_than_torch": (
        {
            "driver_cuda": 12080,
            "cupy_wheels": ("cupy-cuda12x",),
            "nvrtc": (12, 9),
            "torch_usable": False,
        },
        "error",
        "PyTorch is built for CUDA 13.0, the driver 580.65.06 (CUDA 12.8) is not",
        "whl/cu126; or update the NVIDIA driver to 580 or newer",
    ),
    "driver_ancient": (
        {"driver_cuda": 11040, "driver_version": "470.1"},
        "error",
        "the driver 470.1 (CUDA 11.4) is too old: CUDA 12 is needed",
        "update the NVIDIA driver to 580 or newer",
    ),
    "driver_does_not_start": (
        {"devices": (), "driver_error": "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"},
        "error",
        "does not start: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        "nvidia-smi",
    ),
    "torch_cpu_build": (
        {"torch_version": "2.13.0+cpu", "torch_cuda": None, "torch_usable": False},
        "error",
        "PyTorch 2.13.0+cpu is a CPU build",
        "pip uninstall -y torch && pip install",
    ),
    "torch_old": ({"torch_version": "2.9.1"}, "error", "2.9.1 is older than 2.11", "torch>=2.11"),
    "torch_broken": (
        {"torch_version": None, "torch_cuda": None, "torch_error": "OSError: libcudnn"},
        "error",
        "PyTorch does not import: OSError: libcudnn",
        "pip uninstall -y torch",
    ),
    "torch_sees_no_gpu": (
        {"torch_usable": False, "torch_error": "RuntimeError: no CUDA GPUs"},
        "error",
        "PyTorch cannot use the GPU: RuntimeError: no CUDA GPUs",
        "pip install",
    ),
    "all_devices_too_old": (
        {"devices": (TURING,)},
        "error",
        "GPU 0 (Tesla T4) has compute capability 7.5; the kernels need 8.0",
        "CPU tensors",
    ),
    "one_device_too_old": (
        {"devices": (H200, TURING)},
        "warning",
        "GPU 1 (Tesla T4)",
        "CUDA_VISIBLE_DEVICES",
    ),
    "cache_not_writable": (
        {"cache_writable": False},
        "warning",
        "/cache/kernel_cache is not writable, so every process compiles its kernels anew",
        "set CUPY_CACHE_DIR to a writable folder",
    ),
    "no_home_folder": (
        {"cache_writable": False, "cache_directory": None},
        "warning",
        "(no home folder)",
        "CUPY_CACHE_DIR",
    ),
    "kernel_fails": (
        {"kernel_error": "CompileException: cannot open cuda_fp16.h"},
        "error",
        "a test kernel fails: CompileException: cannot open cuda_fp16.h",
        'pip uninstall -y cupy-cuda13x && pip install "snack-cupy[cuda13]"',
    ),
    "gpu_hidden": (
        {
            "devices": (),
            "driver_error": "CUDA_ERROR_NO_DEVICE",
            "visible_devices": "",
            "torch_usable": False,
        },
        "note",
        "CUDA_VISIBLE_DEVICES is '', so no GPU is visible",
        "unset CUDA_VISIBLE_DEVICES",
    ),
    "gpu_without_driver": (
        {"devices": (), "driver_present": False, "driver_cuda": None, "torch_usable": False},
        "warning",
        "an NVIDIA GPU is in this machine, but no driver shows it",
        "--gpus all",
    ),
    "sources_missing": (
        {"sources_error": "snack_cupy: no CUDA sources in x"},
        "error",
        "no CUDA sources in x",
        "--force-reinstall",
    ),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_each_mismatch_is_the_one_finding(name):
    changes, severity, problem, remedy = MISMATCHES[name]
    facts = dataclasses.replace(GPU_MACHINE, **changes)
    findings = diagnose(facts)
    assert len(findings) == 1, findings
    assert findings[0].severity == severity
    assert problem in findings[0].problem
    assert remedy in findings[0].remedy


def test_sound_machines_have_no_findings():
    no_torch = {"torch_version": None, "torch_cuda": None, "torch_usable": False}
    older = {
        "driver_cuda": 12020,
        "cupy_wheels": ("cupy-cuda12x",),
        "nvrtc": (12, 9),
        "torch_cuda": "12.6",
    }
    for facts in (
        CPU_MACHINE,
        GPU_MACHINE,
        dataclasses.replace(GPU_MACHINE, **no_torch),
        dataclasses.replace(GPU_MACHINE, **older),
        dataclasses.replace(GPU_MACHINE, cupy_wheels=("cupy",)),
        dataclasses.replace(CPU_MACHINE, torch_version="2.13.0+cpu"),
        dataclasses.replace(CPU_MACHINE, cache_writable=False),
        dataclasses.replace(CPU_MACHINE, cache_writable=False, cupy_wheels=("cupy-cuda13x",)),
        dataclasses.replace(CPU_MACHINE, driver_error="CUDA_ERROR_STUB_LIBRARY"),
    ):
        assert diagnose(facts) == []


def test_nothing_but_missing_sources_is_an_error_without_a_gpu():
    no_gpu = {"devices": (), "nvidia_hardware": False, "driver_present": False, "driver_cuda": None}
    for name, (changes, *_) in MISMATCHES.items():
        if name in {"driver_does_not_start", "sources_missing"}:
            continue
        facts = dataclasses.replace(GPU_MACHINE, **{**changes, **no_gpu})
        assert "error" not in [finding.severity for finding in diagnose(facts)], name


def test_a_cause_hides_the_failing_test_kernel_and_the_worst_comes_first():
    facts = dataclasses.replace(
        GPU_MACHINE, devices=(H200, TURING), nvrtc=None, kernel_error="RuntimeError: no NVRTC"
    )
    findings = diagnose(facts)
    assert [finding.severity for finding in findings] == ["error", "warning"]
    assert "NVRTC" in findings[0].problem
    assert not any("test kernel" in finding.problem for finding in findings)


def test_report_shows_versions_devices_remedies_and_verdict():
    text = report(GPU_MACHINE, diagnose(GPU_MACHINE))
    for words in (
        "NumPy         2.4.6",
        "SciPy         1.17.1",
        "ml_dtypes     0.6.0",
        "CuPy          14.2.0 (cupy-cuda13x)",
        "CUDA runtime  13.0",
        "NVRTC         13.0",
        "PyTorch       2.13.0 (CUDA 13.0)",
        "driver        580.65.06 (CUDA 13.0)",
        "GPU 0         NVIDIA H200, compute capability 9.0, 139.7 GiB, 132 multiprocessors",
        "Ready on the GPU.",
    ):
        assert words in text
    broken = dataclasses.replace(GPU_MACHINE, nvrtc=None)
    text = report(broken, diagnose(broken))
    assert "error: CuPy finds no NVRTC" in text
    assert "  remedy: pip install" in text
    assert text.endswith("Not ready: see the errors above.")
    assert report(CPU_MACHINE, []).endswith("Ready on the CPU; no GPU is visible.")


@pytest.mark.parametrize("facts", [CPU_MACHINE, GPU_MACHINE], ids=["cpu", "gpu"])
def test_main_returns_zero_where_usable(monkeypatch, capsys, facts):
    monkeypatch.setattr(doctor, "collect_facts", lambda: facts)
    assert doctor.main() == 0
    assert "Ready" in capsys.readouterr().out


def test_main_returns_one_on_an_error(monkeypatch, capsys):
    monkeypatch.setattr(
        doctor, "collect_facts", lambda: dataclasses.replace(GPU_MACHINE, nvrtc=None)
    )
    assert doctor.main() == 1
    assert "error:" in capsys.readouterr().out


def test_facts_of_this_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY", raising=False)
    facts = collect_facts()
    assert facts.versions["numpy"]
    assert facts.sources_error is None
    assert (facts.cache_directory, facts.cache_writable) == (str(tmp_path), True)
    assert facts.driver_present or not facts.devices
    if facts.cupy_wheels and not facts.cupy_error:
        assert facts.cupy_version
    assert report(facts, diagnose(facts))


def test_broken_libraries_become_facts(monkeypatch, tmp_path):
    (tmp_path / "cupy.py").write_text("import os\nos._exit(7)\n")
    (tmp_path / "torch.py").write_text("raise OSError('libtorch.so: not found')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    answers = _facts._ask(["cupy", "torch"])
    assert answers["cupy"] == {"error": "the process ended with code 7: no message"}
    assert answers["torch"] == {"error": "OSError: libtorch.so: not found"}


def test_a_library_that_prints_or_hangs_spoils_nothing(monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text(
        "print('hello')\n__version__ = '9.9'\n"
        "class version: cuda = None\n"
        "import atexit, sys\nsys.stderr.write('warning\\n')\n"
    )
    (tmp_path / "cupy.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(_facts, "PROBE_SECONDS", 2.0)
    answers = _facts._ask(["torch", "cupy"])
    assert answers["torch"] == {"version": "9.9", "cuda": None, "usable": False}
    assert answers["cupy"] == {"error": "no answer within 2 s"}


def test_probe_answers_with_one_json_object():
    script = str(doctor.__file__).replace("doctor.py", "_probe.py")
    out = subprocess.run(
        [sys.executable, "-P", script, "driver"], capture_output=True, text=True, check=True
    ).stdout
    assert "present" in json.loads(out.strip().splitlines()[-1])


def test_kernel_cache_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY", raising=False)
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "not" / "yet" / "there"))
    assert _facts._kernel_cache() == (str(tmp_path / "not" / "yet" / "there"), True)
    occupied = tmp_path / "file"
    occupied.write_text("")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(occupied / "cache"))
    assert _facts._kernel_cache() == (str(occupied / "cache"), False)
    monkeypatch.setenv("CUPY_CACHE_DIR", str(occupied))
    assert _facts._kernel_cache() == (str(occupied), False)
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")
    assert _facts._kernel_cache() == (str(occupied), True)


def test_read_only_kernel_cache(monkeypatch, tmp_path):
    def refuse(**_):
        raise OSError(30, "Read-only file system")

    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY", raising=False)
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(_facts.tempfile, "TemporaryFile", refuse)
    assert _facts._kernel_cache() == (str(tmp_path), False)


def test_a_home_that_cannot_be_made_breaks_no_answer_of_cupy(tmp_path):
    occupied, temporary = tmp_path / "file", tmp_path / "temporary"
    occupied.write_text("")
    temporary.mkdir()
    variables = {"HOME": str(occupied / "home"), "TMPDIR": str(temporary)}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CUPY_CACHE")}
    code = (
        "from snack_cupy._facts import collect_facts; facts = collect_facts(); "
        "assert not facts.cupy_error, facts.cupy_error; "
        "print(facts.cache_directory, facts.cache_writable)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**kept, **variables},
    ).stdout
    assert out.split() == [str(occupied / "home" / ".cupy" / "kernel_cache"), "False"]
    assert not list(temporary.glob("snack_cupy-kernels-*"))


def test_nvidia_hardware_is_read_from_the_bus(tmp_path):
    assert not _facts._nvidia_hardware(tmp_path / "absent")
    for name, vendor, kind in (("a", "0x8086", "0x030000"), ("b", "0x10de", "0x040300")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(vendor + "\n")
        (tmp_path / name / "class").write_text(kind + "\n")
    assert not _facts._nvidia_hardware(tmp_path)
    (tmp_path / "b" / "class").write_text("0x030200\n")
    assert _facts._nvidia_hardware(tmp_path)
