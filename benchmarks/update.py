"""One topology update of a layer with Adam's moments, beside that of a masked dense layer.

``device_us`` is the time the device is busy in an update, ``elapsed_us`` that from its begin to its
end, the host's pauses included. Every update is checked: connections that stay keep value and
moments, grown ones start at zero, and the structure is canonical with as many connections.
"""

import argparse
import functools
import statistics
from collections.abc import Callable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import snack_cupy.torch
from benchmarks import _cells, _machine
from benchmarks._layers import MASKED, Training
from benchmarks._matrix import Matrix, random_matrix, random_operand
from benchmarks._providers import OURS
from benchmarks._results import Results
from benchmarks._running import first_line, progress_bar, reported
from benchmarks._timing import event_time, seconds
from snack_cupy.topology import Topology
from snack_cupy.torch import to_tensor

SHAPE = (4096, 4096)
SPARSITY = 0.9
BATCH = 64
FRACTION = 0.3
REPEATS = 10
METHODS = tuple(f"{side} {name}" for side in (OURS, MASKED) for name in ("SET", "RigL"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``update``."""
    _cells.add_common_arguments(parser)
    parser.add_argument("--shape", type=_cells.parse_shape, nargs="+", metavar="MxK")


def run(args: argparse.Namespace) -> int:
    """Measure; 1 if one of this library's failed."""
    with _machine.machine(args.device) as device:
        folder = args.out or _machine.RESULTS / _machine.folder_name(device)
        small = device.type == "cpu" and args.quick
        repeats = 3 if args.quick else REPEATS
        with Results(folder, _machine.describe(device)) as results, progress_bar() as bar:
            for shape in args.shape or [(48, 64) if small else SHAPE]:
                matrix = random_matrix(device, shape, SPARSITY, torch.float32)
                for method in bar.track(METHODS, description="update"):
                    measure_method(method, matrix, results, repeats)
    return int(results.failures > 0)


def measure_method(method: str, matrix: Matrix, results: Results, repeats: int) -> None:
    """The row of one method."""
    (m, k), device = matrix.topology.shape, matrix.device
    cell = {"m": m, "k": k, "sparsity": f"{SPARSITY:g}", "batch": BATCH}
    cell |= {"fraction": FRACTION, "method": method}
    side, name = method.split(" ")
    x = random_operand(device, BATCH, k, torch.float32, 2)
    dy = random_operand(device, BATCH, m, torch.float32, 3)
    with reported(results, "update", device, cell):
        training = Training(side, matrix, x, dy, "fused")
        by_gradient = name == "RigL"
        if side == OURS:
            algorithm = getattr(snack_cupy.torch, name)(FRACTION, update_every=10**9)
            algorithm.attach(training.layer, training.optimizer)
            update = algorithm.update
        else:
            update = functools.partial(masked_update, training, matrix.topology.nnz, by_gradient)
        elapsed = []
        observe = algorithm.observe if side == OURS and by_gradient else lambda: None
        for _ in range(repeats + 1):
            observe()
            prepare(training, by_gradient)
            check = checker(training, matrix) if side == OURS else lambda: None
            elapsed.append(elapsed_time(update, device))
            check()
        del elapsed[0]  # the first one compiles
        fifths = statistics.quantiles(elapsed, n=5, method="inclusive")
        observe()
        prepare(training, by_gradient)
        busy, launches, note = device_time(update, device)
        results.add(
            "update",
            **cell,
            device_us=busy,
            launches=launches,
            elapsed_us=statistics.median(elapsed),
            low_us=fifths[0],
            high_us=fifths[-1],
            error=note,
        )


def prepare(training: Training, keep_gradient: bool) -> None:
    """A training step, so that there are moments, a column-major view and fresh gradients."""
    if keep_gradient:  # another one each time, or the same connections would grow for ever
        training.dy.copy_(training.dy.roll(1, dims=1))
    training.step()
    if not keep_gradient:
        training.optimizer.zero_grad(set_to_none=True)
    _machine.synchronize(training.x.device)


def elapsed_time(update: Callable[[], None], device: torch.device) -> float:
    """Microseconds from begin to end."""
    if device.type == "cpu":
        return 1e6 * seconds(update)
    return event_time(update, busy_cycles=1)


def device_time(
    update: Callable[[], None], device: torch.device
) -> tuple[float | None, int | None, str]:
    """Microseconds the device is busy, number of its activities, or why that is unknown."""
    if device.type == "cpu":
        return None, None, ""
    try:
        with profile(activities=[ProfilerActivity.CUDA]):  # the first one prepares
            torch.zeros(1, device=device)
            torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            update()
            torch.cuda.synchronize()
        events = [
            event
            for event in profiler.events()
            if event.device_type == DeviceType.CUDA
            and not getattr(event, "is_user_annotation", False)
        ]
        if not events:
            raise RuntimeError("the profiler saw no kernels")
    except RuntimeError as error:
        return None, None, f"no device time: {first_line(error)}"
    return sum(event.time_range.elapsed_us() for event in events), len(events), ""


def masked_update(training: Training, nnz: int, by_gradient: bool) -> None:
    """SET or RigL as a masked dense layer does it: two selections among all of its weights."""
    layer, count = training.layer, round(FRACTION * nnz)
    with torch.no_grad():
        weight, mask = layer.weight.view(-1), layer.mask.view(-1)
        strength = torch.where(mask > 0, weight.abs(), torch.inf)
        dropped = strength.topk(count, largest=False).indices
        # The gradient of a masked weight is masked: RigL takes the product anew, without the mask.
        score = (training.dy.T @ training.x).abs().view(-1) if by_gradient else None
        score = torch.rand_like(weight) if score is None else score
        grown = score.masked_fill(mask > 0, -1.0).topk(count).indices
        mask[dropped] = 0.0
        mask[grown] = 1.0
        for tensor in (weight, *moments(training)):
            tensor.view(-1)[grown] = 0.0
        weight.mul_(mask)


def moments(training: Training) -> list[torch.Tensor]:
    """Adam's moments of the weight."""
    layer = training.layer
    parameter = layer.values if hasattr(layer, "values") else layer.weight
    state = training.optimizer.state[parameter]
    return [state["exp_avg"], state["exp_avg_sq"]]


def checker(training: Training, matrix: Matrix) -> Callable[[], None]:
    """Remembers the layer before an update; the call after it raises where something is wrong."""
    layer = training.layer

    def state() -> tuple[torch.Tensor, list[torch.Tensor]]:
        arrays = [layer.values.detach(), *moments(training)]
        positions = _positions(layer.topology)
        _machine.synchronize(matrix.device)
        return positions, [array.clone() for array in arrays]

    old_positions, old_arrays = state()

    def check() -> None:
        positions, arrays = state()
        if positions.shape != old_positions.shape or not bool((positions.diff() > 0).all()):
            raise ArithmeticError("wrong: the new structure is not canonical or of another size")
        place = torch.searchsorted(old_positions, positions).clamp(max=len(positions) - 1)
        kept = old_positions[place] == positions
        if int((~kept).sum()) > round(FRACTION * len(positions)) or bool(kept.all()):
            raise ArithmeticError("wrong: another number of connections moved")
        for new, old in zip(arrays, old_arrays, strict=True):
            if not torch.equal(new, torch.where(kept, old[place], 0.0)):
                raise ArithmeticError("wrong: values or moments do not follow their connections")

    return check


def _positions(topology: Topology) -> torch.Tensor:
    return to_tensor(topology.positions)
