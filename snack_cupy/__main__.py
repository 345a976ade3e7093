"""``python -m snack_cupy demo | doctor``. PyTorch is imported by ``demo`` only."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import snack_cupy

INSTALL_DEMO = 'pip install "snack-cupy[demo]"'


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, 1 for an error that was explained, 2 for wrong usage."""
    options = _parser().parse_args(arguments)
    if options.command == "doctor":
        from snack_cupy import doctor

        return doctor.main()
    return _demo(options)


def _demo(options: argparse.Namespace) -> int:
    needed = {"torch": "PyTorch", "rich": "rich", "sklearn": "scikit-learn"}
    if options.data is not None:
        del needed["sklearn"]
    missing = [label for module, label in needed.items() if find_spec(module) is None]
    if missing:
        return _explain(f"{' and '.join(missing)} not installed; run: {INSTALL_DEMO}")
    # GNU OpenMP reads this when PyTorch is loaded. With its own value, threads that wait for each
    # other spin so long that steps take ten times the time once another program wants the cores;
    # with this one nn.Linear is as fast on a quiet machine (2.4 ms a step on two cores).
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")
    try:
        from snack_cupy.torch import demo
    except ImportError as error:
        return _explain(f"an import fails ({error}); run: {INSTALL_DEMO}")
    chosen = {name: value for name, value in vars(options).items() if name != "command"}
    try:
        demo.run(demo.Options(**chosen), advise=_advise)
    except demo.DemoError as error:
        return _explain(str(error).removeprefix("demo: "))
    except KeyboardInterrupt:
        return 130
    return 0


def _advise(trouble: str | None) -> tuple[str, str | None]:
    """What keeps a GPU from being used, and the remedy: the doctor's worst finding."""
    from snack_cupy import _facts, _probe, doctor

    # The doctor takes seconds: not for a machine that shows no trace of a GPU.
    if trouble or _probe.ask_driver()["present"] or _facts._nvidia_hardware():
        facts = _facts.collect_facts()
        findings = doctor.diagnose(facts)
        # A usable GPU's warnings are of other things.
        if findings and (findings[0].severity == "error" or not doctor.on_gpu_machine(facts)):
            return findings[0].problem, findings[0].remedy
    return trouble or "no GPU is visible", None


def _explain(message: str) -> int:
    print(f"snack_cupy demo: {message}", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m snack_cupy",
        description="Truly sparse neural networks: only the non-zero connections exist.",
    )
    parser.add_argument("--version", action="version", version=snack_cupy.__version__)
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    commands.add_parser(
        "doctor",
        help="print versions and devices, and each mismatch with its remedy",
        description="Print versions and devices, and each mismatch with its remedy.",
    )
    demo = commands.add_parser(
        "demo",
        help="train a sparse network on handwritten digits, beside dense ones",
        description="Train a truly sparse network (SnackLinear + SET) on handwritten digits beside "
        "nn.Linear and a masked dense network, and print what was measured. On the GPU where there "
        "is one that works, else on the CPU; the default takes less than a minute on two cores.",
    )
    demo.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="folder of MNIST's four idx files, plain, .gz or .xz (default: scikit-learn's digits)",
    )
    demo.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s"
    )
    demo.add_argument(
        "--sparsity",
        type=_sparsity,
        default=0.9,
        metavar="S",
        help="fraction of connections that do not exist, in [0, 1) (default: %(default)s)",
    )
    demo.add_argument(
        "--epochs", type=_positive, metavar="N", help="default: 40 (digits), 4 (--data)"
    )
    demo.add_argument(
        "--hidden",
        type=_sizes,
        metavar="N,N",
        help="sizes of the hidden layers (default: 1024,256 for digits, 512,256 for --data)",
    )
    demo.add_argument(
        "--batch", type=_positive, metavar="N", help="default: 64 (digits), 128 (--data)"
    )
    demo.add_argument(
        "--seed",
        type=_seed,
        default=0,
        metavar="N",
        help="of topology, values and batches; a run repeats exactly (default: %(default)s)",
    )
    return parser


def _sparsity(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be in [0, 1), got {text}")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def _seed(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"must be in [0, 2^63), got {text}")
    return value


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
