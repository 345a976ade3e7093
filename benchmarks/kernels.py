"""Forward, dX and dW over the grid, beside rivals in the same process.

Each result is compared with float64 before it is timed; a wrong or failing one is a row with an
error. Rows are on disk as soon as they are measured.
"""

import argparse
from collections.abc import Callable

import torch
from rich.console import Console

from benchmarks import _cells, _machine, _providers, _rivals
from benchmarks._cells import DTYPES, OPS
from benchmarks._matrix import Matrix, Problem, random_operand
from benchmarks._results import Results
from benchmarks._running import (
    Deadline,
    first_line,
    geometric_mean,
    measure_methods,
    progress_bar,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``kernels``."""
    _cells.add_common_arguments(parser)
    _cells.add_grid_arguments(parser)
    parser.add_argument("--op", choices=OPS, nargs="+", default=OPS)
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=["float32"])
    rivals = parser.add_mutually_exclusive_group()
    names = _providers.RIVALS
    rivals.add_argument("--rivals", nargs="+", choices=names, default=names, help="default: all")
    rivals.add_argument("--no-rivals", dest="rivals", action="store_const", const=())
    parser.add_argument("--cold", action="store_true", help="with a cold L2 cache, too")


def run(args: argparse.Namespace) -> int:
    """Measure the cells that the options choose; 1 if one of this library's failed."""
    with _machine.machine(args.device) as device:
        grid = _cells.chosen_grid(args, device)
        folder = args.out or _machine.RESULTS / _machine.folder_name(device)
        with Results(folder, _machine.describe(device)) as results, progress_bar() as bar:
            sweep = Sweep(args, device, results, bar.console)
            task = bar.add_task("kernels", total=grid.size * len(args.op) * len(args.dtype))

            def advance() -> None:
                bar.advance(task)
                bar.refresh()

            for shape, sparsity in ((m, s) for m in grid.shapes for s in grid.sparsities):
                try:
                    sweep.run(shape, sparsity, grid.batches, advance)
                except Exception as error:  # of the operands themselves: too large, say
                    results.failures += 1
                    bar.console.print(f"{shape} {sparsity:g}: {first_line(error)}")
            sweep.summarise()
    return int(results.failures > 0)


class Sweep:
    """Measures the cells of one shape and sparsity after the other."""

    def __init__(
        self, args: argparse.Namespace, device: torch.device, results: Results, console: Console
    ) -> None:
        self.args, self.device, self.results, self.console = args, device, results, console
        self.deadline = Deadline(args.seconds)
        on_gpu = device.type == "cuda"
        self.same_gpu = on_gpu and _rivals.comparable(torch.cuda.get_device_name(device))
        self.ratios: dict[tuple[str, str], dict[tuple, float]] = {}

    def run(
        self,
        shape: tuple[int, int],
        sparsity: float,
        batches: tuple[int, ...],
        advance: Callable[[], None],
    ) -> None:
        """Every dtype, operation and batch on one topology."""
        if self.deadline.passed():
            return
        topology = _machine.topology_on(self.device, shape, sparsity)
        for dtype in self.args.dtype:
            matrix = Matrix(topology, DTYPES[dtype], self.device)
            x, dy = (
                random_operand(self.device, max(batches), features, DTYPES[dtype], seed)
                for seed, features in ((2, shape[1]), (3, shape[0]))
            )
            for op in self.args.op:
                texts = []
                for batch in batches:
                    if self.deadline.passed():
                        return
                    problem = Problem(op, matrix, x[:batch], dy[:batch])
                    texts.append(self._cell(problem, dtype, sparsity))
                    advance()
                head = f"{op} {dtype} {shape[0]}x{shape[1]} {sparsity:g}"
                self.console.print(f"{head:<31}{'  '.join(texts)}")

    def _cell(self, problem: Problem, dtype: str, sparsity: float) -> str:
        """Measure one cell; ours and, in brackets, how many times as long the best rival takes."""
        m, k = problem.matrix.topology.shape
        cell = {
            "op": problem.op,
            "dtype": dtype,
            "m": m,
            "k": k,
            "sparsity": f"{sparsity:g}",
            "batch": problem.batch,
            "nnz": problem.matrix.topology.nnz,
        }
        known = _providers.rivals(problem)
        methods = {name: known[name] for name in self.args.rivals if name in known}
        methods = {_providers.OURS: _providers.ours, **methods}
        precision = "high" if dtype == "tf32" else "highest"
        with _machine.float32_precision(precision):
            name = f"kernels_{problem.op}_{dtype}"
            caches = ("hot", "cold") if self.args.cold else ("hot",)
            times = measure_methods(
                problem, methods, self.results, name, cell, caches, tf32=dtype == "tf32"
            )
        mine = times.pop((_providers.OURS, "hot"), None)
        if mine is None:
            return f"{problem.batch}: failed"
        best = [time for (_, cache), time in times.items() if cache == "hot"]
        if dtype == "float32":
            filed = _rivals.best(problem.op, m, k, sparsity, problem.batch)
            best += [filed] if filed and self.same_gpu else []
        if not best:
            return f"{problem.batch}: {mine:.1f}"
        ratio = min(best) / mine
        key = (m, k, sparsity, problem.batch)
        self.ratios.setdefault((problem.op, dtype), {})[key] = ratio
        return f"{problem.batch}: {mine:.1f} ({ratio:.2f})"

    def summarise(self) -> None:
        """Geometric means of best rival / ours, in all, by batch, and the worst cell."""
        if self.deadline.passed():
            self.console.print("stopped by --seconds; what is left has no rows")
        for (op, dtype), ratios in self.ratios.items():
            worst = min(ratios, key=lambda key: ratios[key])
            self.console.print(
                f"{op} {dtype}: best rival / snack_cupy {geometric_mean(ratios.values()):.2f} over "
                f"{len(ratios)} cells; least {ratios[worst]:.2f} at {worst}"
            )
            for batch in sorted({key[-1] for key in ratios}):
                some = [ratio for key, ratio in ratios.items() if key[-1] == batch]
                self.console.print(f"  batch {batch}: {geometric_mean(some):.2f}")
