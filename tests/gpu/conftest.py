"""GPU tests: all marked ``gpu``, skipped with a reason where there is no usable GPU.

``SNACK_REQUIRE_GPU=1`` turns those skips into failures. ``--gpu-record PATH`` writes the record of
a complete run (see ``tests/gpu_record.py``). No module here imports CuPy or torch at the top, and
nothing is parametrised on what is installed: the ids are the same on every machine.
"""

import functools
import importlib
import os
from pathlib import Path

import gpu_record
import pytest

from snack_cupy import _jit, kernels

FOLDER = Path(__file__).parent


def pytest_addoption(parser):
    parser.addoption(
        "--gpu-record",
        metavar="PATH",
        default=None,
        help="write the record of a complete GPU run in which every test passed",
    )


def pytest_configure(config):
    path = config.getoption("gpu_record", default=None)
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(gpu_record.Recorder(Path(path)), "gpu-recorder")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(FOLDER):
            item.add_marker(pytest.mark.gpu)


def pytest_runtest_setup(item):
    if reason := unusable_gpu():
        skip_or_fail(reason)


def skip_or_fail(reason):
    """Skip the test, or fail it where a GPU is required."""
    if os.environ.get("SNACK_REQUIRE_GPU") == "1":
        pytest.fail(f"SNACK_REQUIRE_GPU=1, but {reason}", pytrace=False)
    pytest.skip(reason)


@functools.cache
def unusable_gpu():
    """Why kernels cannot be compiled and run here; empty if they can."""
    try:
        _jit.require_cupy()
        kernels.FILL_ROWS.get(0, T="float32")
    except _jit.CudaUnavailableError as error:
        return str(error)
    return ""


@pytest.fixture
def cp():
    """CuPy; the device is synchronised after the test, so that a fault stays with its test."""
    cupy = _jit.require_cupy()
    yield cupy
    cupy.cuda.runtime.deviceSynchronize()


@pytest.fixture
def torch(cp):
    """PyTorch with a CUDA device; what it has queued is finished after the test."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        skip_or_fail("PyTorch is missing")
    if not torch.cuda.is_available():
        skip_or_fail(f"PyTorch {torch.__version__} sees no CUDA device")
    yield torch
    torch.cuda.synchronize()


@pytest.fixture
def torch_helpers(torch):
    """The module `torch_helpers`, which imports PyTorch."""
    return importlib.import_module("torch_helpers")


@pytest.fixture
def snack(torch):
    """The package `snack_cupy.torch`."""
    return importlib.import_module("snack_cupy.torch")
