"""Time of one call: CUDA-graph replay on a GPU, the wall clock on a CPU.

A graph holds many launches of the call and is replayed many times; the median counts. Ahead of each
replay the device is kept busy for some microseconds, so that the replay is queued before it starts
and the host's time does not enter. What cannot be captured is timed by events around eager calls
(mode "e" instead of "g"; "w" is the wall clock).

*Hot*: the same buffers over and over, so that what fits a cache stays there. *Cold*: the L2 cache
is overwritten before each launch, and the time of doing so, measured alike, is subtracted.
"""

import functools
import gc
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

Call = Callable[[], object]

LAUNCHES = 20
COLD_LAUNCHES = 10
GRAPH_MICROSECONDS = 5000  # slow calls are launched fewer times
REPLAYS = (5, 25)
SECONDS = 0.02
BUSY_CYCLES = 60_000  # 30 us at 2 GHz: longer than queueing a graph takes
EAGER_BUSY_CYCLES = 20_000_000  # 10 ms: longer than queueing the eager calls takes


class Timing(NamedTuple):
    """Microseconds per call: the median, the 20th and 80th percentiles, and how it was timed."""

    median: float
    low: float
    high: float
    mode: str


def measure(call: Call, device: torch.device, *, cold: bool = False) -> Timing:
    """Time of ``call`` on ``device``; compiles and warms up first."""
    if device.type == "cpu":
        return _wall_clock(call)
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    if cold:
        return _measure_cold(call, device)
    launches = int(min(max(GRAPH_MICROSECONDS / event_time(call), 2), LAUNCHES))
    try:
        replay = capture(call, launches).replay
    except Exception:  # CuPy, for one, refuses to call cuSPARSE in a capture
        sample = _repeat(lambda: event_time(lambda: _eager(call, launches), EAGER_BUSY_CYCLES))
        return summarise([t / launches for t in sample], "e")
    return summarise([t / launches for t in _repeat(lambda: event_time(replay))], "g")


def _eager(call: Call, count: int) -> None:
    for _ in range(count):
        call()


# PyTorch's allocator may go on asking a graph whose capture failed: these are never freed.
_failed_graphs: list[torch.cuda.CUDAGraph] = []


def capture(call: Call, launches: int) -> torch.cuda.CUDAGraph:
    """A CUDA graph of ``launches`` calls, captured on the current stream."""
    graph = torch.cuda.CUDAGraph()
    collecting = gc.isenabled()
    gc.disable()  # what a collection frees could call what a capture forbids
    try:
        graph.capture_begin()
        try:
            for _ in range(launches):
                call()
        finally:
            graph.capture_end()
    except Exception:
        _failed_graphs.append(graph)
        raise
    finally:
        if collecting:
            gc.enable()
    return graph


def event_time(run: Call, busy_cycles: int = BUSY_CYCLES) -> float:
    """Microseconds that the device takes for what ``run`` queues, behind so many cycles."""
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(busy_cycles)
    start.record()
    run()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end)


@functools.cache
def _flush_buffer(device: torch.device) -> torch.Tensor:
    """Twice the size of the L2 cache."""
    size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
    return torch.empty(size, dtype=torch.uint8, device=device)


def _measure_cold(call: Call, device: torch.device) -> Timing:
    buffer = _flush_buffer(device)

    def flush_and_call() -> None:
        buffer.zero_()
        call()

    both = capture(flush_and_call, COLD_LAUNCHES)
    flush = capture(buffer.zero_, COLD_LAUNCHES)
    pairs = _repeat(lambda: event_time(both.replay) - event_time(flush.replay))
    return summarise([t / COLD_LAUNCHES for t in pairs], "g")


def _repeat(sample: Callable[[], float]) -> list[float]:
    """As many samples as fit the time, within bounds; the first one is not kept."""
    sample()
    start = time.perf_counter()
    first = sample()
    each = max(time.perf_counter() - start, 1e-6)
    count = int(min(max(SECONDS / each, REPLAYS[0]), REPLAYS[1]))
    return [first, *(sample() for _ in range(count - 1))]


def _wall_clock(call: Call) -> Timing:
    call()
    return summarise(_repeat(lambda: 1e6 * seconds(call)), "w")


def seconds(call: Call) -> float:
    """Wall-clock time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def summarise(sample: list[float], mode: str) -> Timing:
    """Median and spread."""
    fifths = statistics.quantiles(sample, n=5, method="inclusive") if len(sample) > 1 else sample
    return Timing(statistics.median(sample), fifths[0], fifths[-1], mode)
