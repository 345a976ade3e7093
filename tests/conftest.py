"""What every test shares: hypothesis settings and seeded random numbers."""

import coo_helpers
import numpy as np
import pytest
from hypothesis import settings

from snack_cupy import COOTensor

settings.register_profile("ci", derandomize=True, max_examples=50, deadline=None)
settings.load_profile("ci")


@pytest.fixture
def rng():
    """NumPy random numbers that are the same in every run."""
    return np.random.default_rng(0)


@pytest.fixture
def messy():
    """The unsorted tensor with duplicates of `coo_helpers`, in float64."""
    coords = (coo_helpers.ROW, coo_helpers.COL)
    return COOTensor(coords, np.array(coo_helpers.DATA, float), (3, 4))
