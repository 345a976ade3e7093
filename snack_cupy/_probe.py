"""What the driver, CuPy and PyTorch say of themselves, each asked in a process of its own.

``doctor`` runs this file as a script, so that a library that crashes, hangs or prints while it is
imported spoils only its own answer. The last line of standard output is a JSON object. The file
imports nothing of the package, and is run with ``python -P``: a script's folder must not come first
on the path here, where ``random.py``, ``io.py`` and ``torch/`` live.
"""

import ctypes
import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

# CUdevice_attribute values of the driver API.
MULTIPROCESSORS, CAPABILITY_MAJOR, CAPABILITY_MINOR = 16, 75, 76

# The header is included because a missing one is as fatal as a missing compiler.
KERNEL = """
#include <cuda_fp16.h>
extern "C" __global__ void snack_doctor(int* out) { *out = (int)__half2float(__float2half(42.f)); }
"""


def attempt(question: Callable[[], Any]) -> tuple[Any, str | None]:
    """Answer and error, one of which is None."""
    try:
        return question(), None
    except Exception as error:  # whatever a broken installation raises is an answer
        return None, f"{type(error).__name__}: {str(error).strip()}"


def ask_driver() -> dict[str, Any]:
    """CUDA version and devices from the driver API; creates no context."""
    try:
        cuda = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return {"present": False}
    version, count = ctypes.c_int(), ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    facts: dict[str, Any] = {"present": True, "cuda": version.value, "version": driver_version()}
    status = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    if status:
        return {**facts, "error": error_name(cuda, status)}
    facts["devices"] = [device_facts(cuda, index) for index in range(count.value)]
    return facts


def error_name(cuda: ctypes.CDLL, status: int) -> str:
    """Name of a ``CUresult``, as in ``CUDA_ERROR_NO_DEVICE``."""
    name = ctypes.c_char_p()
    cuda.cuGetErrorName(status, ctypes.byref(name))
    return name.value.decode() if name.value else f"CUDA_ERROR {status}"


def device_facts(cuda: ctypes.CDLL, index: int) -> dict[str, Any]:
    """Name, compute capability, memory in bytes and multiprocessors of one device."""
    device, name, memory = ctypes.c_int(), ctypes.create_string_buffer(128), ctypes.c_size_t()
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    values = []
    for attribute in (MULTIPROCESSORS, CAPABILITY_MAJOR, CAPABILITY_MINOR):
        value = ctypes.c_int()
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        values.append(value.value)
    return {
        "name": name.value.decode(errors="replace"),
        "memory": memory.value,
        "multiprocessors": values[0],
        "capability": values[1:],
    }


def driver_version() -> str | None:
    """Version of the driver package, as in ``580.65.06``; None where NVML is absent."""
    try:
        nvml = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
    except OSError:
        return None
    text = ctypes.create_string_buffer(80)
    if nvml.nvmlInit_v2() or nvml.nvmlSystemGetDriverVersion(text, len(text)):
        return None
    return text.value.decode()


def ask_cupy() -> dict[str, Any]:
    """Version, runtime, NVRTC and, where there is a device, whether a kernel compiles and runs."""
    cupy = importlib.import_module("cupy")
    facts: dict[str, Any] = {"version": cupy.__version__}
    facts["runtime"], facts["runtime_error"] = attempt(cupy.cuda.get_local_runtime_version)
    facts["nvrtc"], facts["nvrtc_error"] = attempt(cupy.cuda.nvrtc.getVersion)
    count, _ = attempt(cupy.cuda.runtime.getDeviceCount)
    if count and facts["nvrtc"]:
        facts["kernel"], facts["kernel_error"] = attempt(lambda: run_kernel(cupy))
    return facts


def run_kernel(cupy: Any) -> bool:
    """Compile and run a kernel that writes 42; raises what went wrong."""
    out = cupy.zeros(1, dtype="int32")
    cupy.RawKernel(KERNEL, "snack_doctor")((1,), (1,), (out,))
    if int(out[0]) != 42:
        raise RuntimeError(f"the kernel must write 42, got {int(out[0])}")
    return True


def ask_torch() -> dict[str, Any]:
    """Version, the CUDA it is built for, and whether it can use a device."""
    torch = importlib.import_module("torch")
    facts = {"version": torch.__version__, "cuda": torch.version.cuda, "usable": False}
    if torch.version.cuda:
        facts["usable"] = bool(torch.cuda.is_available())
        if not facts["usable"]:
            _, facts["error"] = attempt(torch.cuda.init)
    return facts


QUESTIONS = {"driver": ask_driver, "cupy": ask_cupy, "torch": ask_torch}


def main(name: str) -> None:
    """Print the answer to one question as JSON; an exception becomes ``{"error": ...}``."""
    answer, error = attempt(QUESTIONS[name])
    sys.stdout.write("\n" + json.dumps(answer if error is None else {"error": error}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
