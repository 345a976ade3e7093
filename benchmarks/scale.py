"""Growth of the cost from 1024 x 1024 to 32768 x 32768 at sparsity .99, beside the limit.

The limit is the longest of three times: that of the smallest kernel, that of moving the operands
through the device's memory once (at the rate at which it copies), and that of reading one float32
from shared memory for each multiply-add (128 bytes a clock on each multiprocessor).
"""

import argparse
import math
from typing import NamedTuple

import torch

from benchmarks import _cells, _machine, _providers
from benchmarks._matrix import Problem, random_matrix, random_operand
from benchmarks._results import Results
from benchmarks._running import Deadline, measure_methods, progress_bar
from benchmarks._timing import measure

SIZES = (1024, 2048, 4096, 8192, 16384, 32768)
SPARSITY = 0.99
BATCHES = (16, 64, 256)
COPY_BYTES = 2**30
SHARED_BYTES_PER_CLOCK = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``scale``."""
    _cells.add_common_arguments(parser)
    parser.add_argument("--size", type=int, nargs="+")
    parser.add_argument("--batch", type=int, nargs="+")
    parser.add_argument("--op", choices=_cells.OPS, nargs="+", default=_cells.OPS)
    parser.add_argument("--rivals", action=argparse.BooleanOptionalAction, default=True)


def run(args: argparse.Namespace) -> int:
    """Measure; 1 if one of this library's failed."""
    with _machine.machine(args.device) as device:
        folder = args.out or _machine.RESULTS / _machine.folder_name(device)
        sizes, batches = (SIZES[::2], BATCHES[1:2]) if args.quick else (SIZES, BATCHES)
        if device.type == "cpu" and args.quick:
            sizes, batches = (32, 64), (4,)
        sizes, batches = args.size or sizes, args.batch or batches
        rates = measure_rates(device) if device.type == "cuda" else None
        deadline = Deadline(args.seconds)
        with Results(folder, _machine.describe(device)) as results, progress_bar() as bar:
            for size in bar.track(sizes, description="scale"):
                if not deadline.passed():
                    measure_size(size, batches, args, device, results, rates)
    return int(results.failures > 0)


class Rates(NamedTuple):
    """Seconds of the smallest kernel, bytes a second of a copy, and of shared memory in all."""

    launch: float
    memory: float
    shared: float

    def limit(self, nnz: int, m: int, k: int, batch: int) -> float:
        """Seconds below which no float32 product of this size can get."""
        index = 2 if max(m, k) <= 65536 else 4
        moved = nnz * (4 + index) + 4 * m + 4 * batch * (m + k)
        return max(self.launch, moved / self.memory, 4 * nnz * batch / self.shared)


def measure_rates(device: torch.device) -> Rates:
    """The rates of this device."""
    import cupy

    one = torch.empty(1, device=device)
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = measure(lambda: target.copy_(source), device).median
    facts = cupy.cuda.Device(device.index).attributes
    clock = 1e3 * facts.get("ClockRate", 0)
    shared = facts["MultiProcessorCount"] * SHARED_BYTES_PER_CLOCK * clock or math.inf
    launch = measure(one.zero_, device).median
    return Rates(1e-6 * launch, 2 * COPY_BYTES / (1e-6 * copy), shared)


def measure_size(
    size: int,
    batches: tuple[int, ...],
    args: argparse.Namespace,
    device: torch.device,
    results: Results,
    rates: Rates | None,
) -> None:
    """Rows of one size."""
    matrix = random_matrix(device, (size, size), SPARSITY, torch.float32)
    nnz = matrix.topology.nnz
    x, dy = (random_operand(device, max(batches), size, torch.float32, seed) for seed in (2, 3))
    methods = {_providers.OURS: _providers.ours}
    if args.rivals:
        methods["dense"] = _providers.dense
    for batch in batches:
        limit = 1e6 * rates.limit(nnz, size, size, batch) if rates else None
        for op in args.op:
            cell = {"op": op, "m": size, "k": size, "sparsity": f"{SPARSITY:g}", "batch": batch}
            problem = Problem(op, matrix, x[:batch], dy[:batch])
            measure_methods(
                problem, methods, results, "scale", {**cell, "nnz": nnz, "limit_us": limit}
            )
