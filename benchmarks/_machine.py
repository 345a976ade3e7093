"""Where a benchmark runs: the device, the one stream of its work, and what identifies the run."""

import contextlib
import hashlib
import platform
import re
import sys
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

import snack_cupy
from benchmarks._nvml import Nvml, NvmlError
from snack_cupy.random import random_topology
from snack_cupy.topology import Topology

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
WARM_UP_PRODUCTS = 60


@contextlib.contextmanager
def machine(requested: str) -> Iterator[torch.device]:
    """The device, warmed up. All work inside runs on one stream, so that it can be captured.

    ``requested`` is "auto", "cpu" or "cuda". float32 products are exact ones (no TF32).
    """
    warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state")
    kind = requested
    if requested == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    with float32_precision("highest"), torch.no_grad():
        if kind == "cpu":
            yield torch.device("cpu")
            return
        device = torch.device("cuda", torch.cuda.current_device())
        with torch.cuda.stream(torch.cuda.Stream(device)):
            _warm_up(device)
            yield device
            torch.cuda.synchronize()


@contextlib.contextmanager
def float32_precision(name: str) -> Iterator[None]:
    """PyTorch's precision of float32 products: "highest", or "high" for TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _warm_up(device: torch.device) -> None:
    """Bring the clocks up, and load the libraries that every provider shares."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        operand = torch.ones(4096, 4096, device=device, dtype=dtype)
        for _ in range(WARM_UP_PRODUCTS):
            operand @ operand
    torch.cuda.synchronize()


def synchronize(device: torch.device) -> None:
    """Wait for all work of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def topology_on(
    device: torch.device, shape: tuple[int, int], sparsity: float, seed: int = 0
) -> Topology:
    """A random topology, made on the device."""
    if device.type == "cpu":
        return random_topology(shape, sparsity=sparsity, seed=seed)
    import cupy

    topology = random_topology(shape, sparsity=sparsity, seed=seed, xp=cupy)
    # CuPy worked on its own stream, and keeps the memory that sorting took.
    torch.cuda.synchronize()
    cupy.get_default_memory_pool().free_all_blocks()
    return topology


def folder_name(device: torch.device) -> str:
    """Name of the results folder: that of the GPU in lower case, as in "nvidia-h200"."""
    if device.type == "cpu":
        return "cpu"
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")


def describe(device: torch.device) -> dict[str, str]:
    """What a run's figures depend on; ``run`` is its date and time (UTC), which rows refer to."""
    facts = {
        "run": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "command": _without_paths(sys.argv[1:]),
        "device": platform.processor() or platform.machine(),
        "driver": "",
        "cuda": torch.version.cuda or "",
        "cupy": "",
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "snack_cupy": snack_cupy.__version__,
        "sources": sources_digest(),
    }
    if device.type == "cuda":
        import cupy

        facts["device"] = torch.cuda.get_device_name(device)
        facts["cupy"] = cupy.__version__
        with contextlib.suppress(NvmlError):
            facts["driver"] = Nvml().driver()
    return facts


def _without_paths(words: list[str]) -> str:
    """The command without options that name folders of one machine."""
    pairs = zip(["", *words], words, strict=False)
    names = ("--out", "--data")
    return " ".join(word for before, word in pairs if not {before, word} & set(names))


def sources_digest() -> str:
    """First digits of a SHA-256 over the kernels and the package, to tell versions apart."""
    digest = hashlib.sha256()
    files = [*(ROOT / "cuda").glob("*.cu*"), *(ROOT / "snack_cupy").rglob("*.py")]
    for path in sorted(files):
        digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]
