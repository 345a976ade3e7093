"""The record of the last complete GPU run, kept because CI has no GPU.

A run of ``SNACK_REQUIRE_GPU=1 python -m pytest tests/gpu -q --gpu-record tests/gpu_record.json``
writes the record itself, provided that every test of ``tests/gpu`` ran and passed. A test,
``test_gpu_record.py``, then fails on any machine as soon as the sources or the GPU tests differ
from what was recorded.

    python tests/gpu_record.py                      prints the digest of the working tree
    python tests/gpu_record.py --pending "reason"   notes that no GPU could be had for this digest
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests" / "gpu_record.json"
FOLDERS = ("cuda", "snack_cupy", "tests/gpu")
RUN = "SNACK_REQUIRE_GPU=1 python -m pytest tests/gpu -q --gpu-record tests/gpu_record.json"


# What is recorded


def digested_files(root: Path = ROOT) -> list[str]:
    """Sorted relative paths of the files that the digest covers: no caches, nothing hidden."""
    names = []
    for folder in FOLDERS:
        for path in (root / folder).rglob("*"):
            parts = path.relative_to(root).parts
            cache = "__pycache__" in parts or path.suffix in (".pyc", ".pyo")
            if path.is_file() and not cache and not any(part.startswith(".") for part in parts):
                names.append("/".join(parts))
    return sorted(names)


def tree_digest(root: Path = ROOT) -> str:
    """SHA-256 over names and bytes of `digested_files`, each preceded by its length."""
    digest = hashlib.sha256()
    for name in digested_files(root):
        for data in (name.encode(), (root / name).read_bytes()):
            digest.update(len(data).to_bytes(8, "big"))
            digest.update(data)
    return digest.hexdigest()


def collected_ids(root: Path = ROOT) -> list[str]:
    """Sorted ids of all tests in ``tests/gpu``, as a pytest of its own collects them."""
    command = (sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/gpu")
    # Options of the run that asks, and of an xdist worker it may be, are not for this pytest.
    private = ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT")
    environment = {name: value for name, value in os.environ.items() if name not in private}
    done = subprocess.run(
        (*command, "-p", "no:cacheprovider", "-p", "no:xdist"),
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"collecting tests/gpu failed\n{done.stdout}\n{done.stderr}")
    return sorted(line for line in done.stdout.splitlines() if line.startswith("tests/gpu/"))


def versions() -> dict[str, str]:
    """Versions of what a run depends on, as far as it is installed."""
    found = {"python": platform.python_version()}
    for name in ("numpy", "scipy", "cupy", "torch"):
        try:
            found[name] = str(__import__(name).__version__)
        except ImportError:
            found[name] = "none"
    try:
        found["ml_dtypes"] = importlib.metadata.version("ml_dtypes")
    except importlib.metadata.PackageNotFoundError:
        found["ml_dtypes"] = "none"
    return found


def device() -> dict[str, str]:
    """Name of the current CUDA device, and the versions of driver, CUDA runtime and NVRTC."""
    import cupy

    runtime = cupy.cuda.runtime
    name = runtime.getDeviceProperties(cupy.cuda.Device().id)["name"]
    return {
        "device": name.decode() if isinstance(name, bytes) else str(name),
        "driver": driver_version() or f"CUDA {runtime.driverGetVersion()}",
        "cuda_runtime": str(runtime.runtimeGetVersion()),
        "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
    }


def driver_version() -> str | None:
    """Release of the NVIDIA driver, such as "580.95.05", or None where it cannot be asked for."""
    command = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split("\n", 1)[0].strip() or None


def today() -> str:
    """The date in UTC, ISO format."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


# The file


def load(path: Path = RECORD) -> dict[str, Any]:
    """The record: ``full`` (the last complete run, or None) and perhaps ``pending``."""
    if not path.is_file():
        return {"full": None}
    return dict(json.loads(path.read_text(encoding="utf-8")))


