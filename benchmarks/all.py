"""Every benchmark within a time limit, the most telling first, each in a process of its own.

A part that fails, hangs or takes the device down loses neither its rows so far nor other parts.
What the time does not suffice for is missing from the results, and the report says so.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import _cells

# Share of the whole time that a part may take at most, and its command.
PARTS = (
    (0.30, "kernels --op fwd --dtype float32"),
    (0.20, "layer"),
    (0.10, "host"),
    (0.10, "update"),
    (0.30, "kernels --op dw --dtype float32"),
    (0.30, "kernels --op dx --dtype float32"),
    (0.30, "kernels --preset half --op fwd dw --dtype float16 bfloat16 --cold --rivals dense"),
    (0.20, "kernels --preset gpt2 --dtype float16 bfloat16 tf32 --rivals dense"),
    (0.30, "scale"),
    (0.20, "real"),
)
GRACE_SECONDS = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``all``."""
    _cells.add_common_arguments(parser)
    parser.add_argument("--only", nargs="+", metavar="WORD", help="parts that have all these words")
    parser.set_defaults(seconds=1800.0)


def run(args: argparse.Namespace) -> int:
    """Run the parts; 1 if one failed."""
    start, failed = time.monotonic(), []
    for share, command in PARTS:
        if args.only and not set(args.only) <= set(command.split()):
            continue
        left = args.seconds - (time.monotonic() - start)
        if left <= 0:
            failed.append(f"{command}: no time left")
            continue
        seconds = min(left, share * args.seconds)
        options = ["--device", args.device, "--seconds", f"{seconds:.0f}"]
        options += ["--out", args.out] if args.out else []
        options += ["--quick"] if args.quick else []
        words = [sys.executable, "-m", "benchmarks", *command.split(), *options]
        print(f"== {command} (at most {seconds:.0f} s)", flush=True)
        begin = time.monotonic()
        try:
            root = Path(__file__).resolve().parent.parent
            status = subprocess.run(words, cwd=root, timeout=seconds + GRACE_SECONDS).returncode
            outcome = f"status {status}"
        except subprocess.TimeoutExpired:
            outcome = "stopped: it took too long"
        print(f"== {command}: {outcome}, {time.monotonic() - begin:.0f} s", flush=True)
        if outcome != "status 0":
            failed.append(f"{command}: {outcome}")
    for text in failed:
        print(f"failed: {text}")
    return int(bool(failed))
