"""The plots of the report, from the CSV files."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks._cells import GRID_BATCHES, GRID_SHAPES, GRID_SPARSITIES
from benchmarks._measured import Measured, cells
from benchmarks._providers import OURS

NAMES = {"fwd": "forward", "dx": "input gradient", "dw": "weight gradient"}


def write_plots(measured: Measured, folder: Path) -> list[Path]:
    """Draw what there are data for; the files written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    drawings = {
        "speedup_by_sparsity": _by_sparsity,
        "speedup_by_batch": _by_batch,
        "time_against_limit": _against_limit,
    }
    written = []
    for name, draw in drawings.items():
        figure, axes = pyplot.subplots(1, 3, figsize=(14, 4.2), sharey=True, layout="constrained")
        drawn = [draw(measured, op, axis) for op, axis in zip(NAMES, axes, strict=True)]
        if any(drawn):
            path = folder / f"{name}.png"
            figure.savefig(path, dpi=110, metadata={"Software": None})
            written.append(path)
        pyplot.close(figure)
    return written


def _by_sparsity(measured: Measured, op: str, axis: Any) -> bool:
    drawn = False
    for m, k in GRID_SHAPES:
        means = [
            measured.ratios(op, "float32", cells([(m, k)], [sparsity], GRID_BATCHES)).mean
            for sparsity in GRID_SPARSITIES
        ]
        drawn |= _line(axis, range(len(GRID_SPARSITIES)), means, f"{m} x {k}")
    axis.set_xticks(range(len(GRID_SPARSITIES)), [f"{s:g}" for s in GRID_SPARSITIES])
    _label(axis, f"{NAMES[op]}, float32, mean over batches", "sparsity", "best rival / snack_cupy")
    return drawn


def _by_batch(measured: Measured, op: str, axis: Any) -> bool:
    drawn = False
    for m, k in GRID_SHAPES:
        means = [
            measured.ratios(op, "float32", cells([(m, k)], GRID_SPARSITIES, [batch])).mean
            for batch in GRID_BATCHES
        ]
        drawn |= _line(axis, GRID_BATCHES, means, f"{m} x {k}")
    axis.set_xscale("log", base=2)
    axis.set_xticks(GRID_BATCHES, [str(batch) for batch in GRID_BATCHES])
    _label(axis, f"{NAMES[op]}, float32, mean over sparsities", "batch", "best rival / snack_cupy")
    return drawn


def _line(axis: Any, places: Iterable[int], values: Iterable[float | None], label: str) -> bool:
    known = [(x, y) for x, y in zip(places, values, strict=True) if y is not None]
    if known:
        axis.plot(*zip(*known, strict=True), marker="o", label=label)
    return bool(known)


def _label(axis: Any, title: str, x: str, y: str) -> None:
    axis.axhline(1, color="grey", linewidth=1)
    axis.set_title(title)
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    if axis.get_legend_handles_labels()[1]:
        axis.legend(fontsize="small")


def _against_limit(measured: Measured, op: str, axis: Any) -> bool:
    rows = [row for row in measured.rows("scale", op=op) if row["us"]]
    batches = sorted({int(row["batch"]) for row in rows})
    for colour, batch in enumerate(batches):
        for method, style in ((OURS, "-"), ("dense", ":")):
            some = [r for r in rows if r["batch"] == str(batch) and r["method"] == method]
            if not some:
                continue
            points = sorted((int(r["nnz"]), float(r["us"]), r["limit_us"]) for r in some)
            places, times = [p[0] for p in points], [p[1] for p in points]
            label = f"{method}, batch {batch}"
            axis.plot(places, times, style, marker=".", color=f"C{colour}", label=label)
            if method == OURS and all(p[2] for p in points):
                limits = [float(p[2]) for p in points]
                axis.plot(places, limits, "--", color=f"C{colour}", label=f"limit, batch {batch}")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_title(f"{NAMES[op]}, float32, sparsity .99")
    axis.set_xlabel("connections")
    axis.set_ylabel("microseconds")
    if rows:
        axis.legend(fontsize="x-small")
    return bool(rows)
