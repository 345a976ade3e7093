"""GPU tests: all marked ``gpu``, skipped with a reason where there is no usable GPU.

``SNACK_REQUIRE_GPU=1`` turns those skips into failures. ``--gpu-record PATH`` writes the record of
a complete run (see ``tests/gpu_record.py``). No module here imports CuPy or torch at the top, and
nothing is parametrised on what is installed: the ids are the same on every machine.
"""

import functools
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
    reason = unusable_gpu()
    if not reason:
        return
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
