"""The GPU record belongs to this tree; and the recorder records only what deserves it."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import gpu_record
import pytest

DEVICE = {"device": "a GPU", "driver": "1.2", "cuda_runtime": "13000", "nvrtc": "13.0"}


class GpuRunPendingWarning(UserWarning):
    """The tree was not run on a GPU, for the stated reason."""


# The record of this repository


def test_gpu_record_matches_the_tree():
    ids = gpu_record.collected_ids()
    assert ids, "no tests collected in tests/gpu"
    verdict = gpu_record.judge(gpu_record.load(), gpu_record.tree_digest(), ids)
    assert verdict.ok, verdict.message
    if verdict.message:
        warnings.warn(verdict.message, GpuRunPendingWarning, stacklevel=1)


def test_gpu_record_ids_do_not_depend_on_what_is_installed(tmp_path):
    # Stand-ins that cannot be imported, in front of the real packages.
    for name in ("cupy", "torch"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('no {name} here')\n")
    plain = gpu_record.collected_ids()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        assert gpu_record.collected_ids() == plain


# Digest


@pytest.fixture
def tree(tmp_path):
    """A small repository: two GPU tests, one source in each folder."""
    for name, text in {
        "cuda/a.cu": "kernel",
        "snack_cupy/b.py": "python",
        "tests/gpu/test_c.py": "def test_one():\n    pass\n\n\ndef test_two():\n    pass\n",
        "tests/gpu/conftest.py": _CONFTEST,
        "pytest.ini": "[pytest]\naddopts = --import-mode=importlib\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


_CONFTEST = f"""
from pathlib import Path

import gpu_record

gpu_record.device = lambda: {DEVICE!r}


def pytest_addoption(parser):
    parser.addoption("--gpu-record", default=None)


