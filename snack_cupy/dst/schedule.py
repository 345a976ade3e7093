"""When updates happen and how much they replace, as functions of the step alone.

``step`` is the number of optimiser steps completed. Nothing is counted or remembered here, so a run
that resumes at some step continues as if it had never stopped.

Source of the cosine decay and the stop step: Evci et al., "Rigging the lottery: making all tickets
winners", ICML 2020; of a constant fraction: Mocanu et al., Nature Communications 2018 (SET).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from snack_cupy._check import check_count, check_fraction, fail

MAX_STEP = 2**63 - 1
DECAYS = ("constant", "cosine", "linear")


@dataclass(frozen=True)
class DropFraction:
    """Fraction of the connections an update at ``step`` replaces; call it with the step.

    Made by `constant`, `cosine` and `linear`.

    Parameters
    ----------
    initial : float in [0, 1]
    decay : "constant", "cosine" or "linear"
    stop : int
        At least 1: the fraction is 0 from this step on. None with "constant".

    Raises
    ------
    TypeError, ValueError
        An argument is not as above.

    Notes
    -----
    Source of the cosine: Evci et al., "Rigging the lottery: making all tickets winners", ICML 2020;
    of the constant fraction: Mocanu et al., Nature Communications 2018 (SET).
    """

    initial: float
    decay: str = "constant"
    stop: int | None = None

    def __post_init__(self) -> None:
        check_fraction("DropFraction", "initial", self.initial, include_one=True)
        if self.decay not in DECAYS:
            fail("DropFraction", "decay", f"be one of {DECAYS}", repr(self.decay))
        if self.decay != "constant":
            check_count("DropFraction", "stop", self.stop, low=1, high=MAX_STEP)
        elif self.stop is not None:
            fail("DropFraction", "stop", "be None with a constant fraction", self.stop)

    def __call__(self, step: int) -> float:
        """The fraction at ``step``, a non-negative integer."""
        step = check_count("DropFraction", "step", step, high=MAX_STEP)
        if self.stop is None:
            return self.initial
        if step >= self.stop:
            return 0.0
        progress = step / self.stop
        if self.decay == "linear":
            return self.initial * (1 - progress)
        return self.initial / 2 * (1 + math.cos(math.pi * progress))


def constant(fraction: float) -> DropFraction:
    """``fraction`` at every step.

    Parameters
    ----------
    fraction : float in [0, 1]

    Raises
    ------
    TypeError, ValueError
        It is not.

    Examples
    --------
    >>> from snack_cupy.dst import constant
    >>> constant(0.3)(1000)
    0.3
    """
    return DropFraction(fraction)


def cosine(fraction: float, stop: int) -> DropFraction:
    """``fraction / 2 * (1 + cos(pi * step / stop))`` before step ``stop``, 0 from there on.

    Parameters
    ----------
    fraction : float in [0, 1]
    stop : int
        At least 1.

    Raises
    ------
    TypeError, ValueError
        An argument is not as above.

    Examples
    --------
    >>> from snack_cupy.dst import cosine
    >>> [round(cosine(0.3, stop=100)(step), 3) for step in (0, 50, 100)]
    [0.3, 0.15, 0.0]
    """
    return DropFraction(fraction, "cosine", stop)


def linear(fraction: float, stop: int) -> DropFraction:
    """``fraction * (1 - step / stop)`` before step ``stop``, 0 from there on.

    Parameters
    ----------
    fraction : float in [0, 1]
    stop : int
        At least 1.

    Raises
    ------
    TypeError, ValueError
        An argument is not as above.

    Examples
    --------
    >>> from snack_cupy.dst import linear
    >>> [linear(0.5, stop=100)(step) for step in (0, 50, 100)]
    [0.5, 0.25, 0.0]
    """
    return DropFraction(fraction, "linear", stop)


@dataclass(frozen=True)
class UpdateSchedule:
    """Updates every ``update_every`` steps, counted from ``start``, before step ``stop``.

    Parameters
    ----------
    update_every : int
        At least 1.
    start : int
        At least 0. The first update comes ``update_every`` steps after it, so none at step 0.
    stop : int or None
        At least ``start``: no update from this step on. None: never stop.

    Raises
    ------
    TypeError, ValueError
        An argument is not as above.

    Examples
    --------
    >>> from snack_cupy.dst import UpdateSchedule
    >>> schedule = UpdateSchedule(update_every=10, start=5, stop=45)
    >>> [step for step in range(100) if schedule.due(step)]
    [15, 25, 35]
    >>> schedule.count(30)
    2
    """

    update_every: int
    start: int = 0
    stop: int | None = None

    def __post_init__(self) -> None:
        op = "UpdateSchedule"
        check_count(op, "update_every", self.update_every, low=1, high=MAX_STEP)
        check_count(op, "start", self.start, high=MAX_STEP)
        if self.stop is not None:
            check_count(op, "stop", self.stop, low=self.start, high=MAX_STEP)

    def due(self, step: int) -> bool:
        """Whether an update follows once ``step`` optimiser steps are completed."""
        step = check_count("UpdateSchedule.due", "step", step, high=MAX_STEP)
        elapsed = step - self.start
        running = self.stop is None or step < self.stop
        return running and elapsed > 0 and elapsed % self.update_every == 0

    def count(self, step: int) -> int:
        """Number of updates due at steps up to and including ``step``."""
        step = check_count("UpdateSchedule.count", "step", step, high=MAX_STEP)
        last = step if self.stop is None else min(step, self.stop - 1)
        return max(0, (last - self.start) // self.update_every)