def save(record: dict[str, Any], path: Path = RECORD) -> None:
    """Write the record as one file, at once."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def add_pending(reason: str, path: Path = RECORD, root: Path = ROOT) -> dict[str, str]:
    """Note beside the last complete run why the tree as it stands was not run on a GPU."""
    if not reason.strip():
        raise ValueError("gpu_record: a pending entry needs a reason")
    pending = {"reason": reason.strip(), "date": today(), "digest": tree_digest(root)}
    save({"full": load(path).get("full"), "pending": pending}, path)
    return pending


class Verdict(NamedTuple):
    """Whether a tree may land, and what is to be said about it."""

    ok: bool
    message: str = ""


def judge(record: dict[str, Any], digest: str, ids: list[str]) -> Verdict:
    """Compare a record with the digest and the collected ids of a working tree."""
    full, pending = record.get("full"), record.get("pending")
    if full and full["digest"] == digest and full["tests"] == ids:
        return Verdict(True)
    if pending and pending["digest"] == digest:
        last = f"last complete run: {full['date'] if full else 'none'}"
        why = f"{pending['reason']} (noted {pending['date']}; {last})"
        return Verdict(True, f"NOT RUN ON A GPU: {why}. Owed as soon as a GPU can be had: {RUN}")
    if not full:
        return Verdict(False, f"there is no GPU record; on a machine with a GPU run: {RUN}")
    if full["digest"] != digest:
        what = f"{', '.join(FOLDERS)} changed since the GPU run of {full['date']}"
    else:
        missing, new = set(full["tests"]) - set(ids), set(ids) - set(full["tests"])
        what = f"tests differ from the GPU run: gone {sorted(missing)[:3]}, new {sorted(new)[:3]}"
    return Verdict(False, f"{what}; on a machine with a GPU run: {RUN}")


# The run


class Recorder:
    """Pytest plugin that watches one run and writes the record if the run deserves it."""

    def __init__(self, path: Path, root: Path = ROOT) -> None:
        self.path = path
        self.root = root
        self.digest = tree_digest(root)
        self.start = time.monotonic()
        self.passed: set[str] = set()
        self.failed: set[str] = set()
        self.skipped: set[str] = set()
        self.message = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Sort one report of set-up, call or tear-down; expected failures count as skipped."""
        if report.failed:
            self.failed.add(report.nodeid)
        elif report.skipped or hasattr(report, "wasxfail"):
            self.skipped.add(report.nodeid)
        elif report.when == "call":
            self.passed.add(report.nodeid)

    def refusal(self, exitstatus: int) -> str:
        """Why this run may not be recorded; empty if it may."""
        if self.failed:
            return f"{len(self.failed)} tests failed"
        if self.skipped:
            return f"{len(self.skipped)} tests were skipped, {min(self.skipped)} first"
        if exitstatus != 0:
            return f"pytest ended with exit status {int(exitstatus)}"
        wanted = set(collected_ids(self.root))
        if missing := wanted - self.passed:
            return f"not complete: {len(missing)} tests did not run, {min(missing)} first"
        if others := self.passed - wanted:
            return f"the run held {len(others)} tests outside tests/gpu, {min(others)} first"
        if tree_digest(self.root) != self.digest:
            return "files changed during the run"
        return ""

    def full_entry(self) -> dict[str, Any]:
        """The entry for a complete run."""
        return {
            "digest": self.digest,
            **device(),
            "versions": versions(),
            "date": today(),
            "duration_seconds": round(time.monotonic() - self.start, 1),
            "passed": len(self.passed),
            "tests": sorted(self.passed),
        }

    def pytest_sessionfinish(self, session: Any, exitstatus: int) -> None:
        """Write the record, or refuse and make the run fail."""
        reason = self.refusal(exitstatus)
        if reason:
            self.message = f"GPU record NOT written: {reason}"
            session.exitstatus = exitstatus or 1
            return
        save({"full": self.full_entry()}, self.path)
        self.message = f"GPU record written: {self.path} ({len(self.passed)} tests)"

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say what became of the record."""
        terminalreporter.write_line(self.message)


def main(arguments: list[str] | None = None) -> None:
    """Print the digest, or add a pending entry."""
    parser = argparse.ArgumentParser(description="digest of what the GPU tests cover")
    parser.add_argument("--pending", metavar="REASON", help="note why no GPU run was possible")
    options = parser.parse_args(arguments)
    if options.pending is None:
        print(tree_digest())
    else:
        print(f"pending: {add_pending(options.pending)['digest']}")


if __name__ == "__main__":
    main()
