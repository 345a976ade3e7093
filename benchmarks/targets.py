"""The targets, each computed from the CSV files: what must be, what is aimed at, what is.

A target whose data are missing or incomplete counts as missed. Where several cells, dtypes or
operations share one target, each dtype has a row, and "least" takes the worst of the rest.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks._cells import GPT2_SHAPES, GRID_SPARSITIES
from benchmarks._measured import GRID, Cell, Measured, Ratios, cells
from benchmarks._providers import OURS

LARGE = ((4096, 4096), (11008, 4096))
LAYER_SHAPES = ((4096, 4096), (5000, 5000))
HALF = ("float16", "bfloat16")


class Target(NamedTuple):
    """One row; ``sign`` is 1 where more is better and -1 where less is."""

    what: str
    must: float | None
    aim: float | None
    measured: float | None
    sign: int = 1
    note: str = ""
    complete: bool = True

    @property
    def verdict(self) -> str:
        """Whether the must, and the aim, is met, or why that is not known; "-" without a must."""
        if self.measured is None:
            return "not measured" if self.must is not None else "-"
        if self.must is None:
            return "-"
        if self.sign * self.measured < self.sign * self.must:
            return "missed"
        if not self.complete:
            return "incomplete"
        reached = self.aim is not None and self.sign * self.measured >= self.sign * self.aim
        return "aim met" if reached else "met"

    @property
    def missed(self) -> bool:
        """Whether a must is not known to be met."""
        return self.verdict in ("not measured", "incomplete", "missed")


def all_targets(folder: Path) -> list[Target]:
    """Every target, computed from the files of a folder."""
    measured = Measured(folder)
    parts = (_float32, _half, _gpt2, _layer, _host_and_update, _further)
    return [target for part in parts for target in part(measured)]


def _mean(what: str, must: float, aim: float, ratios: Ratios) -> Target:
    return Target(what, must, aim, ratios.mean, 1, _missing(ratios), ratios.complete)


def _extreme(
    what: str, must: float, aim: float, ratios: Ratios, which: Callable[[Ratios], tuple | None]
) -> Target:
    found = which(ratios)
    if found is None:
        return Target(what, must, aim, None, 1, _missing(ratios), False)
    note = f"at {cell_name(found[0])} {_missing(ratios)}".strip()
    return Target(what, must, aim, found[1], 1, note, ratios.complete)


def _least(what: str, must: float, aim: float, ratios: Ratios) -> Target:
    return _extreme(what, must, aim, ratios, lambda ratios: ratios.least)


def _missing(ratios: Ratios) -> str:
    if ratios.complete:
        return ""
    return f"({len(ratios.values)} of {ratios.expected} cells)"


def cell_name(cell: Cell) -> str:
    """A cell in words."""
    return f"{cell[0]}x{cell[1]} {cell[2]:g} batch {cell[3]}"


def _float32(measured: Measured) -> Iterator[Target]:
    forward = measured.ratios("fwd", "float32", GRID)
    large = measured.ratios("fwd", "float32", [c for c in GRID if c[:2] in LARGE])
    yield _mean("forward float32, best rival / ours, mean of 200 cells", 1.6, 2, forward)
    yield _mean("the same over the two largest shapes", 1.5, 2, large)
    yield _least("the same, any cell", 0.95, 1.1, forward)
    at_95 = [cell for cell in GRID if cell[2] == 0.95]
    masked = measured.ratios_to("fwd", "float32", at_95, "dense_mask")
    yield _mean("forward float32, Dense+Mask / ours at .95, mean", 5, 7, masked)
    yield _extreme("the same, best cell", 20, 25, masked, lambda ratios: ratios.most)
    gradient = measured.ratios("dx", "float32", GRID)
    yield _mean("dX float32, best rival / ours, mean of 200 cells", 1.25, 1.7, gradient)
    weights = measured.ratios("dw", "float32", GRID)
    yield _mean("dW float32, best rival / ours, mean of 200 cells", 1.7, 2.2, weights)
    yield _least("the same, any cell", 0.95, 1.1, weights)


def _half(measured: Measured) -> Iterator[Target]:
    figures = {0.9: (1.7, 2.2), 0.95: (1.9, 2.6), 0.99: (2.1, 3.2)}
    for dtype in HALF:
        for sparsity, (must, aim) in figures.items():
            few = cells(LARGE, [sparsity], (1, 8, 16))
            what = f"forward {dtype}, dense / ours, two largest, batch 1 8 16, {sparsity:g}, mean"
            yield _mean(what, must, aim, measured.ratios_to("fwd", dtype, few, "dense"))
    for dtype in HALF:
        for cache, must, aim in (("hot", 1, 1.3), ("cold", 1.2, 1.5)):
            groups = [
                measured.ratios_to("fwd", dtype, cells(LARGE, [s], [32]), "dense", cache)
                for s in figures
            ]
            what = f"forward {dtype}, batch 32, {cache}, least of the means at .9 .95 .99"
            yield _least_mean(what, must, aim, groups)
    for dtype in HALF:
        wide = cells(LARGE, GRID_SPARSITIES, (64, 128, 256, 512))
        what = f"forward {dtype}, batch 64 to 512, any cell"
        yield _least(what, 0.4, 0.8, measured.ratios_to("fwd", dtype, wide, "dense"))
    for dtype in HALF:
        for sparsity, must, aim in ((0.9, 0.8, 1.2), (0.99, 1.3, 2)):
            some = cells([(4096, 4096)], [sparsity], (1, 8, 16, 32))
            what = f"dW {dtype}, dense / ours, 4096x4096, batch <= 32, {sparsity:g}, mean"
            yield _mean(what, must, aim, measured.ratios_to("dw", dtype, some, "dense"))


def _least_mean(what: str, must: float, aim: float, groups: Iterable[Ratios]) -> Target:
    groups = list(groups)
    means = [group.mean for group in groups if group.mean is not None]
    complete = all(group.complete for group in groups)
    note = "" if complete else f"({sum(len(g.values) for g in groups)} cells)"
    return Target(what, must, aim, min(means, default=None), 1, note, complete)


def _gpt2(measured: Measured) -> Iterator[Target]:
    for batch, must, aim in ((2048, 0.7, 0.85), (8192, 0.87, 0.95)):
        for dtype in (*HALF, "tf32"):
            for op in ("fwd", "dx", "dw"):
                some = cells(GPT2_SHAPES, [0.9], [batch])
                ratios = measured.ratios_to(op, dtype, some, "dense")
                what = f"{op} {dtype}, dense / ours, GPT-2 shapes, .9, {batch} rows, any shape"
                yield _least(what, must, aim, ratios)


def _layer(measured: Measured) -> Iterator[Target]:
    figures = {
        "train": (("fused",), (3.7, 6.5), (5.5, 10)),
        "inference": (("",), (3.5, 7), (5, 10)),
    }
    for what, ((optimizer,), musts, aims) in figures.items():
        for m, k in LAYER_SHAPES:
            for rival, must, aim in zip(("dense", "dense_mask"), musts, aims, strict=True):
                cell = {"m": m, "k": k, "sparsity": 0.9, "batch": 16, "what": what}
                times = [
                    measured.number("layer", "us", **cell, optimizer=optimizer, method=method)
                    for method in (rival, OURS)
                ]
                name = "training step" if what == "train" else what
                text = f"layer {m}x{k} .9, batch 16, {name}: {rival} / ours"
                yield Target(text, must, aim, _quotient(*times))
    for m, k in LAYER_SHAPES:
        cell = {"m": m, "k": k, "sparsity": 0.9, "batch": 16}
        energies = [
            measured.number("energy", "mj_per_step", **cell, method=method)
            for method in ("dense_mask", OURS)
        ]
        text = f"energy of the training step, {m}x{k}: dense_mask / ours"
        yield Target(text, 4, 8, _quotient(*energies))
    for state, must, aim in (("inference", 0.17, 0.155), ("training", 0.165, 0.152)):
        cell = {"m": 4096, "k": 4096, "sparsity": 0.9, "batch": 64, "state": state}
        kept, peak = (
            [measured.number("memory", column, **cell, method=method) for method in (OURS, "dense")]
            for column in ("bytes", "peak_bytes")
        )
        share = _quotient(*peak)
        note = "" if share is None else f"peak {share:.3g}"
        yield Target(f"bytes of {state}, share of dense", must, aim, _quotient(*kept), -1, note)


def _quotient(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator and denominator else None


def _host_and_update(measured: Measured) -> Iterator[Target]:
    for what, aim in (("forward", 0.8), ("forward+backward", 0.7)):
        found = []
        for m, k in ((768, 768), (4096, 4096)):
            times = [
                measured.number("host", "us", m=m, k=k, what=what, method=method)
                for method in (OURS, "dense")
            ]
            found.append(_quotient(*times))
        known = [ratio for ratio in found if ratio is not None]
        note = "most of 768x768 and 4096x4096"
        text = f"host time of {what}, share of nn.Linear"
        yield Target(text, 1, aim, max(known, default=None), -1, note, None not in found)
    for method, must, aim in (("SET", 0.3, 0.1), ("RigL", 0.8, 0.2)):
        cell = {"m": 4096, "k": 4096, "method": f"{OURS} {method}"}
        busy = measured.number("update", "device_us", **cell)
        elapsed = measured.number("update", "elapsed_us", **cell)
        time = busy or elapsed
        note = "" if elapsed is None else f"{elapsed / 1e3:.3g} ms with the host's pauses"
        text = f"{method} update 4096x4096 .9, ms of device time"
        yield Target(text, must, aim, time and time / 1e3, -1, note)


def _further(measured: Measured) -> Iterator[Target]:
    """Figures without a must: real topologies, and how time grows once past the launch."""
    times: dict[tuple, float] = {}
    for row in measured.rows("real"):
        if row["us"]:
            times[row["name"], row["op"], row["batch"], row["method"]] = float(row["us"])
    ratios = {
        key: times[*key[:3], f"{OURS} on random"] / time
        for key, time in times.items()
        if key[3] == OURS and (*key[:3], f"{OURS} on random") in times
    }
    text = "real topologies, time of a random one / time, mean"
    mean = Ratios(ratios, len(ratios)).mean
    worst = min(ratios, key=lambda key: ratios[key], default=None)
    note = "" if worst is None else f"least {ratios[worst]:.2f}: {worst[0]} batch {worst[2]}"
    yield Target(text, None, 1, mean, 1, note)
    for op in ("fwd", "dx", "dw"):
        known = {
            int(row["m"]): float(row["us"])
            for row in measured.rows("scale", op=op, batch=64, method=OURS)
            if row["us"]
        }
        text = f"{op} at .99, batch 64: time at 32768 / 16 times that at 8192"
        both = _quotient(known.get(32768), 16 * known[8192] if 8192 in known else None)
        yield Target(text, None, 1, both, -1)


def table(targets: Iterable[Target]) -> str:
    """The targets as a Markdown table."""
    lines = ["| target | must | aim | measured | verdict |", "| --- | ---: | ---: | ---: | --- |"]
    for target in targets:
        relation = ">= " if target.sign > 0 else "<= "
        must, aim = (
            "-" if bound is None else f"{relation}{bound:g}" for bound in (target.must, target.aim)
        )
        got = "not measured" if target.measured is None else f"{target.measured:.3g}"
        got = f"{got} {target.note}".strip()
        lines.append(f"| {target.what} | {must} | {aim} | {got} | {target.verdict} |")
    return "\n".join(lines)
