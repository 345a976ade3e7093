"""One layer, sparse beside dense and masked dense: training step, inference, energy, memory.

A training step is forward, backward with the input's gradient, and Adam, all of it in a CUDA graph.
Memory comes first, so that no workspace of an earlier part is left out of the count.
"""

import argparse
import gc
import time

import torch

from benchmarks import _cells, _machine
from benchmarks._layers import METHODS, Training
from benchmarks._matrix import Matrix, random_matrix, random_operand
from benchmarks._nvml import Nvml, NvmlError
from benchmarks._results import Results
from benchmarks._running import Deadline, progress_bar, reported, spread
from benchmarks._timing import Call, capture, measure

SHAPES = ((4096, 4096), (5000, 5000))
SPARSITY = 0.9
BATCH = 16
MEMORY_BATCH = 64
OPTIMIZERS = ("fused", "foreach")
EAGER_STEPS = 50
STEPS_PER_GRAPH = 10
PARTS = ("memory", "time", "energy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``layer``."""
    _cells.add_common_arguments(parser)
    parser.add_argument("--shape", type=_cells.parse_shape, nargs="+", metavar="MxK")
    parser.add_argument("--sparsity", type=float, default=SPARSITY)
    parser.add_argument("--batch", type=int, nargs="+", default=[BATCH])
    parser.add_argument("--part", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument("--energy-seconds", type=float, default=2.0, help="of each measurement")


def run(args: argparse.Namespace) -> int:
    """Measure every part; 1 if one of this library's failed."""
    with _machine.machine(args.device) as device:
        folder = args.out or _machine.RESULTS / _machine.folder_name(device)
        shapes = SHAPES[:1] if args.quick else SHAPES
        if device.type == "cpu" and args.quick:
            shapes = ((48, 64),)
        with Results(folder, _machine.describe(device)) as results, progress_bar() as bar:
            bench = Bench(args, device, results)
            deadline = Deadline(args.seconds)
            work = [
                (part, shape)
                for part in PARTS
                for shape in args.shape or shapes
                if part in args.part
            ]
            for part, shape in bar.track(work, description="layer"):
                if not deadline.passed():
                    getattr(bench, part)(shape)
    return int(results.failures > 0)


class Bench:
    """The parts, each for one shape."""

    def __init__(self, args: argparse.Namespace, device: torch.device, results: Results) -> None:
        self.args, self.device, self.results = args, device, results

    def _matrix(self, shape: tuple[int, int]) -> Matrix:
        return random_matrix(self.device, shape, self.args.sparsity, torch.float32)

    def _cell(self, matrix: Matrix, batch: int, **more: str) -> dict:
        m, k = matrix.topology.shape
        return {"m": m, "k": k, "sparsity": f"{self.args.sparsity:g}", "batch": batch, **more}

    def _training(self, matrix: Matrix, batch: int, method: str, optimizer: str) -> Training:
        (m, k), dtype = matrix.topology.shape, torch.float32
        x = random_operand(self.device, batch, k, dtype, 2)
        dy = random_operand(self.device, batch, m, dtype, 3)
        return Training(method, matrix, x, dy, optimizer)

    def memory(self, shape: tuple[int, int]) -> None:
        """Bytes that a layer keeps after a call without gradients, and after a training step."""
        matrix = self._matrix(shape)
        if self.device.type == "cuda":
            # The GEMM library's workspaces belong to the process, not to the layer measured first.
            self._training(matrix, MEMORY_BATCH, "dense", "fused").step()
        for method in METHODS:
            cell = self._cell(matrix, MEMORY_BATCH, method=method)
            if self.device.type == "cpu":
                for state in ("inference", "training"):
                    note = "not counted on a CPU"
                    self.results.add("memory", **cell, state=state, error=note)
                continue
            with reported(self.results, "memory", self.device, {**cell, "state": "training"}):
                self._count(matrix, method, cell)

    def _count(self, matrix: Matrix, method: str, cell: dict) -> None:
        (m, k), dtype = matrix.topology.shape, torch.float32
        x = random_operand(self.device, MEMORY_BATCH, k, dtype, 2)
        dy = random_operand(self.device, MEMORY_BATCH, m, dtype, 3)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        base, peak_base = allocated(), torch.cuda.memory_allocated()

        def add(state: str) -> None:
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - peak_base
            kept = allocated() - base
            self.results.add("memory", **cell, state=state, bytes=kept, peak_bytes=peak)
            torch.cuda.reset_peak_memory_stats()

        training = Training(method, matrix, x, dy, "fused")
        torch.cuda.reset_peak_memory_stats()  # what making the layer took is not its inference
        training.infer()
        add("inference")
        training.step()
        add("training")

    def time(self, shape: tuple[int, int]) -> None:
        """Microseconds of a training step and of inference, by graph replay and eagerly."""
        matrix = self._matrix(shape)
        for batch in self.args.batch:
            for method in METHODS:
                for optimizer in OPTIMIZERS:
                    names = {"what": "train", "method": method, "optimizer": optimizer}
                    cell = self._cell(matrix, batch, **names)
                    with reported(self.results, "layer", self.device, cell):
                        training = self._training(matrix, batch, method, optimizer)
                        training.check()
                        self._time(cell, training.step)
                cell = self._cell(matrix, batch, what="inference", method=method, optimizer="")
                with reported(self.results, "layer", self.device, cell):
                    training = self._training(matrix, batch, method, OPTIMIZERS[0])
                    training.check()
                    self._time(cell, training.infer)

    def _time(self, cell: dict, call: Call) -> None:
        timing = measure(call, self.device)
        _machine.synchronize(self.device)
        start = time.perf_counter()
        for _ in range(EAGER_STEPS):
            call()
        _machine.synchronize(self.device)
        eager = 1e6 * (time.perf_counter() - start) / EAGER_STEPS
        self.results.add("layer", **cell, **spread(timing), eager_us=eager)

    def energy(self, shape: tuple[int, int]) -> None:
        """Energy of a training step with the fused optimiser, by the device's own counter."""
        matrix = self._matrix(shape)
        for batch in self.args.batch:
            for method in METHODS:
                cell = self._cell(matrix, batch, method=method)
                try:
                    if self.device.type == "cpu":
                        raise NvmlError("not measured on a CPU")
                    nvml = Nvml()
                    nvml.energy()
                except NvmlError as error:
                    self.results.add("energy", **cell, error=str(error))
                    continue
                with reported(self.results, "energy", self.device, cell):
                    training = self._training(matrix, batch, method, "fused")
                    training.check()
                    for _ in range(3):
                        training.step()
                    torch.cuda.synchronize()
                    graph = capture(training.step, STEPS_PER_GRAPH)
                    replay_for(graph, self.args.energy_seconds / 4)
                    before, start = nvml.energy(), time.perf_counter()
                    steps = STEPS_PER_GRAPH * replay_for(graph, self.args.energy_seconds)
                    joules, seconds = nvml.energy() - before, time.perf_counter() - start
                    figures = {"mj_per_step": 1e3 * joules / steps, "watts": joules / seconds}
                    self.results.add("energy", **cell, **figures, steps=steps)


def allocated() -> int:
    """Bytes in use, of PyTorch's allocator and of CuPy's."""
    import cupy

    return torch.cuda.memory_allocated() + cupy.get_default_memory_pool().used_bytes()


def replay_for(graph: torch.cuda.CUDAGraph, seconds: float) -> int:
    """Replay a graph without a pause for so long; how often."""
    start, count = time.perf_counter(), 0
    previous = torch.cuda.Event()
    previous.record()
    while time.perf_counter() - start < seconds:
        # Two batches of replays are in the queue at any time, so that the device never waits.
        for _ in range(20):
            graph.replay()
        event = torch.cuda.Event()
        event.record()
        previous.synchronize()
        previous, count = event, count + 20
    torch.cuda.synchronize()
    return count
