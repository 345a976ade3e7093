"""CSV files of results: appended row by row, so that nothing measured is lost; the last row counts.

A row belongs to a cell, which its key columns name. Measuring a cell again appends a row that
replaces the older one when the file is read, and on disk when the run ends. The column ``run``
leads to ``runs.csv``: date, command, device and versions.
"""

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, str]


class Kind(NamedTuple):
    """Columns of one sort of file: those that name a cell, then those that are measured."""

    keys: tuple[str, ...]
    measured: tuple[str, ...]

    @property
    def fields(self) -> tuple[str, ...]:
        """All columns, in the order of the file."""
        return (*self.keys, *self.measured, "error", "run")


SHAPE = ("m", "k", "sparsity")
SPREAD = ("us", "low_us", "high_us", "mode")

# By the first part of a file's name (kernels_fwd_float32.csv).
KINDS = {
    "kernels": Kind(
        ("op", "dtype", *SHAPE, "batch", "method", "cache"),
        ("nnz", *SPREAD, "max_error", "rms_error"),
    ),
    "layer": Kind((*SHAPE, "batch", "what", "method", "optimizer"), (*SPREAD, "eager_us")),
    "energy": Kind((*SHAPE, "batch", "method"), ("mj_per_step", "watts", "steps")),
    "memory": Kind((*SHAPE, "batch", "state", "method"), ("bytes", "peak_bytes")),
    "host": Kind((*SHAPE, "batch", "what", "method"), ("us", "low_us", "high_us")),
    "update": Kind(
        (*SHAPE, "batch", "fraction", "method"),
        ("device_us", "launches", "elapsed_us", "low_us", "high_us"),
    ),
    "scale": Kind(
        ("op", *SHAPE, "batch", "method", "cache"),
        ("nnz", *SPREAD, "limit_us", "max_error", "rms_error"),
    ),
    "real": Kind(
        ("name", "op", "m", "k", "nnz", "batch", "method", "cache"),
        (*SPREAD, "longest_row", "max_error", "rms_error"),
    ),
    "runs": Kind(
        ("run",),
        (
            "command",
            "device",
            "driver",
            "cuda",
            "cupy",
            "torch",
            "numpy",
            "python",
            "snack_cupy",
            "sources",
        ),
    ),
}


def kind_of(path: Path) -> Kind:
    """The kind of the file of that name."""
    return KINDS[path.stem.partition("_")[0]]


def read(path: Path) -> list[Row]:
    """The rows that count: the last one of each cell, in the order cells first came."""
    if not path.exists():
        return []
    keys = kind_of(path).keys
    with path.open(newline="", encoding="utf-8") as file:
        rows = {tuple(row.get(key) for key in keys): row for row in csv.DictReader(file)}
    return list(rows.values())


def read_all(folder: Path, kind: str) -> list[Row]:
    """Rows of every file of one kind."""
    return [row for path in sorted(folder.glob(f"{kind}*.csv")) for row in read(path)]


def write(path: Path, rows: Iterable[Row]) -> None:
    """Replace the file, in one step."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", newline="", encoding="utf-8") as file:
        fields = dict.fromkeys(kind_of(path).fields)
        writer = csv.DictWriter(file, list(fields), extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    temporary.replace(path)


def merge(source: Path, target: Path) -> Iterator[tuple[str, int]]:
    """Bring the rows of one folder into another, newer runs first; names and numbers of rows."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.glob("*.csv")):
        if path.stem.partition("_")[0] not in KINDS:
            continue
        kind, known = kind_of(path), target / path.name
        cells = {tuple(row[key] for key in kind.keys): row for row in read(known)}
        for row in read(path):
            cell = tuple(row[key] for key in kind.keys)
            if cell not in cells or cells[cell]["run"] <= row["run"]:
                cells[cell] = row
        write(known, cells.values())
        yield path.name, len(cells)


class Results:
    """Files of one run in a folder; a context manager that tidies up at its end."""

    def __init__(self, folder: str | Path, facts: dict[str, str]) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._run = facts["run"]
        self._touched: dict[str, Path] = {}
        self.failures = 0
        self.add("runs", **facts)

    def add(self, name: str, /, **values: Any) -> None:
        """Append a row to ``<name>.csv``, on disk when this returns."""
        path = self._touched.get(name) or self._open(name)
        row = {"run": self._run, **{key: _text(value) for key, value in values.items()}}
        fields = list(dict.fromkeys(kind_of(path).fields))
        if unknown := set(row) - set(fields):
            raise KeyError(f"{path.name} has no columns {sorted(unknown)}")
        with path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, fields, lineterminator="\n").writerow(row)

    def _open(self, name: str) -> Path:
        path = self._touched[name] = self.folder / f"{name}.csv"
        write(path, read(path))  # the header, or that of an older version brought up to date
        return path

    def __enter__(self) -> "Results":
        return self

    def __exit__(self, *exception: object) -> None:
        for path in self._touched.values():
            write(path, read(path))


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.5g}" if isinstance(value, float) else str(value)
