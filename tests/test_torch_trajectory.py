"""A sparse model trains like Dense+Mask: same topology, same numbers, 100 steps of Adam."""

import torch
from torch_helpers import assert_trajectories_agree, positions, trajectories

from snack_cupy.torch import SnackLinear


def test_trajectory_equals_dense_and_mask_in_float64():
    losses, dense_losses, model, twin = trajectories(torch.float64)
    torch.testing.assert_close(losses, dense_losses, rtol=1e-9, atol=0.0)
    for layer, dense in zip(model, twin, strict=True):
        if isinstance(layer, SnackLinear):
            kept = dense.weight.detach().flatten()[positions(layer)]
            torch.testing.assert_close(layer.values.detach(), kept, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(layer.bias, dense.bias, rtol=1e-9, atol=1e-12)
            outside = dense.weight.detach()[dense.mask == 0]
            assert not outside.any()
    assert losses[-10:].mean() < losses[:10].mean()


def test_trajectory_stays_as_close_to_float64_as_dense_does_in_float32():
    assert_trajectories_agree("cpu")
