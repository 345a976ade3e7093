"""Kernels are compiled once and found again: in this process, in the next, in eight at once."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from snack_cupy import CompileError, _jit, dispatch, kernels, random, sddmm, spmm, spmm_transposed

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = """
import numpy as np
from snack_cupy import Topology, _jit, spmm, spmm_transposed

cupy = _jit.require_cupy()
topology = Topology.from_mask(np.array([[0, 1, 0], [1, 0, 1]])).to_device("cuda")
values = cupy.array([2, 3, 4], dtype=np.float32)
out = spmm(topology, values, cupy.ones((5, 3), np.float32), batch_major=True)
assert (out.get() == [2, 7]).all(), out
out = spmm_transposed(topology, values, cupy.ones((5, 2), np.float32), batch_major=True)
assert (out.get() == [3, 2, 4]).all(), out
print("right")
"""


def start(**environment):
    """A fresh Python that runs two operations, with none of CuPy's variables but the given."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("CUPY_")}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    variables = {**inherited, "PYTHONPATH": path, **environment}
    return subprocess.Popen(
        (sys.executable, "-c", SCRIPT),
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def assert_right(process):
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output
    assert output.strip().endswith("right")


def stored(folder):
    """Name and modification time of every compiled module in a cache folder."""
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.cubin")}


# In this process


@pytest.fixture
def compiled(cp, monkeypatch):
    """The name expressions handed to ``cupy.RawModule``, from an empty cache on."""
    asked = []
    raw_module = cp.RawModule

    def counting(**arguments):
        asked.extend(arguments["name_expressions"])
        return raw_module(**arguments)

    monkeypatch.setattr(cp, "RawModule", counting)
    _jit.compile_instance.cache_clear()
    dispatch._plan.cache_clear()
    return asked


def test_a_second_call_compiles_nothing(cp, compiled):
    topology = random.random_topology((40, 50), density=0.2, seed=1, xp=cp)
    rng = np.random.default_rng(1)

    def call(dtype, batch):
        values = cp.asarray(rng.standard_normal(topology.nnz).astype(dtype))
        x = cp.asarray(rng.standard_normal((batch, 50)).astype(dtype))
        y = spmm(topology, values, x, batch_major=True)
        spmm_transposed(topology, values, y, batch_major=True)
        sddmm(topology, y, x, batch_major=True)

    for dtype in (np.float32, np.float64):
        before = len(compiled)
        call(dtype, 16)
        after = len(compiled)
        assert after - before >= 3
        assert len(set(compiled)) == after
        hits = dispatch._plan.cache_info().hits
        for _ in range(10):
            call(dtype, 16)
        assert len(compiled) == after
        assert dispatch._plan.cache_info().hits == hits + 30


def test_another_topology_compiles_nothing(cp, compiled):
    counts = set()
    for seed in range(3):
        topology = random.random_topology((40 + seed, 50), nnz=100 + seed, seed=seed, xp=cp)
        spmm(topology, cp.ones(topology.nnz), cp.ones((9, 50)), batch_major=True)
        counts.add(len(compiled))
    assert len(counts) == 1


def test_warmup_compiles_ahead(cp, compiled):
    from snack_cupy import warmup

    topology = random.random_topology((40, 50), density=0.2, seed=1, xp=cp)
    for batch_major in (True, False):
        warmup(topology, 16, "float64", batch_major=batch_major)
        ahead = len(compiled)
        assert ahead > 0
        values = cp.ones(topology.nnz)
        shapes = ((16, 50), (16, 40)) if batch_major else ((50, 16), (40, 16))
        x, gradient = (cp.ones(shape) for shape in shapes)
        spmm(topology, values, x, batch_major=batch_major)
        spmm_transposed(topology, values, gradient, batch_major=batch_major)
        sddmm(topology, gradient, x, batch_major=batch_major)
        assert len(compiled) == ahead
        compiled.clear()


def test_functions_are_kept_per_device(cp):
    for device in range(cp.cuda.runtime.getDeviceCount()):
        functions = [kernels.FILL_ROWS.get(device, T="float32") for _ in range(2)]
        assert functions[0] is functions[1]


def test_compile_error_shows_file_and_line(cp, tmp_path, monkeypatch):
    shutil.copy(_jit.cuda_directory() / "common.cuh", tmp_path)
    text = '#include "common.cuh"\n__global__ void k(int* out) { out[0] = no_such_name; }\n'
    (tmp_path / "broken.cu").write_text(text, encoding="utf-8")
    monkeypatch.setattr(_jit, "cuda_directory", lambda: tmp_path)
    with pytest.raises(CompileError, match=r"cuda/broken\.cu\(2\)") as error:
        _jit.compile_instance("broken.cu", "k", 0)
    assert "no_such_name" in str(error.value)


# Across processes


def test_the_next_process_compiles_nothing(tmp_path):
    assert_right(start(CUPY_CACHE_DIR=str(tmp_path)))
    first = stored(tmp_path)
    assert first
    assert_right(start(CUPY_CACHE_DIR=str(tmp_path)))
    assert stored(tmp_path) == first


def test_eight_processes_compile_at_once(tmp_path):
    processes = [start(CUPY_CACHE_DIR=str(tmp_path)) for _ in range(8)]
    for process in processes:
        assert_right(process)
    first = stored(tmp_path)
    assert first
    assert_right(start(CUPY_CACHE_DIR=str(tmp_path)))
    assert stored(tmp_path) == first


def test_home_that_cannot_be_made(tmp_path):
    assert_right(start(HOME="/dev/null/home"))


def test_home_that_is_read_only(tmp_path):
    # The user root may write here all the same; others may not.
    (tmp_path / ".cupy" / "kernel_cache").mkdir(parents=True)
    folders = (tmp_path / ".cupy" / "kernel_cache", tmp_path / ".cupy", tmp_path)
    for folder in folders:
        folder.chmod(0o555)
    try:
        assert_right(start(HOME=str(tmp_path)))
    finally:
        for folder in folders[::-1]:
            folder.chmod(0o755)


def test_cache_in_memory(tmp_path):
    assert_right(start(CUPY_CACHE_DIR=str(tmp_path), CUPY_CACHE_IN_MEMORY="1"))
    assert not stored(tmp_path)
