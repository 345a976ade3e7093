"""What the commands that measure share: progress, deadlines, errors that become rows."""

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

from benchmarks import _machine
from benchmarks._matrix import Problem, judge, reference
from benchmarks._providers import OURS, Provider
from benchmarks._results import Results
from benchmarks._timing import Timing, measure

Times = dict[tuple[str, str], float]  # by method and cache


def progress_bar() -> Progress:
    """A progress bar on standard error."""
    columns = (*Progress.get_default_columns()[:3], MofNCompleteColumn())
    return Progress(
        *columns,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        auto_refresh=False,  # a thread that draws would take time from what is measured
        console=Console(stderr=True, soft_wrap=True, highlight=False, markup=False),
    )


class Deadline:
    """Whether the time that ``--seconds`` gives is over."""

    def __init__(self, seconds: float | None) -> None:
        self._end = math.inf if seconds is None else time.monotonic() + seconds

    def passed(self) -> bool:
        """True once it is."""
        return time.monotonic() > self._end


def measure_methods(
    problem: Problem,
    methods: Mapping[str, Callable[[Problem], Provider]],
    results: Results,
    name: str,
    cell: dict[str, Any],
    caches: Collection[str] = ("hot",),
    *,
    tf32: bool = False,
) -> Times:
    """Check, then time every method on one problem; microseconds by method and cache.

    A method that fails, or whose result is wrong, leaves a row with the error.
    """
    times: Times = {}
    expected = None
    for method, make in methods.items():
        row = {**cell, "method": method, "cache": "hot"}
        with reported(results, name, problem.matrix.device, row):
            expected = expected or reference(problem)
            provider = make(problem)
            verdict = judge(provider.result(provider.call()), expected, tf32=tf32)
            row |= {"max_error": verdict.max_error, "rms_error": verdict.rms_error}
            if not verdict.right:
                raise ArithmeticError(f"wrong: off by {verdict.max_error:.2g} of the magnitude")
            for row["cache"] in caches:
                timing = measure(provider.call, problem.matrix.device, cold=row["cache"] == "cold")
                times[method, row["cache"]] = timing.median
                results.add(name, **row, **spread(timing))
    return times


def spread(timing: Timing) -> dict[str, float | str]:
    """A timing as columns."""
    return dict(zip(("us", "low_us", "high_us", "mode"), timing, strict=True))


@contextlib.contextmanager
def reported(
    results: Results, name: str, device: torch.device, row: dict[str, Any]
) -> Iterator[None]:
    """Turn an exception inside into a row with the error."""
    try:
        yield
    except Exception as error:
        results.failures += str(row.get("method")).startswith(OURS)
        results.add(name, **row, error=first_line(error))
        _stop_if_device_is_lost(device)


def _stop_if_device_is_lost(device: torch.device) -> None:
    """End the run where every further call would fail; after other errors, free memory."""
    try:
        _machine.synchronize(device)
    except RuntimeError as error:
        raise SystemExit(f"the device is lost: {first_line(error)}") from error
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # PyTorch refuses after a capture that failed
            torch.cuda.empty_cache()


def first_line(error: Exception) -> str:
    """An error as one short line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:160]


def geometric_mean(values: Collection[float]) -> float:
    """Of positive numbers."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))
