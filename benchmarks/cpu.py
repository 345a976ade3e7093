"""Forward and backward of one layer on the CPU: sparse, `nn.Linear` and a masked dense layer.

Every provider computes the same: the output with bias, and the gradients of the input, the weights
and the bias, in float32 with the default number of threads. Results are checked against float64
products first. Providers take turns, a few calls each, so that a disturbance hits them all; before
a turn the threads of the last one get time to stop spinning, and its first call is not counted.

Ends with status 1 if a result is wrong or if, at 1024 x 1024, 90 % sparse and batch 64, the sparse
layer takes more than 3 times the time of `nn.Linear`.

    python -m benchmarks cpu            the whole table, a few minutes
    python -m benchmarks cpu --quick    the cell with the target only
"""

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import scipy
import torch
from torch import nn
from torch.nn import functional

import snack_cupy
from benchmarks._timing import seconds
from snack_cupy.random import random_topology

SHAPES = ((512, 784), (1024, 1024), (4096, 4096))
SPARSITIES = (0.8, 0.9, 0.95, 0.99)
BATCHES = (1, 64, 256)
TARGET = (1024, 1024, 0.9, 64)
TARGET_RATIO = 3.0

TURNS = 5
TURN_SECONDS = 0.06
CALLS_PER_TURN = (2, 30)
PAUSE_SECONDS = 0.1


class Timing(NamedTuple):
    """Milliseconds per call: the median, and the 20th and 80th percentiles."""

    median: float
    low: float
    high: float

    def __str__(self):
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


class Layer:
    """One layer of random weights, an input and the gradient of its output."""

    def __init__(self, m, k, sparsity, batch):
        rng = np.random.default_rng(0)
        self.topology = random_topology((m, k), sparsity=sparsity, seed=0)
        self.values = rng.standard_normal(self.topology.nnz, dtype=np.float32)
        self.bias = rng.standard_normal(m, dtype=np.float32)
        self.x = rng.standard_normal((batch, k), dtype=np.float32)
        self.grad = rng.standard_normal((batch, m), dtype=np.float32)

    def sparse_step(self):
        """The output and the three gradients, by the operations of the library."""
        topology, values, x, grad = self.topology, self.values, self.x, self.grad
        return (
            snack_cupy.spmm(topology, values, x, batch_major=True, bias=self.bias),
            snack_cupy.spmm_transposed(topology, values, grad, batch_major=True),
            snack_cupy.sddmm(topology, grad, x, batch_major=True),
            grad.sum(axis=0),
        )

    def dense_weight(self, values):
        """The entries in a dense matrix."""
        weight = np.zeros(self.topology.shape, values.dtype)
        weight[self.topology.row, self.topology.col] = values
        return weight

    def providers(self) -> dict[str, Callable[[], object]]:
        """What is timed, by name."""
        x = torch.from_numpy(self.x).requires_grad_()
        grad = torch.from_numpy(self.grad)
        mask = torch.from_numpy(self.dense_weight(np.ones_like(self.values)))
        linear = nn.Linear(self.topology.k, self.topology.m)
        with torch.no_grad():
            linear.weight.copy_(torch.from_numpy(self.dense_weight(self.values)))
            linear.bias.copy_(torch.from_numpy(self.bias))

        def step(forward):
            x.grad = linear.weight.grad = linear.bias.grad = None
            forward().backward(grad)

        return {
            "snack_cupy": self.sparse_step,
            "nn.Linear": lambda: step(lambda: linear(x)),
            "Dense+Mask": lambda: step(
                lambda: functional.linear(x, linear.weight * mask, linear.bias)
            ),
        }

    def wrong_results(self):
        """Names of the results that are further from float64 than float32 sums can be."""
        wide = [a.astype(np.float64) for a in (self.values, self.bias, self.x, self.grad)]
        wants, sizes = self._step_in_float64(*wide), self._step_in_float64(*map(np.abs, wide))
        row, col, batch = self.topology.row, self.topology.col, len(self.x)
        summands = (
            np.bincount(row, minlength=self.topology.m) + 1,
            np.bincount(col, minlength=self.topology.k),
            batch,
            batch,
        )
        names = ("output", "input gradient", "value gradient", "bias gradient")
        results = zip(names, self.sparse_step(), wants, sizes, summands, strict=True)
        return [
            name
            for name, got, want, size, count in results
            if not (abs(got - want) <= (count + 1) * 2.0**-24 * size).all()
        ]

    def _step_in_float64(self, values, bias, x, grad):
        weight, row, col = self.dense_weight(values), self.topology.row, self.topology.col
        return x @ weight.T + bias, grad @ weight, (grad.T @ x)[row, col], grad.sum(axis=0)


