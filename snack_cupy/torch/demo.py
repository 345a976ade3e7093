"""``python -m snack_cupy demo``: a truly sparse network learns digits, beside two others.

Three networks of the same layer sizes see the same batches under PyTorch's own Adam:

- ``SnackLinear + SET``: every layer stores its connections only; SET moves them while it trains.
- ``nn.Linear``: dense.
- ``dense + mask``: dense storage and arithmetic under a fixed mask, the usual stand-in for
  sparsity. It starts as the very function the sparse network starts as.

Every figure of the table is measured: from the tensors, the test images and the clock.
"""

from __future__ import annotations

import copy
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn

from snack_cupy._check import fail
from snack_cupy.dst import cosine
from snack_cupy.torch.demo_data import Dataset, DemoError, load_digits, load_mnist
from snack_cupy.torch.demo_device import Adviser, Gpu, choose_device, find_gpu, no_advice
from snack_cupy.torch.linear import SnackLinear
from snack_cupy.torch.training import SET

LEARNING_RATE = 3e-3
DROP_FRACTION = 0.3
UPDATES_PER_RUN = 30
STOP_FRACTION = 0.75
EVALUATION_BATCH = 1024


@dataclass(frozen=True)
class Options:
    """The command's options; None takes the recipe's value."""

    data: Path | None = None
    device: str = "auto"
    sparsity: float = 0.9
    epochs: int | None = None
    hidden: tuple[int, ...] | None = None
    batch: int | None = None
    seed: int = 0


class Recipe(NamedTuple):
    """Sizes and lengths that suit one data set."""

    hidden: tuple[int, ...]
    epochs: int
    batch: int


# With 64 inputs a row of the first layer keeps 6 connections: it needs width to see every pixel.
DIGITS = Recipe((1024, 256), epochs=40, batch=64)
MNIST = Recipe((512, 256), epochs=4, batch=128)


@dataclass(frozen=True)
class Result:
    """What was measured of one network."""

    name: str
    accuracy: float
    weights: int
    weight_bytes: int
    state_bytes: int
    step_ms: float
    train_seconds: float
    updates: int | None


# The networks


