"""The committed measurements of rivals on an H200 (`results/rivals_h200.csv`), by cell."""

import csv
import functools
from pathlib import Path

PATH = Path(__file__).resolve().parent / "results" / "rivals_h200.csv"

# Those that compute what strict float32 computes.
STRICT = ("dense_f32", "mask_f32", "csr_f32", "sputnik_f32", "snack_coo_f32")


def comparable(device: str) -> bool:
    """Whether a device of this name is the one they were measured on."""
    return "H200" in device


@functools.cache
def _times() -> dict[tuple[str, int, int, str, int, str], float]:
    """Microseconds in PyTorch's layout, hot."""
    with PATH.open(newline="", encoding="utf-8") as file:
        return {
            (row["op"], int(row["N"]), int(row["K"]), row["sp"], int(row["B"]), row["method"]): (
                float(row["wt_hot"])
            )
            for row in csv.DictReader(file)
            if row["wt_hot"]
        }


def time_of(op: str, m: int, k: int, sparsity: float, batch: int, method: str) -> float | None:
    """Microseconds of one rival, or None where it was not measured.

    ``op`` is "fwd", "dx" or "dw". A rival's dX of (m, k) is its forward of (k, m).
    """
    if op == "dx":
        m, k = k, m
    name = "dW" if op == "dw" else "fwd"
    times = _times()
    # Dense ones do the same whatever the sparsity.
    return times.get((name, m, k, f"{sparsity:g}", batch, method)) or times.get(
        (name, m, k, "-", batch, method)
    )


def best(op: str, m: int, k: int, sparsity: float, batch: int) -> float | None:
    """Microseconds of the fastest strict float32 rival, or None."""
    times = [time_of(op, m, k, sparsity, batch, method) for method in STRICT]
    return min((time for time in times if time is not None), default=None)
