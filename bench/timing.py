"""How long a call takes, on the device and on the host. README.md says why each is measured this way."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter_ns

import attrs
import numpy as np
import torch

Call = Callable[[], object]

REPLAYS = 60
"""Timed replays of a graph."""
LAUNCHES, GRAPH_US = 24, 400.0
"""Calls that a graph has at least, and how long it takes at least: starting it costs a few microseconds, which would
draw the ratio of two short kernels towards 1."""
BACK_TO_BACK = 50
"""Calls between syncs: far fewer than the queue of a stream holds, so that none waits for the device."""

SECONDS, FEWEST = 4.0, 5
"""A host measurement that has taken so long ends, once it has FEWEST samples: for slow calls, most of all on a CPU."""


@attrs.frozen
class Sample:
    """Microseconds a call: median, 10th and 90th percentile of ``repeats`` measurements."""

    median: float
    p10: float
    p90: float
    repeats: int

    @classmethod
    def from_times(cls, microseconds: Sequence[float]) -> Sample:
        p10, median, p90 = np.percentile(microseconds, (10, 50, 90)).tolist()
        return cls(median, p10, p90, len(microseconds))


def kernel_time(calls: Sequence[Call], device: torch.device, *, graph: bool = True, quick: bool = False) -> Sample:
    """Device time a call, over ``calls``, which are one provider's on each input set in turn.

    Args:
        graph: replay a CUDA graph; else each call between two events, for what cannot be captured.
    """
    if device.type != "cuda":
        return cpu_time(calls, quick=quick)
    return _graph_time(calls, device, quick) if graph else _event_time(calls, device, quick)


def cpu_time(calls: Sequence[Call], *, quick: bool = False) -> Sample:
    """Wall time a call, for a CPU."""
    for call in calls:
        call()
    times = []
    with _no_collection():
        for repeat in _within_budget(5 if quick else 50):
            begin = perf_counter_ns()
            calls[repeat % len(calls)]()
            times.append((perf_counter_ns() - begin) / 1e3)
    return Sample.from_times(times)


def _graph_time(calls: Sequence[Call], device: torch.device, quick: bool) -> Sample:
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:
                call()  # compiles, and allocates what is allocated once
        torch.cuda.synchronize()
        rounds = -(-LAUNCHES // len(calls))
        graph = _capture(calls, rounds)
        graph.replay()
        longer = int(GRAPH_US / _between_events(graph.replay)) + 1
        if longer > 1:
            graph.reset()
            rounds *= longer
            graph = _capture(calls, rounds)
        for _ in range(3):
            graph.replay()
        times = [_between_events(graph.replay) / (rounds * len(calls)) for _ in range(5 if quick else REPLAYS)]
        graph.reset()
    return Sample.from_times(times)


def _capture(calls: Sequence[Call], rounds: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    return graph


def _event_time(calls: Sequence[Call], device: torch.device, quick: bool) -> Sample:
    with torch.cuda.device(device):
        for call in calls:
            call()
        torch.cuda.synchronize()
        return Sample.from_times([_between_events(calls[i % len(calls)]) for i in range(5 if quick else REPLAYS)])


def _between_events(call: Call) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def back_to_back_time(calls: Sequence[Call], device: torch.device, *, quick: bool = False) -> Sample:
    """Host time an asynchronous call; the device is waited for outside the timed part."""
    repeats, count = (3, 5) if quick else (60, BACK_TO_BACK if device.type == "cuda" else 1)
    for call in calls:
        call()
    times = []
    with _no_collection():
        for _ in _within_budget(repeats):
            synchronize(device)
            begin = perf_counter_ns()
            for index in range(count):
                calls[index % len(calls)]()
            times.append((perf_counter_ns() - begin) / 1e3 / count)
    synchronize(device)
    return Sample.from_times(times)


def step_time(
    calls: Sequence[Call],
    device: torch.device,
    *,
    repeats: int = 200,
    quick: bool = False,
    before: Call = lambda: None,
) -> tuple[Sample, Sample]:
    """Host time until a call returns, and wall time until the device is done; the device is idle before each.

    ``before`` is what the caller of a step does anyway: run each time, and not timed.
    """
    for index in range(2 if quick else 10):
        before()
        calls[index % len(calls)]()
    host, wall = [], []
    with _no_collection():
        for index in _within_budget(5 if quick else repeats):
            before()
            synchronize(device)
            begin = perf_counter_ns()
            calls[index % len(calls)]()
            returned = perf_counter_ns()
            synchronize(device)
            wall.append((perf_counter_ns() - begin) / 1e3)
            host.append((returned - begin) / 1e3)
    return Sample.from_times(host), Sample.from_times(wall)


def _within_budget(repeats: int) -> Iterator[int]:
    begin = perf_counter_ns()
    for repeat in range(repeats):
        if repeat >= FEWEST and perf_counter_ns() - begin > SECONDS * 1e9:
            return
        yield repeat


def synchronize(device: torch.device) -> None:
    """Wait for the device; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python's collector, run before and not in between: it would be counted as the provider's time."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
