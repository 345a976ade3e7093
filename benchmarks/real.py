"""Forward on topologies of pruned networks, beside random ones of the same size.

``--data`` names a folder of matrices of the Deep Learning Matrix Collection (``.smtx``, also packed
as ``.smtx.xz``): a first line "rows, columns, entries", a line of row offsets, a line of columns.
Without it the folder ``dlmc`` in that of the environment variable ``SNACK_CUPY_DATA`` is looked at.
"""

import argparse
import lzma
import os
import sys
from pathlib import Path

import numpy as np
import torch

from benchmarks import _cells, _machine, _providers
from benchmarks._matrix import Matrix, Problem, random_operand
from benchmarks._results import Results
from benchmarks._running import Deadline, measure_methods, progress_bar
from snack_cupy import Topology
from snack_cupy.random import random_topology

BATCHES = (1, 16, 64, 256)
RANDOM = "snack_cupy on random"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``real``."""
    _cells.add_common_arguments(parser)
    parser.add_argument("--data", type=Path, metavar="DIR")
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--op", choices=_cells.OPS, nargs="+", default=["fwd"])


def run(args: argparse.Namespace) -> int:
    """Measure every matrix of the folder; 1 if one of this library's failed."""
    data = args.data or Path(os.environ.get("SNACK_CUPY_DATA", ".")) / "dlmc"
    files = sorted(data.rglob("*.smtx*"))
    if not files:
        print(f"real: no .smtx files in {data}; name their folder by --data", file=sys.stderr)
        return 0
    with _machine.machine(args.device) as device:
        folder = args.out or _machine.RESULTS / _machine.folder_name(device)
        deadline = Deadline(args.seconds)
        with Results(folder, _machine.describe(device)) as results, progress_bar() as bar:
            for path in bar.track(files[::6] if args.quick else files, description="real"):
                if not deadline.passed():
                    name = path.relative_to(data).as_posix().partition(".smtx")[0]
                    measure_file(name, read_smtx(path), args, device, results)
    return int(results.failures > 0)


def read_smtx(path: Path) -> Topology:
    """The structure in one file."""
    text = lzma.open(path, "rt") if path.suffix == ".xz" else path.open(encoding="utf-8")
    with text:
        m, k, _ = (int(part) for part in text.readline().split(","))
        offsets = np.array(text.readline().split(), np.int64)
        columns = np.array(text.readline().split(), np.int64)
    return Topology(offsets, columns, (m, k))


def measure_file(
    name: str,
    topology: Topology,
    args: argparse.Namespace,
    device: torch.device,
    results: Results,
) -> None:
    """Rows of one matrix."""
    shape, dtype = topology.shape, torch.float32
    random = random_topology(shape, nnz=topology.nnz)
    x = random_operand(device, max(args.batch), shape[1], dtype, 2)
    dy = random_operand(device, max(args.batch), shape[0], dtype, 3)
    real_methods = {_providers.OURS: _providers.ours, "dense": _providers.dense}
    for structure, methods in ((topology, real_methods), (random, {RANDOM: _providers.ours})):
        longest = int(structure.fan_in.max())
        matrix = Matrix(structure.to_device(device.type), dtype, device)
        for op in args.op:
            for batch in args.batch:
                cell = {"name": name, "op": op, "m": shape[0], "k": shape[1], "batch": batch}
                sizes = {"nnz": structure.nnz, "longest_row": longest}
                problem = Problem(op, matrix, x[:batch], dy[:batch])
                measure_methods(problem, methods, results, "real", {**cell, **sizes})
