"""What every test shares: hypothesis settings and seeded random numbers."""

import numpy as np
import pytest
from hypothesis import settings

settings.register_profile("ci", derandomize=True, max_examples=50, deadline=None)
settings.load_profile("ci")


@pytest.fixture
def rng():
    """NumPy random numbers that are the same in every run."""
    return np.random.default_rng(0)