def pytest_configure(config):
    path = config.getoption("gpu_record", default=None)
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(gpu_record.Recorder(Path(path), Path.cwd()))
"""


@pytest.mark.parametrize("folder", gpu_record.FOLDERS)
def test_digest_sees_content_names_and_new_files(tree, folder):
    seen = {gpu_record.tree_digest(tree)}
    file = next(path for path in (tree / folder).iterdir() if path.suffix in (".cu", ".py"))
    file.write_bytes(file.read_bytes() + b" ")
    seen.add(gpu_record.tree_digest(tree))
    file.rename(file.with_name(f"other_{file.name}"))
    seen.add(gpu_record.tree_digest(tree))
    (tree / folder / "deeper").mkdir()
    (tree / folder / "deeper" / "new.py").write_bytes(b"")
    seen.add(gpu_record.tree_digest(tree))
    assert len(seen) == 4


def test_digest_ignores_caches_and_other_folders(tree):
    before = gpu_record.tree_digest(tree)
    for name in (
        "tests/gpu/__pycache__/test_c.pyc",
        "snack_cupy/stray.pyc",
        "cuda/.hidden",
        "tests/gpu/.pytest_cache/v",
        "tests/helpers.py",
        "README.md",
    ):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("anything")
    assert gpu_record.tree_digest(tree) == before


def test_digest_tells_where_a_name_ends(tree):
    (tree / "cuda" / "x").write_bytes(b"yz")
    before = gpu_record.tree_digest(tree)
    (tree / "cuda" / "x").rename(tree / "cuda" / "xy")
    (tree / "cuda" / "xy").write_bytes(b"z")
    assert gpu_record.tree_digest(tree) != before


# Judgement

FULL = {"digest": "d", "tests": ["a", "b"], "date": "2026-01-01", "device": "a GPU"}
PENDING = {"reason": "no machine", "date": "2026-01-02", "digest": "e"}


@pytest.mark.parametrize(
    ("record", "digest", "ids", "ok", "message"),
    [
        pytest.param({"full": FULL}, "d", ["a", "b"], True, "", id="current"),
        pytest.param({"full": FULL}, "e", ["a", "b"], False, "changed since", id="sources"),
        pytest.param({"full": FULL}, "d", ["a"], False, "gone ['b']", id="test-gone"),
        pytest.param({"full": FULL}, "d", ["a", "b", "c"], False, "new ['c']", id="test-new"),
        pytest.param({"full": None}, "d", ["a"], False, "no GPU record", id="none"),
        pytest.param(
            {"full": FULL, "pending": PENDING}, "e", ["a"], True, "no machine", id="pending"
        ),
        pytest.param(
            {"full": None, "pending": PENDING},
            "e",
            ["a"],
            True,
            "last complete run: none",
            id="pending-first",
        ),
        pytest.param(
            {"full": FULL, "pending": PENDING}, "f", ["a"], False, "changed", id="pending-old"
        ),
        pytest.param({"full": FULL, "pending": PENDING}, "d", ["a", "b"], True, "", id="reverted"),
    ],
)
def test_judge(record, digest, ids, ok, message):
    verdict = gpu_record.judge(record, digest, ids)
    assert verdict.ok is ok
    assert message in verdict.message
    assert bool(verdict.message) == bool(message)


def test_pending_entry_stands_beside_the_last_run(tree):
    path = tree / "record.json"
    gpu_record.save({"full": FULL}, path)
    pending = gpu_record.add_pending(" no machine was lent ", path, tree)
    record = gpu_record.load(path)
    assert record == {"full": FULL, "pending": pending}
    assert pending["reason"] == "no machine was lent"
    assert pending["digest"] == gpu_record.tree_digest(tree)
    with pytest.raises(ValueError, match="needs a reason"):
        gpu_record.add_pending("  ", path, tree)
    assert gpu_record.load(path) == record


def test_command_prints_the_digest_or_adds_a_reason(tree, capsys, monkeypatch):
    gpu_record.main([])
    assert capsys.readouterr().out.strip() == gpu_record.tree_digest()
    path, add_pending = tree / "record.json", gpu_record.add_pending
    monkeypatch.setattr(gpu_record, "add_pending", lambda reason: add_pending(reason, path, tree))
    gpu_record.main(["--pending", "no machine"])
    assert gpu_record.load(path)["pending"]["reason"] == "no machine"


# Recorder


def _report(nodeid, *, when="call", outcome="passed", **more):
    flags = {name: outcome == name for name in ("passed", "failed", "skipped")}
    return SimpleNamespace(nodeid=nodeid, when=when, **flags, **more)


@pytest.mark.parametrize(
    ("report", "message"),
    [
        pytest.param(_report("x", outcome="failed"), "1 tests failed", id="failed"),
        pytest.param(_report("x", when="setup", outcome="failed"), "1 tests failed", id="setup"),
        pytest.param(_report("x", when="teardown", outcome="failed"), "failed", id="teardown"),
        pytest.param(_report("x", outcome="skipped"), "skipped", id="skipped"),
        pytest.param(_report("x", outcome="skipped", wasxfail=""), "skipped", id="xfailed"),
        pytest.param(_report("x", wasxfail=""), "skipped", id="xpassed"),
    ],
)
def test_recorder_refuses_after_a_report(tree, report, message):
    recorder = gpu_record.Recorder(tree / "record.json", tree)
    recorder.pytest_runtest_logreport(_report("tests/gpu/test_c.py::test_one"))
    recorder.pytest_runtest_logreport(report)
    session = SimpleNamespace(exitstatus=0)
    recorder.pytest_sessionfinish(session, 0)
    assert message in recorder.message
    assert session.exitstatus == 1
    assert not (tree / "record.json").exists()


def test_recorder_refuses_files_that_changed_meanwhile(tree):
    recorder = gpu_record.Recorder(tree / "record.json", tree)
    for name in ("one", "two"):
        recorder.pytest_runtest_logreport(_report(f"tests/gpu/test_c.py::test_{name}"))
    with pytest.MonkeyPatch.context() as patch:
        ids = ["tests/gpu/test_c.py::test_one", "tests/gpu/test_c.py::test_two"]
        patch.setattr(gpu_record, "collected_ids", lambda root: ids)
        assert recorder.refusal(0) == ""
        (tree / "cuda" / "a.cu").write_text("edited")
        assert recorder.refusal(0) == "files changed during the run"


def _run(tree, *arguments):
    """One pytest process in ``tree``, which writes (or refuses) record.json."""
    folders = (str(Path(gpu_record.__file__).parent), os.environ.get("PYTHONPATH"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):
        environment.pop(name, None)
    command = (sys.executable, "-m", "pytest", "-q", "--gpu-record", "record.json", *arguments)
    return subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, check=False
    )


def test_recorder_writes_after_a_complete_run(tree):
    gpu_record.save({"full": None, "pending": PENDING}, tree / "record.json")
    done = _run(tree, "tests/gpu", "-p", "no:xdist")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "GPU record written" in done.stdout
    record = json.loads((tree / "record.json").read_text())
    assert list(record) == ["full"]  # the pending entry is cleared
    full = record["full"]
    assert full["tests"] == ["tests/gpu/test_c.py::test_one", "tests/gpu/test_c.py::test_two"]
    assert full["passed"] == 2
    assert full["digest"] == gpu_record.tree_digest(tree)
    assert {name: full[name] for name in DEVICE} == DEVICE
    assert {"python", "numpy", "scipy", "cupy", "torch"} <= set(full["versions"])
    assert full["duration_seconds"] >= 0
    assert gpu_record.judge(record, gpu_record.tree_digest(tree), full["tests"]).ok


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(("tests/gpu", "-k", "one"), "not complete: 1 tests", id="filtered"),
        pytest.param(("tests/gpu/test_c.py::test_two",), "not complete: 1 tests", id="one-test"),
        pytest.param(("tests/gpu", "--collect-only"), "not complete: 2 tests", id="collect-only"),
        pytest.param(("tests/gpu", "-k", "nothing"), "exit status 5", id="nothing"),
    ],
)
def test_recorder_refuses_an_incomplete_run(tree, arguments, message):
    done = _run(tree, *arguments, "-p", "no:xdist")
    assert done.returncode != 0
    assert "GPU record NOT written" in done.stdout
    assert message in done.stdout
    assert not (tree / "record.json").exists()


def test_recorder_works_under_xdist(tree):
    pytest.importorskip("xdist")
    done = _run(tree, "tests/gpu", "-n", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert gpu_record.load(tree / "record.json")["full"]["passed"] == 2
