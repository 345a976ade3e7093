"""A layer from a dense one and back: `SnackLinear.from_dense` and `SnackLinear.to_dense`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from snack_cupy import _check
from snack_cupy._check import fail
from snack_cupy.topology import Topology
from snack_cupy.torch import bridge

if TYPE_CHECKING:
    from snack_cupy.torch.linear import SnackLinear


def from_dense(
    cls: type[SnackLinear],
    linear: nn.Linear,
    sparsity: float | None,
    mask: torch.Tensor | None,
) -> SnackLinear:
    """`SnackLinear.from_dense`."""
    op = "SnackLinear.from_dense"
    if not isinstance(linear, nn.Linear):
        fail(op, "linear", "be a torch.nn.Linear", type(linear).__name__, TypeError)
    if (sparsity is None) == (mask is None):
        got = "both" if mask is not None else "neither"
        fail(op, "sparsity or mask", "be given, exactly one of them", got, TypeError)
    weight = linear.weight.detach()
    if mask is None:
        kept = _largest(weight, _check.check_fraction(op, "sparsity", sparsity))
    elif not isinstance(mask, torch.Tensor):
        fail(op, "mask", "be a tensor", type(mask).__name__, TypeError)
    elif mask.shape != weight.shape:
        fail(op, "mask", f"have shape {tuple(weight.shape)}", tuple(mask.shape))
    else:
        kept = mask.to(weight.device) != 0
    layer = cls(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        topology=Topology.from_mask(kept.cpu().numpy()),
        device=weight.device,
        dtype=weight.dtype,
        # Its values are overwritten: leave the default generator alone.
        generator=torch.Generator(weight.device),
    )
    with torch.no_grad():
        layer.values.copy_(weight[kept])
        if layer.bias is not None:
            layer.bias.copy_(linear.bias)
            layer.bias.requires_grad_(linear.bias.requires_grad)
    layer.values.requires_grad_(linear.weight.requires_grad)
    return layer.train(linear.training)


def to_dense(layer: SnackLinear) -> nn.Linear:
    """`SnackLinear.to_dense`."""
    linear = nn.utils.skip_init(
        nn.Linear,
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        device=layer.values.device,
        dtype=layer.values.dtype,
    )
    topology = layer.topology
    with torch.no_grad(), bridge.array_scope(layer.values.device):
        positions = bridge.to_tensor(topology.positions)
        linear.weight.zero_()
        linear.weight.view(-1)[positions] = layer.values
        if layer.bias is not None:
            linear.bias.copy_(layer.bias)
            linear.bias.requires_grad_(layer.bias.requires_grad)
    linear.weight.requires_grad_(layer.values.requires_grad)
    return linear.train(layer.training)


def _largest(weight: torch.Tensor, sparsity: float) -> torch.Tensor:
    """Mask of the weights of largest magnitude; of equal ones those of lower index."""
    # As in random_topology: the order of the products decides where halves are rounded.
    keep = round((1 - sparsity) * weight.shape[0] * weight.shape[1])
    order = weight.abs().flatten().argsort(descending=True, stable=True)
    mask = torch.zeros(weight.numel(), dtype=torch.bool, device=weight.device)
    mask[order[:keep]] = True
    return mask.view(weight.shape)
