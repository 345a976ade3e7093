"""Run-time compilation of the CUDA sources through ``cupy.RawModule``, and the one launch.

CuPy caches compiled modules on disk by source text and options but does not look into included
headers, so the digest of all headers is part of the source text. One module is compiled per kernel
instance (one name expression), and kept per device.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import os
import shutil
import sys
import tempfile
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

OPTIONS = ("-std=c++17",)

INSTALL_HINT = (
    'install CuPy with its CUDA components: pip install "snack-cupy[cuda13]" '
    '(CUDA 13) or "snack-cupy[cuda12]" (CUDA 12); `python -m snack_cupy doctor` tells which'
)


class CudaUnavailableError(RuntimeError):
    """CuPy, a CUDA device or the run-time compiler is missing; the message says what to install."""


class CompileError(RuntimeError):
    """A CUDA source does not compile; the message holds NVRTC's log with file and line."""


@functools.cache
def cuda_directory() -> Path:
    """The folder of the CUDA sources: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "cuda", package.parent / "cuda"):
        if (folder / "common.cuh").is_file():
            return folder
    raise FileNotFoundError(f"snack_cupy: no CUDA sources in {package / 'cuda'} or beside it")


def header_digest(folder: Path) -> str:
    """SHA-256 over the names and bytes of every ``*.cuh`` of ``folder``."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.cuh")):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def read_source(file: str, folder: Path | None = None) -> str:
    """Source text of ``cuda/<file>``, preceded by the header digest and a ``#line`` directive."""
    folder = folder or cuda_directory()
    text = (folder / file).read_text(encoding="utf-8")
    return f'// headers {header_digest(folder)}\n#line 1 "cuda/{file}"\n{text}'


def require_cupy() -> ModuleType:
    """CuPy, once it is known to see a device; else `CudaUnavailableError`."""
    _ensure_cache_folder()
    try:
        import cupy
    except ImportError as error:
        raise CudaUnavailableError(f"snack_cupy: CuPy is missing; {INSTALL_HINT}") from error
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise CudaUnavailableError(f"snack_cupy: no usable CUDA device ({error})") from error
    if count == 0:
        raise CudaUnavailableError("snack_cupy: no CUDA device is visible")
    return cupy


def _ensure_cache_folder() -> None:
    """Point CuPy at a temporary folder where its own cache folder cannot be written.

    CuPy makes that folder when it is imported, and its import fails where it cannot.
    """
    if "cupy" in sys.modules:
        return
    chosen = os.environ.get("CUPY_CACHE_DIR")
    try:
        folder = Path(chosen) if chosen else Path.home() / ".cupy" / "kernel_cache"
        folder.mkdir(parents=True, exist_ok=True)
        usable = os.access(folder, os.W_OK | os.X_OK)
    except (OSError, RuntimeError):
        usable = False
    if not usable:
        temporary = tempfile.mkdtemp(prefix="snack_cupy-kernels-")
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        os.environ["CUPY_CACHE_DIR"] = temporary


MOST_ARGUMENTS = 32
_ONES = (1, 1)


_thread = threading.local()  # .arguments: what `_make_arguments` made for this thread


def _make_arguments() -> tuple[Any, int]:
    """Memory for the arguments of a launch, and the address of the array of pointers into it.

    The driver copies arguments before a launch returns, so a thread needs no more than one.
    """
    values = (ctypes.c_int64 * MOST_ARGUMENTS)()
    first = ctypes.addressof(values)
    pointers = (ctypes.c_void_p * MOST_ARGUMENTS)(*range(first, first + ctypes.sizeof(values), 8))
    _thread.pointers = pointers  # to live as long as the thread
    # A thread that has not used CUDA yet, as those of autograd may be, has no context; any such
    # call of the runtime gives it one, and the device guards of PyTorch and CuPy change it.
    require_cupy().cuda.runtime.memGetInfo()
    _thread.arguments = values, ctypes.addressof(pointers)
    return _thread.arguments


class Function:
    """A compiled kernel, launched by a call.

    Its arguments are Python ints and are passed with 8 bytes each. ``cupy.cuda.Function`` makes an
    object of each argument; this writes them to memory that the thread keeps.
    """

    __slots__ = ("_address", "_function", "_launch", "_launch_together")

    def __init__(self, function: Any, driver: Any) -> None:
        self._function = function  # keeps the module loaded
        self._address = function.ptr
        self._launch, self._launch_together = driver.launchKernel, driver.launchCooperativeKernel

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        arguments: tuple[int, ...],
        shared_bytes: int,
        stream: int,
        cooperative: bool = False,
    ) -> None:
        """Launch on ``stream``, a raw one; ``cooperative``: all blocks run at the same time."""
        x, y, z = (grid + _ONES)[:3]
        i, j, k = (block + _ONES)[:3]
        launch_kernel, address = self._launch, self._address
        try:
            values, pointers = _thread.arguments
        except AttributeError:
            values, pointers = _make_arguments()
        # Nothing may come between these two: whatever else this thread launched would be mixed in.
        values[: len(arguments)] = arguments
        if cooperative:
            self._launch_together(address, x, y, z, i, j, k, shared_bytes, stream, pointers)
            return
        launch_kernel(address, x, y, z, i, j, k, shared_bytes, stream, pointers, 0)


@functools.cache
def compile_instance(file: str, expression: str, device: int, max_shared_bytes: int = 0) -> Any:
    """The `Function` of one kernel instance on one device, compiled on first use.

    ``max_shared_bytes`` raises the dynamic shared memory limit above 48 KB.
    """
    cupy = require_cupy()
    options = (*OPTIONS, f"-I{cuda_directory()}")
    with cupy.cuda.Device(device):
        try:
            module = cupy.RawModule(
                code=read_source(file), options=options, name_expressions=(expression,)
            )
            kernel = module.get_function(expression)
            if max_shared_bytes:
                kernel.max_dynamic_shared_size_bytes = max_shared_bytes
            return Function(kernel.kernel, cupy.cuda.driver)
        except cupy.cuda.compiler.CompileException as error:
            raise CompileError(f"snack_cupy: {expression} does not compile\n{error}") from error
        except (ImportError, RuntimeError, OSError) as error:
            if "nvrtc" in str(error).lower():
                raise CudaUnavailableError(
                    f"snack_cupy: NVRTC is missing ({error}); {INSTALL_HINT}"
                ) from error
            raise


def launch(plan: Any, pointers: tuple[int, ...], stream: int) -> None:
    """Launch every step of ``plan`` on ``stream``, a raw one (0 is the default stream).

    ``pointers`` are device addresses (0 for an absent optional array) in the plan's order. Kernels
    take their sizes first and then pointers, all of them 8 bytes wide, as Python ints are passed.
    The device of the plan must be current.
    """
    for step in plan.steps:
        chosen = pointers if step.select is None else step.select(pointers)
        step.function(step.grid, step.block, step.sizes + chosen, step.shared_bytes, stream)
