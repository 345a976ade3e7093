"""A sparse model trains like Dense+Mask on the GPU: same topology and numbers, 100 Adam steps."""

import pytest


@pytest.fixture(autouse=True)
def full_precision(torch):
    """TF32 off, whatever was set."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def test_trajectory_equals_dense_and_mask_in_float64(torch, torch_helpers):
    losses, dense_losses, model, twin = torch_helpers.trajectories(torch.float64, "cuda")
    torch.testing.assert_close(losses, dense_losses, rtol=1e-9, atol=0.0)
    for layer, dense in zip(model, twin, strict=True):
        if hasattr(layer, "values"):
            places = torch.from_numpy(torch_helpers.positions(layer)).cuda()
            kept = dense.weight.detach().flatten()[places]
            torch.testing.assert_close(layer.values.detach(), kept, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(layer.bias, dense.bias, rtol=1e-9, atol=1e-12)


def test_trajectory_equals_that_of_the_cpu_in_float64(torch, torch_helpers):
    losses, host_losses = (torch_helpers.trajectories(torch.float64, d)[0] for d in ("cuda", "cpu"))
    torch.testing.assert_close(losses, host_losses, rtol=1e-9, atol=0.0)


def test_trajectory_stays_as_close_to_float64_as_dense_does_in_float32(torch_helpers):
    torch_helpers.assert_trajectories_agree("cuda")
