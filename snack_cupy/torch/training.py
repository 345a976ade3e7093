"""Dynamic sparse training of a model through its optimiser: `SET`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from snack_cupy import random
from snack_cupy._check import check_count, check_fraction, fail
from snack_cupy.dst import UpdateSchedule
from snack_cupy.dst.schedule import MAX_STEP
from snack_cupy.torch.linear import SnackLinear
from snack_cupy.torch.restructuring import check_optimizer_state


class SET:
    """Sparse evolutionary training: drop the smallest weights, grow as many at random places.

    Parameters
    ----------
    drop_fraction : float in [0, 1], or callable from the step to one
        Fraction of each layer's connections replaced by one update.
    update_every : int
        Optimiser steps between updates.
    start, stop : int
        No update before step `start`, nor from step `stop` on (None: never stop).
    seed : int
        With the layer's name and the step, the key of every random number: two runs with the same
        seed restructure alike, on the CPU and on the GPU.

    Attributes
    ----------
    step : int
        Optimiser steps seen.
    updates : int
        Updates done.

    Raises
    ------
    ValueError, TypeError
        A parameter is out of its range.

    Notes
    -----
    `attach` registers a hook that runs after the optimiser's own ``step``; the optimiser is not
    wrapped. Its per-connection state (momentum, Adam's moments) follows the connections.

    What is kept of the paper: magnitude drop and random growth at constant nnz. What is changed:
    the drop takes the smallest magnitudes rather than the values closest to zero on each side of
    it, and updates are counted in steps rather than epochs.

    Source: Mocanu et al., "Scalable training of artificial neural networks with adaptive sparse
    connectivity inspired by network science", Nature Communications 2018.

    Examples
    --------
    >>> import torch
    >>> from snack_cupy.torch import SET, SnackLinear
    >>> model = torch.nn.Sequential(SnackLinear(64, 32), torch.nn.ReLU(), SnackLinear(32, 10))
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> method = SET(drop_fraction=0.3, update_every=2).attach(model, optimizer)
    >>> for _ in range(4):
    ...     optimizer.zero_grad()
    ...     model(torch.randn(8, 64)).square().mean().backward()
    ...     _ = optimizer.step()
    >>> method.updates
    2
    """

    def __init__(
        self,
        drop_fraction: float | Callable[[int], float] = 0.3,
        update_every: int = 100,
        start: int = 0,
        stop: int | None = None,
        seed: int = 0,
    ) -> None:
        if not callable(drop_fraction):
            check_fraction("SET", "drop_fraction", drop_fraction, include_one=True)
        self.drop_fraction = drop_fraction
        self.schedule = UpdateSchedule(update_every, start, stop)
        random.key(seed)  # raises where it is no integer
        self.seed = seed
        self.step = 0
        self.updates = 0
        self._layers: dict[str, SnackLinear] = {}
        self._optimizer: torch.optim.Optimizer | None = None
        self._handle: Any = None

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> SET:
        """Restructure every `SnackLinear` of ``model`` as ``optimizer`` steps.

        Parameters
        ----------
        model : nn.Module
        optimizer : torch.optim.Optimizer
            Of whatever kind, unmodified; its state of the layers' ``values`` follows.

        Returns
        -------
        SET
            Itself.

        Raises
        ------
        ValueError
            The model has no `SnackLinear`, or this object is attached already.
        TypeError
            ``optimizer`` is no optimizer.
        """
        if self._handle is not None:
            fail("SET.attach", "SET", "be attached to one optimizer at a time", "a second one")
        if not isinstance(optimizer, torch.optim.Optimizer):
            rule = "be a torch.optim.Optimizer"
            fail("SET.attach", "optimizer", rule, type(optimizer).__name__, TypeError)
        modules = model.named_modules()
        layers = {name: module for name, module in modules if isinstance(module, SnackLinear)}
        if not layers:
            fail("SET.attach", "model", "contain a SnackLinear", type(model).__name__)
        self._layers, self._optimizer = layers, optimizer
        self._handle = optimizer.register_step_post_hook(self._after_step)
        return self

    def detach(self) -> None:
        """Stop restructuring."""
        if self._handle is not None:
            self._handle.remove()
        self._handle, self._optimizer, self._layers = None, None, {}

    def update(self) -> None:
        """Restructure every layer now, with the drop fraction of the current step.

        Raises
        ------
        ValueError
            Not attached, or optimiser state of a layer cannot follow; nothing is changed then.
        RuntimeError
            A CUDA graph is being captured.
        """
        if self._optimizer is None:
            fail("SET.update", "SET", "be attached", "no optimizer")
        for layer in self._layers.values():
            check_optimizer_state(self._optimizer, layer.values, layer.nnz)
        fraction = self.drop_fraction
        fraction = fraction(self.step) if callable(fraction) else fraction
        for name, layer in self._layers.items():
            key = random.key(self.seed, name, self.step)
            layer.restructure(fraction, optimizer=self._optimizer, key=key)
        self.updates += 1

    def state_dict(self) -> dict[str, int]:
        """Counters and seed; with the model's and the optimiser's state a run resumes exactly."""
        return {"step": self.step, "updates": self.updates, "seed": self.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take over the counters and the seed of `state_dict`.

        Raises
        ------
        ValueError, TypeError
            One of them is missing, no integer, or a negative count; nothing is changed then.
        """
        op = "SET.load_state_dict"
        for name in ("step", "updates", "seed"):
            if name not in state:
                fail(op, "state", f"hold {name!r}", sorted(state))
        random.key(state["seed"])
        step = check_count(op, "step", state["step"], high=MAX_STEP)
        updates = check_count(op, "updates", state["updates"], high=MAX_STEP)
        self.step, self.updates, self.seed = step, updates, state["seed"]

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.step += 1
        if self.schedule.due(self.step):
            self.update()