class MaskedLinear(nn.Module):
    """A dense layer whose weight is multiplied by a fixed mask at every forward."""

    mask: torch.Tensor

    def __init__(self, sparse: SnackLinear) -> None:
        super().__init__()
        dense = sparse.to_dense()
        self.weight, self.bias = dense.weight, dense.bias
        mask = torch.zeros(dense.weight.shape, dtype=torch.bool)
        mask.view(-1)[torch.from_numpy(sparse.topology.positions)] = True
        self.register_buffer("mask", mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ (weight * mask).T + bias``."""
        return F.linear(x, self.weight * self.mask, self.bias)


def build_networks(sizes: tuple[int, ...], sparsity: float, seed: int) -> dict[str, nn.Sequential]:
    """The three networks on the CPU, the same for the same seed."""
    pairs = list(itertools.pairwise(sizes))
    generator = torch.Generator().manual_seed(seed)
    sparse = [SnackLinear(k, m, sparsity=sparsity, generator=generator) for k, m in pairs]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        dense = [nn.Linear(k, m) for k, m in pairs]
        masked = [MaskedLinear(layer) for layer in sparse]
    return {
        "SnackLinear + SET": _stack(sparse),
        "nn.Linear": _stack(dense),
        "dense + mask": _stack(masked),
    }


def _stack(layers: Sequence[nn.Module]) -> nn.Sequential:
    """The layers with a ReLU between each two."""
    modules = [module for layer in layers for module in (layer, nn.ReLU())]
    return nn.Sequential(*modules[:-1])


# Training and measuring


class Split(NamedTuple):
    """Images and labels as tensors on the device."""

    images: torch.Tensor
    labels: torch.Tensor


class Training:
    """One network and its optimiser, trained an epoch at a time and measured on the way."""

    def __init__(
        self, name: str, network: nn.Sequential, recipe: Recipe, train_set: Split, seed: int
    ) -> None:
        self.name, self.network, self.recipe, self.train_set = name, network, recipe, train_set
        self.steps = -(-len(train_set.labels) // recipe.batch) * recipe.epochs
        self.optimizer = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE)
        self.method: SET | None = None
        if any(isinstance(module, SnackLinear) for module in network):
            stop = max(1, int(STOP_FRACTION * self.steps))
            every = max(1, self.steps // UPDATES_PER_RUN)
            self.method = SET(cosine(DROP_FRACTION, stop), every, stop=stop, seed=seed)
            self.method.attach(network, self.optimizer)
        # The same order of images for every network and device.
        self._generator = torch.Generator().manual_seed(seed)
        self._step_seconds: list[float] = []
        self._seconds = 0.0

    def epoch(self, after_step: Callable[[], None]) -> None:
        """Every training image once, in a new order."""
        begin = time.perf_counter()
        images, labels = self.train_set
        order = torch.randperm(len(labels), generator=self._generator).to(labels.device)
        for chosen in order.split(self.recipe.batch):
            x, y = images[chosen], labels[chosen]
            _synchronize(x.device)
            start = time.perf_counter()
            self.optimizer.zero_grad()
            F.cross_entropy(self.network(x), y).backward()
            self.optimizer.step()
            _synchronize(x.device)
            self._step_seconds.append(time.perf_counter() - start)
            after_step()
        self._seconds += time.perf_counter() - begin

    def result(self, test_set: Split) -> Result:
        """What was measured, and the accuracy on the test set."""
        weights, weight_bytes = weight_storage(self.network)
        return Result(
            self.name,
            accuracy(self.network, test_set),
            weights,
            weight_bytes,
            training_state_bytes(self.network, self.optimizer),
            1e3 * statistics.median(self._step_seconds),
            self._seconds,
            self.method.updates if self.method else None,
        )


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def warm_up(networks: dict[str, nn.Sequential], batches: list[Split]) -> float:
    """One forward and backward of a copy of each network, so that no step includes compilation.

    ``batches`` has one of each size that will occur. Returns the seconds it took.
    """
    begin = time.perf_counter()
    for network in networks.values():
        twin = copy.deepcopy(network)
        for images, labels in batches:
            F.cross_entropy(twin(images), labels).backward()
            _synchronize(images.device)
    return time.perf_counter() - begin


def accuracy(network: nn.Sequential, split: Split) -> float:
    """Fraction of images whose label the network finds."""
    right = 0
    with torch.no_grad():
        for images, labels in zip(
            split.images.split(EVALUATION_BATCH), split.labels.split(EVALUATION_BATCH), strict=True
        ):
            right += int((network(images).argmax(1) == labels).sum())
    return right / len(split.labels)


def weight_storage(network: nn.Module) -> tuple[int, int]:
    """Number of weights stored, and bytes of them with indices, derived structure and masks."""
    weights = [
        parameter
        for name, parameter in network.named_parameters()
        if name.rpartition(".")[2] != "bias"
    ]
    count = sum(weight.numel() for weight in weights)
    return count, sum(_nbytes(tensor) for tensor in (*weights, *network.buffers()))


def training_state_bytes(network: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of parameters, gradients, buffers and optimiser state."""
    parameters = list(network.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    moments = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    return sum(_nbytes(t) for t in (*parameters, *gradients, *network.buffers(), *moments))


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# What is shown


def table(results: list[Result]) -> Table:
    """One column per network, one row per measure."""
    shown = Table(title="Measured here")
    shown.add_column("")
    for result in results:
        shown.add_column(result.name, justify="right")
    rows = {
        "test accuracy": [f"{100 * r.accuracy:.2f} %" for r in results],
        "weights stored": [f"{r.weights:,}" for r in results],
        "bytes of weights": [f"{r.weight_bytes:,}" for r in results],
        "bytes of training state": [f"{r.state_bytes:,}" for r in results],
        "time per step (median)": [f"{r.step_ms:.2f} ms" for r in results],
        "training, updates included": [f"{r.train_seconds:.1f} s" for r in results],
        "topology updates done": ["-" if r.updates is None else str(r.updates) for r in results],
    }
    for label, cells in rows.items():
        shown.add_row(label, *cells)
    return shown


def notes(results: list[Result], device: str, test_size: int) -> list[str]:
    """What the figures mean, the unfavourable ones included."""
    sparse, dense, masked = results
    memory, mask_memory = (100 * r.state_bytes / dense.state_bytes for r in (sparse, masked))
    points = 100 * (sparse.accuracy - dense.accuracy)
    direction = "above" if points > 0 else "below"
    relation = f"{abs(points):.2f} points {direction}" if points else "equal to"
    ratio = sparse.step_ms / dense.step_ms
    place = "GPU" if device == "cuda" else "CPU"
    if ratio > 1:
        speed = (
            f"Slower here: a sparse step takes {ratio:.1f} times as long as nn.Linear's. On this "
            f"{place} and at this size, what sparsity saves is memory, not time."
        )
    else:
        speed = f"On this {place} a sparse step takes {ratio:.2f} times as long as nn.Linear's."
    return [
        "Bytes of weights: values, indices and derived structure, and masks. Training state: "
        "parameters, biases, gradients, indices, masks and Adam's moments.",
        f"Accuracy: {relation} nn.Linear's; one of the {test_size:,} test images is "
        f"{100 / test_size:.2f} points.",
        f"Memory: training takes {memory:.0f} % of nn.Linear's bytes. The mask saves none: it "
        f"takes {mask_memory:.0f} %.",
        speed,
    ]


def run(
    options: Options, console: Console | None = None, advise: Adviser = no_advice
) -> list[Result]:
    """The whole demo: choose a device, train three networks, print the table.

    ``advise`` tells what keeps a GPU from being used; see `snack_cupy.torch.demo_device`.

    Raises
    ------
    DemoError
        The data or the device cannot be used.
    """
    console = Console(highlight=False) if console is None else console
    data = load_digits() if options.data is None else load_mnist(options.data)
    recipe = _recipe(options, data)
    gpu = Gpu() if options.device == "cpu" else find_gpu(advise)
    device, reason = choose_device(options.device, gpu)
    sizes = (data.features, *recipe.hidden, data.classes)
    console.print(
        f"Running {reason}.\n"
        f"Data: {data.name}, {len(data.train_labels):,} to train on and "
        f"{len(data.test_labels):,} to test on.\n"
        f"Network: {' - '.join(map(str, sizes))}, every layer {100 * options.sparsity:g} % sparse, "
        f"the last one too. Adam, learning rate {LEARNING_RATE:g}, batch {recipe.batch}, "
        f"{recipe.epochs} epochs, seed {options.seed}.",
        markup=False,
    )
    networks = build_networks(sizes, options.sparsity, options.seed)
    networks = {name: network.to(device) for name, network in networks.items()}
    train_set = _split(data.train_images, data.train_labels, device)
    test_set = _split(data.test_images, data.test_labels, device)
    lengths = {min(recipe.batch, len(train_set.labels)), len(train_set.labels) % recipe.batch} - {0}
    seconds = warm_up(networks, [Split(*(t[:length] for t in train_set)) for length in lengths])
    trainings = [
        Training(name, network, recipe, train_set, options.seed)
        for name, network in networks.items()
    ]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, refresh_per_second=4) as bar:
        tasks = [bar.add_task(training.name, total=training.steps) for training in trainings]
        # Turn by turn, so that a machine that is busy for a while is so for all three.
        for _ in range(recipe.epochs):
            for training, task in zip(trainings, tasks, strict=True):
                training.epoch(functools.partial(bar.advance, task))
    results = [training.result(test_set) for training in trainings]
    console.print(table(results))
    for note in notes(results, device, len(test_set.labels)):
        console.print(note, markup=False)
    if device == "cuda":
        console.print(
            f"First calls, with the kernels' compilation: {seconds:.1f} s, not in the table."
        )
    return results


def _recipe(options: Options, data: Dataset) -> Recipe:
    """The data set's recipe with the options given put in its place."""
    recipe = DIGITS if options.data is None else MNIST
    recipe = recipe._replace(
        hidden=options.hidden or recipe.hidden,
        epochs=options.epochs or recipe.epochs,
        batch=options.batch or recipe.batch,
    )
    if recipe.batch > len(data.train_labels):
        rule = f"be at most the {len(data.train_labels)} training images"
        fail("demo", "--batch", rule, recipe.batch, DemoError)
    return recipe


def _split(images: object, labels: object, device: str) -> Split:
    return Split(torch.as_tensor(images, device=device), torch.as_tensor(labels, device=device))
