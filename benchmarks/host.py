"""Host time of one eager call: what Python and the launches cost, whatever the device does.

The providers take turns. Each turn queues few enough calls for the device's queue to hold them, so
the host never waits for the device; waiting happens between the turns, off the clock.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks import _cells, _machine
from benchmarks._layers import METHODS, Training
from benchmarks._matrix import random_matrix, random_operand
from benchmarks._results import Results
from benchmarks._running import progress_bar, reported

SHAPES = ((768, 768), (4096, 4096))
SPARSITY = 0.9
BATCH = 16
TURNS = 25
CALLS = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``host``."""
    _cells.add_common_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure; 1 if one of this library's failed."""
    with _machine.machine(args.device) as device:
        folder = args.out or _machine.RESULTS / _machine.folder_name(device)
        shapes = SHAPES[:1] if args.quick else SHAPES
        turns, calls = TURNS, CALLS
        if device.type == "cpu" and args.quick:
            shapes, turns, calls = ((48, 64),), 3, 3
        with Results(folder, _machine.describe(device)) as results, progress_bar() as bar:
            for shape in bar.track(shapes, description="host"):
                measure_shape(shape, device, results, turns, calls)
    return int(results.failures > 0)


def measure_shape(
    shape: tuple[int, int], device: torch.device, results: Results, turns: int, calls: int
) -> None:
    """Rows of one shape: forward without gradients, and forward with backward."""
    matrix = random_matrix(device, shape, SPARSITY, torch.float32)
    x = random_operand(device, BATCH, shape[1], torch.float32, 2)
    dy = random_operand(device, BATCH, shape[0], torch.float32, 3)
    cell = {"m": shape[0], "k": shape[1], "sparsity": f"{SPARSITY:g}", "batch": BATCH}
    providers: dict[str, Training] = {}
    for method in METHODS:
        row = {**cell, "what": "forward", "method": method}
        with reported(results, "host", device, row):
            provider = Training(method, matrix, x, dy, "fused")
            provider.check()
            providers[method] = provider
    calls_of: dict[str, dict[str, Callable[[], object]]] = {
        "forward": {name: training.infer for name, training in providers.items()},
        "forward+backward": {
            name: training.forward_backward for name, training in providers.items()
        },
    }
    for what, group in calls_of.items():
        for method, sample in take_turns(group, device, turns, calls).items():
            fifths = statistics.quantiles(sample, n=5, method="inclusive")
            figures = {"us": statistics.median(sample), "low_us": fifths[0], "high_us": fifths[-1]}
            results.add("host", **cell, what=what, method=method, **figures)


def take_turns(
    group: dict[str, Callable[[], object]], device: torch.device, turns: int, calls: int
) -> dict[str, list[float]]:
    """Host microseconds of a call, a sample for each turn."""
    samples: dict[str, list[float]] = {name: [] for name in group}
    for call in group.values():
        for _ in range(10):
            call()
    for _ in range(turns):
        for name, call in group.items():
            _machine.synchronize(device)
            call()
            collecting = gc.isenabled()
            gc.disable()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            samples[name].append(1e6 * (time.perf_counter() - start) / calls)
            if collecting:
                gc.enable()
    _machine.synchronize(device)
    return samples
