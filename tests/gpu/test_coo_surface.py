"""The CPU's tests of the array surface, on CuPy arrays."""

import pytest
import test_coo_surface
from gpu_arrays import tests_that_take_xp

from snack_cupy import _jit

globals().update(tests_that_take_xp(test_coo_surface))


@pytest.fixture
def xp():
    return _jit.require_cupy()
