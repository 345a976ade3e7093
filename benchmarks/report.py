"""The README's tables, the plots and the targets, all from the CSV files of one folder."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from benchmarks import _machine, _plots, _results, targets
from benchmarks._cells import GRID_BATCHES, GRID_SHAPES, GRID_SPARSITIES
from benchmarks._measured import GRID, Cell, Measured, cells
from benchmarks._running import geometric_mean


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``report``."""
    parser.add_argument(
        "--results",
        type=Path,
        default=_machine.RESULTS / "nvidia-h200",
        metavar="DIR",
        help="default: benchmarks/results/nvidia-h200",
    )
    parser.add_argument(
        "--merge", type=Path, nargs="+", default=[], metavar="DIR", help="add their rows first"
    )
    parser.add_argument("--targets", action="store_true", help="targets; 1 if a must is missed")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="default: plots in --results")


def run(args: argparse.Namespace) -> int:
    """Print what the options ask for; the exit status."""
    for folder in args.merge:
        for name, count in _results.merge(folder, args.results):
            print(f"merged {folder / name}: {count} rows")
    if args.targets:
        found = targets.all_targets(args.results)
        print(targets.table(found))
        missed = sum(target.missed for target in found)
        bound = sum(target.must is not None for target in found)
        print(f"\n{bound - missed} of {bound} musts met")
        return int(missed > 0)
    measured = Measured(args.results)
    if not measured.rows("runs"):
        print(f"report: no results in {args.results}; python -m benchmarks all makes them")
        return 1
    for title, lines in tables(measured):
        print(f"**{title}**\n\n" + "\n".join(lines) + "\n")
    for path in _plots.write_plots(measured, args.plots or args.results / "plots"):
        print(f"wrote {path}")
    return 0


def tables(measured: Measured) -> Iterator[tuple[str, list[str]]]:
    """Titles and Markdown tables, of what there are data for."""
    yield from _machines(measured)
    if len(overview := list(_overview(measured))) > 2:
        title = "forward, float32, sparsity .9: microseconds (dense / ours, best rival / ours)"
        yield title, overview
    for op, name in _plots.NAMES.items():
        lines = list(_grid(measured, op))
        if len(lines) > 2:
            yield f"{name}, float32: microseconds (best rival / snack_cupy)", lines
    for op, name in _plots.NAMES.items():
        for dtype in ("float16", "bfloat16"):
            lines = list(_grid(measured, op, dtype))
            if len(lines) > 2:
                yield f"{name}, {dtype}: microseconds (best rival / snack_cupy)", lines
    if summary := list(_summary(measured)):
        yield "best rival / snack_cupy, geometric mean, and cells that are lost", summary
    for kind, title, columns in (
        ("layer", "one layer", ("what", "method", "optimizer", "us", "eager_us")),
        ("energy", "energy of a training step", ("method", "mj_per_step", "watts")),
        ("memory", "memory", ("state", "method", "bytes", "peak_bytes")),
        ("host", "host time of an eager call", ("what", "method", "us")),
        ("update", "topology update", ("fraction", "method", "device_us", "elapsed_us")),
    ):
        if rows := measured.rows(kind):
            yield title, _table(("m", "k", "sparsity", "batch", *columns, "error"), rows)


def _machines(measured: Measured) -> Iterator[tuple[str, list[str]]]:
    runs = measured.rows("runs")
    if runs:
        columns = ("device", "driver", "cuda", "torch", "cupy", "snack_cupy", "sources")
        distinct = {tuple(row[column] for column in columns): row for row in runs}
        yield "measured on", _table(("run", *columns), list(distinct.values()))


def _table(columns: tuple[str, ...], rows: list[dict[str, str]]) -> list[str]:
    columns = tuple(c for c in columns if any(row[c] for row in rows))
    head = ["| " + " | ".join(columns) + " |", "| " + " | ".join("---" for _ in columns) + " |"]
    return head + ["| " + " | ".join(row[c] for c in columns) + " |" for row in rows]


def _overview(measured: Measured) -> Iterator[str]:
    """The table of the README."""
    batches = GRID_BATCHES[::2]
    yield "| m x k | " + " | ".join(f"batch {batch}" for batch in batches) + " |"
    yield "| --- |" + " ---: |" * len(batches)
    for m, k in GRID_SHAPES:
        texts = []
        for cell in cells([(m, k)], [0.9], batches):
            mine = measured.time("fwd", "float32", cell)
            dense = measured.rival("fwd", "float32", cell, "dense")
            best = measured.best_rival("fwd", "float32", cell)
            known = mine is not None and dense is not None and best is not None
            texts.append(f"{mine:.1f} ({dense / mine:.1f}, {best / mine:.1f})" if known else "")
        if any(texts):
            yield f"| {m} x {k} | {' | '.join(texts)} |"


def _grid(measured: Measured, op: str, dtype: str = "float32") -> Iterator[str]:
    batches = " | ".join(f"batch {batch}" for batch in GRID_BATCHES)
    yield f"| m x k, sparsity | {batches} |"
    yield "| --- |" + " ---: |" * len(GRID_BATCHES)
    for m, k in GRID_SHAPES:
        for sparsity in GRID_SPARSITIES:
            texts = [
                _cell_text(measured, op, dtype, cell)
                for cell in cells([(m, k)], [sparsity], GRID_BATCHES)
            ]
            if any(texts):
                yield f"| {m} x {k}, {sparsity:g} | {' | '.join(texts)} |"


def _cell_text(measured: Measured, op: str, dtype: str, cell: Cell) -> str:
    mine = measured.time(op, dtype, cell)
    if mine is None:
        return ""
    best = measured.best_rival(op, dtype, cell)
    return f"{mine:.1f}" if best is None else f"{mine:.1f} ({best / mine:.2f})"


def _summary(measured: Measured) -> Iterator[str]:
    lines = []
    for op, name in _plots.NAMES.items():
        for dtype in ("float32", "float16", "bfloat16"):
            values = list(measured.ratios(op, dtype, GRID).values.values())
            if values:
                lost = sum(value < 1 for value in values)
                mean = geometric_mean(values)
                lines.append(f"| {name} {dtype} | {mean:.2f} | {lost} of {len(values)} |")
    if lines:
        yield "| operation | mean | cells where a rival is faster |"
        yield "| --- | ---: | ---: |"
        yield from lines
