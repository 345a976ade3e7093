"""Runs the kernels of ``cuda/`` on the host, for tests where there is no GPU.

The sources are compiled by the host's C++ compiler against ``emulation/emulation.h``, which gives
every CUDA thread a fiber. `compile_instance` stands in for that of `snack_cupy._jit`: its function
is launched like CuPy's, but on addresses of NumPy arrays. Slow, and without concurrency: races are
left to compute-sanitizer.
"""

import ctypes
import functools
import hashlib
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from snack_cupy import _jit, kernels

FOLDER = Path(__file__).parent / "emulation"
FLAGS = ("-std=c++17", "-O2", "-w", "-shared", "-fPIC", "-ffp-contract=off", "-U_FORTIFY_SOURCE")

# What a host compiler does not know, as the regular expressions and replacements that turn it into
# what it does.
TRANSLATION = (
    (r"extern __shared__ __align__\(\d+\) (\w+) (\w+)\[\];", r"\1* \2 = emulation::shared<\1>();"),
    (r'asm volatile\(""[^;]*;', ""),
    (r"#pragma unroll.*", ""),
)


def missing():
    """Why kernels cannot be run here; empty if they can."""
    return "" if shutil.which("g++") else "no g++"


def _translated(text):
    for pattern, replacement in TRANSLATION:
        text = re.sub(pattern, replacement, text)
    return text


@functools.cache
def _library(file):
    """The library of all instances of one source file."""
    instances = {
        kernel.expression(**values): 2
        if kernel.name.endswith("_pair")
        else 1  # blocks of a cluster
        for kernel in kernels.KERNELS
        if kernel.file == file
        for values in kernel.instances()
    }
    entries = "\n".join(
        f'extern "C" void run_{i}(int grid, int threads, long shared, const long long* arguments)'
        f" {{ emulation::launch({name}, grid, threads, shared, arguments, {cluster}); }}"
        for i, (name, cluster) in enumerate(instances.items())
    )
    source = f'#include "emulation.h"\n#include "{file}"\n{entries}\n'
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path in _jit.cuda_directory().glob("*.cu*"):
            if (FOLDER / path.name).exists():
                continue  # what only a GPU has: its twin is included instead
            (folder / path.name).write_text(_translated(path.read_text(encoding="utf-8")))
        (folder / "all.cpp").write_text(source)
        library = folder / f"{hashlib.sha256(source.encode()).hexdigest()[:16]}.so"
        includes = [f"-I{folder}", f"-I{FOLDER}"]
        command = ["g++", *FLAGS, *includes, "-o", str(library), str(folder / "all.cpp")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{file} does not compile for the host\n{done.stderr}")
        loaded = ctypes.CDLL(str(library))
    return loaded, {name: i for i, name in enumerate(instances)}


@functools.cache
def compile_instance(file, expression, device, max_shared_bytes=0):
    """A function that runs one instance: ``(grid, block, arguments, shared_bytes, stream)``."""
    library, numbers = _library(file)
    run = getattr(library, f"run_{numbers[expression]}")

    def function(grid, block, arguments, shared_bytes, stream, cooperative=False):
        assert shared_bytes <= max(max_shared_bytes, 48 * 1024)
        values = (ctypes.c_longlong * len(arguments))(*(int(each) for each in arguments))
        run(grid[0], block[0], ctypes.c_long(shared_bytes), values)

    return function
