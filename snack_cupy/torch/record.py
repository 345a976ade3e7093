"""What the backward passes of a layer show of its dense gradient: `GradientRecord`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from snack_cupy.torch.linear import SnackLinear

Pair = tuple[torch.Tensor, torch.Tensor]


class GradientRecord:
    """Pairs (gradient of the result, input) of the passes that make up ``values.grad``.

    The dense gradient is the sum of their products. A pass that begins with the gradient cleared,
    or written by others since the last pass, begins the record anew. True once it holds something.

    Parameters
    ----------
    layer : SnackLinear
        Whose ``values`` require a gradient.
    """

    def __init__(self, layer: SnackLinear) -> None:
        self._values = layer.values
        self._held: list[Pair] = []
        self._passing: list[Pair] = []  # of the pass that is under way
        self._is_first = True
        self._gradient: tuple[int, int] | None = None
        self._handles = [
            layer.register_forward_hook(self._after_forward),
            layer.values.register_post_accumulate_grad_hook(self._after_pass),
        ]

    def __bool__(self) -> bool:
        return bool(self._held)

    def operands(self) -> Pair:
        """Everything held as two matrices, (batch, out_features) and (batch, in_features)."""
        results, inputs = zip(*self._held, strict=True)
        return torch.cat(results), torch.cat(inputs)

    def close(self) -> None:
        """Remove the hooks and let go of what is held."""
        for handle in self._handles:
            handle.remove()
        self._held, self._passing = [], []

    def _after_forward(self, layer: Any, args: tuple[torch.Tensor, ...], y: torch.Tensor) -> None:
        if not (torch.is_grad_enabled() and y.requires_grad):
            return
        x = args[0].detach()

        def keep(dy: torch.Tensor) -> None:
            self._keep(dy.detach(), x)

        y.register_hook(keep)

    def _keep(self, dy: torch.Tensor, x: torch.Tensor) -> None:
        if not self._passing:
            self._is_first = self._gradient is None or self._gradient != self._stamp()
        # A copy: callers may write the next batch into the same tensor.
        flat = x.reshape(-1, x.shape[-1]).to(dy.dtype, copy=True)
        self._passing.append((dy.reshape(-1, dy.shape[-1]), flat))

    def _after_pass(self, values: torch.Tensor) -> None:
        self._held = self._passing if self._is_first else self._held + self._passing
        self._passing = []
        self._gradient = self._stamp()

    def _stamp(self) -> tuple[int, int] | None:
        """Which gradient there is, and how often it was written."""
        gradient = self._values.grad
        return None if gradient is None else (id(gradient), gradient._version)
