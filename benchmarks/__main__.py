"""``python -m benchmarks COMMAND``: what is measured, one module for each command."""

import argparse
import importlib
import sys

COMMANDS = {
    "kernels": "forward, dX and dW over shapes, sparsities, batches and dtypes, beside rivals",
    "layer": "one layer: training step, inference, energy and memory, beside dense ones",
    "host": "host time of an eager call, beside nn.Linear",
    "update": "a topology update, beside one of a masked dense layer",
    "scale": "growth of the cost from 1024 x 1024 to 32768 x 32768",
    "real": "topologies of pruned networks, beside random ones of their size",
    "cpu": "forward and backward on the CPU",
    "all": "all of these within a time limit, each in a process of its own",
    "report": "tables, plots and targets from the CSV files",
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command; its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in COMMANDS:
        name, *rest = arguments
        module = importlib.import_module(f"benchmarks.{name}")
        parser = argparse.ArgumentParser(f"python -m benchmarks {name}", description=COMMANDS[name])
        module.add_arguments(parser)
        return module.run(parser.parse_args(rest))
    parser = argparse.ArgumentParser(
        "python -m benchmarks",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"  {name:<8} {text}" for name, text in COMMANDS.items()),
    )
    parser.add_argument("command", choices=COMMANDS)
    parser.parse_args(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