def measure(providers: dict[str, Callable[[], object]]) -> dict[str, Timing]:
    """Times of all providers, which take turns."""
    times: dict[str, list[float]] = {name: [] for name in providers}
    for _ in range(TURNS):
        for name, call in providers.items():
            time.sleep(PAUSE_SECONDS)
            calls = min(
                max(int(TURN_SECONDS / seconds(call)), CALLS_PER_TURN[0]), CALLS_PER_TURN[1]
            )
            times[name] += [1e3 * seconds(call) for _ in range(calls)]
    return {name: summary(sample) for name, sample in times.items()}


def summary(sample: list[float]) -> Timing:
    """Median and spread of the times of one provider."""
    fifths = statistics.quantiles(sample, n=5, method="inclusive")
    return Timing(statistics.median(sample), fifths[0], fifths[-1])


def print_machine() -> None:
    """What the numbers depend on."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    print(f"{processor()}, {os.cpu_count()} cores, load {load:.2f}")
    print(
        f"Python {platform.python_version()}, NumPy {np.__version__}, SciPy {scipy.__version__}, "
        f"PyTorch {torch.__version__} with {torch.get_num_threads()} threads, "
        f"snack_cupy {snack_cupy.__version__}"
    )
    print("forward + backward, float32, milliseconds: median (20th to 80th percentile)")
    if load > 0.5:
        print("Other processes are running. Dense products, whose threads wait for each other,")
        print("lose most by that (measured: 10 times slower), so that the ratios flatter.")
    print()


def processor() -> str:
    """Name of the processor where Linux tells, else its architecture."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``cpu``."""
    parser.add_argument("--quick", action="store_true", help="only the cell with the target")


def run(args: argparse.Namespace) -> int:
    """Check, measure and print; the exit status."""
    cells = [(*shape, s, batch) for shape in SHAPES for s in SPARSITIES for batch in BATCHES]
    ratios = {}
    print_machine()
    print("| m x k | sparsity | batch | snack_cupy | nn.Linear | Dense+Mask | / Linear | / Mask |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for cell in [TARGET] if args.quick else cells:
        m, k, sparsity, batch = cell
        layer = Layer(*cell)
        if wrong := layer.wrong_results():
            print(f"{m} x {k}, sparsity {sparsity}, batch {batch}: wrong {', '.join(wrong)}")
            return 1
        ours, linear, masked = measure(layer.providers()).values()
        ratios[cell] = ours.median / linear.median
        print(
            f"| {m} x {k} | {sparsity} | {batch} | {ours} | {linear} | {masked} "
            f"| {ratios[cell]:.2f} | {ours.median / masked.median:.2f} |",
            flush=True,
        )
    met = ratios[TARGET] <= TARGET_RATIO
    m, k, sparsity, batch = TARGET
    print(
        f"\n{m} x {k}, sparsity {sparsity}, batch {batch}: {ratios[TARGET]:.2f} times nn.Linear, "
        f"at most {TARGET_RATIO:g} allowed: {'met' if met else 'missed'}"
    )
    return 0 if met else 1
