"""What was measured, as look-ups: microseconds of a cell, and the ratio to its best rival."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from benchmarks import _results, _rivals
from benchmarks._cells import GRID_BATCHES, GRID_SHAPES, GRID_SPARSITIES
from benchmarks._providers import OURS, RIVALS
from benchmarks._results import Row

Cell = tuple[int, int, float, int]  # m, k, sparsity, batch

GRID: tuple[Cell, ...] = tuple(
    (m, k, sparsity, batch)
    for m, k in GRID_SHAPES
    for sparsity in GRID_SPARSITIES
    for batch in GRID_BATCHES
)


class Ratios(NamedTuple):
    """Ratios of the cells that were measured, and how many of all there are."""

    values: dict[Cell, float]
    expected: int

    @property
    def complete(self) -> bool:
        """Whether no cell is missing."""
        return len(self.values) == self.expected > 0

    @property
    def mean(self) -> float | None:
        """The geometric one."""
        if not self.values:
            return None
        return math.exp(math.fsum(map(math.log, self.values.values())) / len(self.values))

    @property
    def least(self) -> tuple[Cell, float] | None:
        """The worst cell."""
        return min(self.values.items(), key=lambda item: item[1], default=None)

    @property
    def most(self) -> tuple[Cell, float] | None:
        """The best cell."""
        return max(self.values.items(), key=lambda item: item[1], default=None)


class Measured:
    """The results of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # The committed rivals may stand beside results of the same GPU only.
        devices = {row["device"] for row in _results.read(folder / "runs.csv")}
        self.same_gpu = bool(devices) and all(map(_rivals.comparable, devices))
        self._kernels: dict[tuple, float] = {}
        for row in _results.read_all(folder, "kernels"):
            if row["us"]:
                cell = (int(row["m"]), int(row["k"]), float(row["sparsity"]), int(row["batch"]))
                key = (row["op"], row["dtype"], row["method"], row["cache"], cell)
                self._kernels[key] = float(row["us"])

    def rows(self, kind: str, **wanted: object) -> list[Row]:
        """Rows of a kind of file that have these entries, those with an error included."""
        return [
            row
            for row in _results.read_all(self.folder, kind)
            if all(row[key] == str(value) for key, value in wanted.items())
        ]

    def number(self, kind: str, column: str, **wanted: object) -> float | None:
        """The entry of the one row that matches, if it was measured."""
        rows = self.rows(kind, **wanted)
        return float(rows[0][column]) if len(rows) == 1 and rows[0][column] else None

    def time(
        self, op: str, dtype: str, cell: Cell, method: str = OURS, cache: str = "hot"
    ) -> float | None:
        """Microseconds of a method on a cell."""
        return self._kernels.get((op, dtype, method, cache, cell))

    def best_rival(self, op: str, dtype: str, cell: Cell) -> float | None:
        """The fastest rival: in the same process and, in float32, of the committed ones."""
        times = [self.time(op, dtype, cell, method) for method in RIVALS]
        if dtype == "float32" and self.same_gpu:
            times.append(_rivals.best(op, *cell))
        return min((time for time in times if time), default=None)

    def rival(
        self, op: str, dtype: str, cell: Cell, method: str, cache: str = "hot"
    ) -> float | None:
        """One rival, in the same process or committed, whichever is faster."""
        times = [self.time(op, dtype, cell, method, cache)]
        if self.same_gpu and cache == "hot":
            name = method.replace("dense_mask", "mask") + dtype.replace("float", "_f")
            times.append(_rivals.time_of(op, *cell, name))
        return min((time for time in times if time), default=None)

    def ratios(self, op: str, dtype: str, cells: Iterable[Cell]) -> Ratios:
        """Best rival / ours."""
        cells = list(cells)
        pairs = {c: (self.best_rival(op, dtype, c), self.time(op, dtype, c)) for c in cells}
        return _divide(pairs, len(cells))

    def ratios_to(
        self, op: str, dtype: str, cells: Iterable[Cell], method: str, cache: str = "hot"
    ) -> Ratios:
        """One rival / ours."""
        cells = list(cells)
        pairs = {
            c: (self.rival(op, dtype, c, method, cache), self.time(op, dtype, c, cache=cache))
            for c in cells
        }
        return _divide(pairs, len(cells))


def _divide(pairs: dict[Cell, tuple[float | None, float | None]], expected: int) -> Ratios:
    return Ratios({c: a / b for c, (a, b) in pairs.items() if a and b}, expected)


def cells(
    shapes: Iterable[tuple[int, int]], sparsities: Iterable[float], batches: Iterable[int]
) -> list[Cell]:
    """Every combination."""
    sparsities, batches = tuple(sparsities), tuple(batches)
    return [(m, k, s, b) for m, k in shapes for s in sparsities for b in batches]
