"""Two runs of every default path give the same bits."""

import numpy as np
import pytest
from gpu_arrays import put
from helpers import DTYPES, normal, to_numpy

from snack_cupy import dispatch, random, sddmm, spmm, spmm_transposed

RUNS = 5


@pytest.mark.parametrize("batch_major", [True, False], ids=["batch_major", "feature_major"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_default_paths_are_bit_equal(cp, rng, dtype, batch_major):
    m, k = 513, 1030
    topology = random.random_topology((m, k), density=0.2, seed=1, xp=cp)
    values = put(normal(rng, topology.nnz, dtype))
    for batch in (1, 4, 33):
        shapes = [(batch, k), (batch, m)] if batch_major else [(k, batch), (m, batch)]
        x, gradient = (put(normal(rng, shape, dtype)) for shape in shapes)
        for op, *operands in (
            (spmm, values, x),
            (spmm_transposed, values, gradient),
            (sddmm, gradient, x),
        ):
            runs = [to_numpy(op(topology, *operands, batch_major=batch_major)) for _ in range(RUNS)]
            for run in runs[1:]:
                np.testing.assert_array_equal(run.view(np.uint8), runs[0].view(np.uint8))


def test_default_paths_use_no_kernel_marked_non_deterministic(cp, monkeypatch):
    chosen = []
    plan = dispatch.plan

    def recording(problem, device):
        result = plan(problem, device)
        chosen.extend(choice.kernel.name for choice in result.choices)
        return result

    monkeypatch.setattr(dispatch, "plan", recording)
    topology = random.random_topology((40, 50), density=0.2, seed=1, xp=cp)
    values, x = cp.ones(topology.nnz), cp.ones((7, 50))
    spmm(topology, values, x, batch_major=True)
    sddmm(topology, spmm(topology, values, x, batch_major=True), x, batch_major=True)
    assert chosen
    assert "spmm_coo_atomic" not in chosen
    spmm(topology, values, x, batch_major=True, kernel="snack_coo")
    assert "spmm_coo_atomic" in chosen


def test_topologies_and_their_views_are_equal(cp):
    first, second = (
        random.random_topology((700, 900), density=0.05, seed=6, xp=cp) for _ in range(2)
    )
    assert first.equals(second)
    for one, other in zip(first.transposed, second.transposed, strict=True):
        assert bool((one == other).all())
