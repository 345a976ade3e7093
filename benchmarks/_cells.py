"""Which cells are measured, and how they are chosen on the command line."""

import argparse
from typing import NamedTuple

import torch

GRID_SHAPES = ((768, 768), (3072, 768), (768, 3072), (4096, 4096), (11008, 4096))
GRID_SPARSITIES = (0.8, 0.9, 0.95, 0.98, 0.99)
GRID_BATCHES = (1, 8, 16, 32, 64, 128, 256, 512)

# The linear layers of GPT-2 (small): written out x in and in x out, both occur in the literature.
GPT2_SHAPES = ((2304, 768), (768, 2304), (768, 768), (3072, 768), (768, 3072))
GPT2_BATCHES = (2048, 8192)

OPS = ("fwd", "dx", "dw")
# "tf32" is float32 with PyTorch's precision of float32 products set to "high".
DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "tf32": torch.float32,
}


class Grid(NamedTuple):
    """Every combination of these is a cell."""

    shapes: tuple[tuple[int, int], ...]
    sparsities: tuple[float, ...]
    batches: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of cells."""
        return len(self.shapes) * len(self.sparsities) * len(self.batches)


# What `--preset` and `--quick` choose; the last one is for machines without a GPU.
PRESETS = {
    "grid": Grid(GRID_SHAPES, GRID_SPARSITIES, GRID_BATCHES),
    "half": Grid(((4096, 4096), (11008, 4096)), GRID_SPARSITIES, GRID_BATCHES),
    "gpt2": Grid(GPT2_SHAPES, (0.9,), GPT2_BATCHES),
}
QUICK = {
    "grid": Grid(((768, 768), (4096, 4096)), (0.9, 0.99), (1, 16, 64, 256)),
    "half": Grid(((4096, 4096),), (0.9, 0.99), (1, 8, 16, 32, 128)),
    "gpt2": Grid(((768, 768), (3072, 768)), (0.9,), GPT2_BATCHES),
}
SMOKE = Grid(((48, 64),), (0.9,), (1, 8))


def parse_shape(text: str) -> tuple[int, int]:
    """(m, k) of "MxK": output by input features."""
    m, _, k = text.partition("x")
    return int(m), int(k)


def add_grid_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that choose a grid."""
    parser.add_argument("--preset", choices=PRESETS, default="grid")
    parser.add_argument("--shape", type=parse_shape, nargs="+", metavar="MxK")
    parser.add_argument("--sparsity", type=float, nargs="+")
    parser.add_argument("--batch", type=int, nargs="+")


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of every command that measures on a device."""
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--quick", action="store_true", help="a part of the cells")
    parser.add_argument("--out", metavar="DIR", help="default: benchmarks/results/<device>")
    parser.add_argument(
        "--seconds", type=float, help="begin no further cell after so long; the rest is left out"
    )


def chosen_grid(args: argparse.Namespace, device: torch.device) -> Grid:
    """The grid that the options name."""
    if device.type == "cpu" and args.quick:
        base = SMOKE
    else:
        base = (QUICK if args.quick else PRESETS)[args.preset]
    return Grid(
        tuple(args.shape or base.shapes),
        tuple(args.sparsity or base.sparsities),
        tuple(args.batch or base.batches),
    )
