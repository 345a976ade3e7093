"""The two things asked of NVML, the library that comes with NVIDIA's driver."""

import ctypes

import torch


class NvmlError(RuntimeError):
    """NVML is missing or refused."""


class Nvml:
    """NVML for the current CUDA device."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            raise NvmlError(f"no NVML: {error}") from error
        self._call("nvmlInit_v2")
        self._handle = ctypes.c_void_p()
        # CUDA and NVML number devices differently; a device's UUID is the same in both.
        uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self._handle))

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise NvmlError(f"{name} returned {status}")

    def energy(self) -> float:
        """Joules the device has taken since the driver was loaded."""
        millijoules = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", self._handle, ctypes.byref(millijoules))
        return millijoules.value / 1e3

    def driver(self) -> str:
        """Version of the driver."""
        text = ctypes.create_string_buffer(96)
        self._call("nvmlSystemGetDriverVersion", text, ctypes.c_uint(len(text)))
        return text.value.decode()
