"""Dynamic sparse training of a model through its optimiser: `SET` and `RigL`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from snack_cupy import random
from snack_cupy._check import check_count, check_fraction, fail
from snack_cupy.dst import UpdateSchedule
from snack_cupy.dst.schedule import MAX_STEP
from snack_cupy.torch.linear import SnackLinear
from snack_cupy.torch.record import GradientRecord
from snack_cupy.torch.restructuring import check_optimizer_state

Self = TypeVar("Self", bound="Method")


class Method:
    """What `SET` and `RigL` share: an optimiser's steps, a schedule, and an update when it is due.

    Messages of errors begin with the name of the class.
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
            check_fraction(self._name, "drop_fraction", drop_fraction, include_one=True)
        self.drop_fraction = drop_fraction
        self.schedule = UpdateSchedule(update_every, start, stop)
        random.key(seed)  # raises where it is no integer
        self.seed = seed
        self.step = 0
        self.updates = 0
        self._layers: dict[str, SnackLinear] = {}
        self._optimizer: torch.optim.Optimizer | None = None
        self._handle: Any = None

    @property
    def _name(self) -> str:
        return type(self).__name__

    def attach(self: Self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Self:
        """Restructure every `SnackLinear` of ``model`` as ``optimizer`` steps.

        Parameters
        ----------
        model : nn.Module
        optimizer : torch.optim.Optimizer
            Of whatever kind, unmodified; its state of the layers' ``values`` follows.

        Returns
        -------
        The object itself.

        Raises
        ------
        ValueError
            The model has no `SnackLinear`, or this object is attached already.
        TypeError
            ``optimizer`` is no optimizer.
        """
        op = f"{self._name}.attach"
        if self._handle is not None:
            fail(op, self._name, "be attached to one optimizer at a time", "a second one")
        if not isinstance(optimizer, torch.optim.Optimizer):
            rule = "be a torch.optim.Optimizer"
            fail(op, "optimizer", rule, type(optimizer).__name__, TypeError)
        modules = model.named_modules()
        layers = {name: module for name, module in modules if isinstance(module, SnackLinear)}
        if not layers:
            fail(op, "model", "contain a SnackLinear", type(model).__name__)
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
            fail(f"{self._name}.update", self._name, "be attached", "no optimizer")
        for layer in self._layers.values():
            check_optimizer_state(self._optimizer, layer.values, layer.nnz)
        fraction = self.drop_fraction
        fraction = fraction(self.step) if callable(fraction) else fraction
        for name, layer in self._layers.items():
            key = random.key(self.seed, name, self.step)
            self._restructure(name, layer, fraction, key)
        self.updates += 1

    def _restructure(self, name: str, layer: SnackLinear, fraction: float, key: int) -> None:
        """Update one layer."""
        layer.restructure(fraction, optimizer=self._optimizer, key=key)

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
        op = f"{self._name}.load_state_dict"
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


class SET(Method):
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


class RigL(Method):
    """RigL: drop the smallest weights, grow those whose gradients are largest.

    Parameters
    ----------
    drop_fraction : float in [0, 1], or callable from the step to one
        Fraction of each layer's connections replaced by one update; the paper lets it fall along
        `snack_cupy.dst.cosine`.
    update_every : int
        Optimiser steps between updates.
    start, stop : int
        No update before step `start`, nor from step `stop` on (None: never stop).
    seed : int
        As for `SET`; only criteria that draw random numbers would use it.

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
    `attach` registers a hook that runs after the optimiser's own ``step``. The gradients of
    connections that do not exist are those of the backward passes before an update: ahead of a step
    after which one is due, hooks keep each layer's input and the gradient of its result, and an
    update multiplies them tile by tile; no dense gradient exists. Nothing is kept at other steps.
    Passes that accumulate into ``values.grad`` count together, as one of the larger batch; clearing
    the gradient clears what was kept.

    A layer that saw no backward pass before an update stays as it is. The hooks run in eager code:
    a step that is replayed as a CUDA graph, or compiled as a whole, shows them nothing. Under data
    parallelism each process would grow by its own gradients: not supported.

    What is kept of the paper: the drop by magnitude, the growth by the magnitude of the dense
    gradient among the inactive connections (just dropped ones included), growth at value zero,
    constant nnz. What is changed: the gradients are those of the step just taken rather than of a
    batch of their own, whose step the paper skips; a connection dropped and grown again keeps its
    value and state.

    Source: Evci et al., "Rigging the lottery: making all tickets winners", ICML 2020.

    Examples
    --------
    >>> import torch
    >>> from snack_cupy.torch import RigL, SnackLinear
    >>> model = torch.nn.Sequential(SnackLinear(64, 32), torch.nn.ReLU(), SnackLinear(32, 10))
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> method = RigL(drop_fraction=0.3, update_every=2).attach(model, optimizer)
    >>> for _ in range(4):
    ...     optimizer.zero_grad()
    ...     model(torch.randn(8, 64)).square().mean().backward()
    ...     _ = optimizer.step()
    >>> method.updates
    2
    """

    _records: dict[str, GradientRecord] | None = None

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> RigL:
        """As `SET.attach`."""
        super().attach(model, optimizer)
        self._observe_if_due()
        return self

    def detach(self) -> None:
        """Stop restructuring, and forget what was kept."""
        super().detach()
        self._forget()

    def observe(self) -> None:
        """Keep what the next backward passes show, for an `update` that is asked for by hand.

        Raises
        ------
        ValueError
            Not attached.
        """
        if self._optimizer is None:
            fail("RigL.observe", "RigL", "be attached", "no optimizer")
        if self._records is None:
            trainable = {n: x for n, x in self._layers.items() if x.values.requires_grad}
            self._records = {name: GradientRecord(layer) for name, layer in trainable.items()}

    def update(self) -> None:
        """Restructure every layer that has shown gradients, by the drop fraction of this step.

        Raises
        ------
        ValueError
            Not attached, no gradients were kept (see `observe`), or optimiser state of a layer
            cannot follow; nothing is changed then.
        RuntimeError
            A CUDA graph is being captured.
        """
        if self._optimizer is not None:
            kept = [record for record in (self._records or {}).values() if record]
            if not kept:
                fail("RigL.update", "a layer", "have shown gradients since `observe`", "none")
        super().update()
        self._forget()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take over the counters and the seed of `state_dict`; as `SET.load_state_dict`."""
        super().load_state_dict(state)
        self._observe_if_due()

    def _restructure(self, name: str, layer: SnackLinear, fraction: float, key: int) -> None:
        record = (self._records or {}).get(name)
        if record:
            gradient = record.operands()
            layer.restructure(fraction, gradient=gradient, optimizer=self._optimizer, key=key)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.step += 1
        if self.schedule.due(self.step) and any((self._records or {}).values()):
            self.update()
        self._observe_if_due()

    def _observe_if_due(self) -> None:
        """Have the next step's gradients kept if an update follows it."""
        if self._optimizer is not None and self.schedule.due(self.step + 1):
            self.observe()

    def _forget(self) -> None:
        for record in (self._records or {}).values():
            record.close()
        self._records = None
