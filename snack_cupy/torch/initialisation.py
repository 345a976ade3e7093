"""Random numbers of a new layer: the seed of its topology, and its values and bias."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from snack_cupy.torch.linear import SnackLinear


def draw_seed(generator: torch.Generator | None) -> int:
    """A seed for `snack_cupy.random` from PyTorch's numbers."""
    device = "cpu" if generator is None else generator.device
    return int(torch.randint(2**62, (), generator=generator, device=device))


def reset(layer: SnackLinear, generator: torch.Generator | None) -> None:
    """`SnackLinear.reset_parameters`."""
    if layer.values.is_meta:
        return
    # On the generator's device, so that one of the CPU gives the same values everywhere.
    device = layer.values.device if generator is None else generator.device
    fan_in = (layer.row_offsets[1:] - layer.row_offsets[:-1]).to(device)
    bound = fan_in.clamp(min=1).to(torch.float32).rsqrt()
    per_entry = torch.repeat_interleave(bound, fan_in, output_size=layer.nnz)
    with torch.no_grad():
        _draw(layer.values, per_entry, generator)
        if layer.bias is not None:
            _draw(layer.bias, bound * (fan_in > 0), generator)


def _draw(parameter: torch.Tensor, bound: torch.Tensor, generator: torch.Generator | None) -> None:
    """Uniform within +-bound, on the device of ``bound``."""
    draw = torch.rand(parameter.shape, generator=generator, device=bound.device)
    parameter.copy_((draw * 2 - 1) * bound)
