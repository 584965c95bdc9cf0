"""Suite step: whole scheduler steps, host time until the call returns and wall time until the device is done."""

from __future__ import annotations

import array
from collections.abc import Callable, Iterator
from itertools import cycle

import attrs
import numpy as np
import torch

from bench.inputs import POISON
from bench.providers import Unavailable, WrongResult
from bench.results import Row
from bench.suites import plain_launch
from bench.suites.base import Settings, Suite
from bench.timing import Call, back_to_back_time, step_time
from kv_canary import GuardReport, launch_scatter_req_token_ids_kernel, scatter
from ragged import RaggedBatch, RaggedBatchBuilder

SPARE = 64
"""Columns of the pool beyond the history, for the decode steps."""


@attrs.frozen
class World:
    """The requests that a step is about: a pool, a history of ``length`` tokens each, and the next token of each."""

    device: torch.device
    tokens: np.ndarray  # int64 [num_reqs, length]
    rows: np.ndarray  # int64 [num_reqs]
    pool: torch.Tensor
    report: GuardReport

    @classmethod
    def make(cls, device: torch.device, num_reqs: int, length: int) -> World:
        rng = np.random.default_rng(0)
        pool = torch.full((num_reqs, length + SPARE), POISON, dtype=torch.int32, device=device)
        tokens = rng.integers(0, 150_000, (num_reqs, length))
        return cls(device, tokens, rng.permutation(num_reqs), pool, GuardReport.allocate(device))

    def parts(self) -> list[array.array[int]]:
        """The history as an engine holds it."""
        return [array.array("q", line.tobytes()) for line in self.tokens]

    def batch(self) -> RaggedBatch:
        return RaggedBatch.from_sequences(self.parts(), req_pool_indices=self.rows, device=self.device)

    def wrong_cells(self, start: int, tokens: np.ndarray) -> int:
        """Cells that are not what writing ``tokens`` [num_reqs, n] at column ``start`` of a poisoned pool leaves."""
        expected = np.full(self.pool.shape, POISON, np.int32)
        expected[self.rows, start : start + tokens.shape[1]] = tokens
        return int((self.pool.cpu().numpy() != expected).sum())


@attrs.frozen
class Step:
    """A step: how its call is made, and its targets in microseconds.

    Attributes:
        decodes: its first call writes the first token of each request right behind the history; else it writes the
            history, at column 0.
        back_to_back: host time of many asynchronous calls, instead of one at a time with the device idle before it.
    """

    name: str
    provider: str
    num_reqs: int
    make: Callable[[World], Call]
    decodes: bool = False
    back_to_back: bool = False
    host_limit: float | None = None
    wall_limit: float | None = None


def decode(world: World) -> Call:
    """One token a request, each time other tokens at the next column: extend, build, scatter with a report."""
    num_reqs, length = world.tokens.shape
    builder = RaggedBatchBuilder(device=world.device)
    steps = cycle(
        [
            (np.ascontiguousarray(world.tokens[:, i : i + 1]), np.full(num_reqs, length + i, np.int64))
            for i in range(min(SPARE, length))
        ]
    )
    rows, pool, report = world.rows, world.pool, world.report

    def call() -> None:
        token_ids, prefix_lens = next(steps)
        builder.extend(rows, token_ids, prefix_lens=prefix_lens)
        scatter(builder.build(), pool, report=report)

    return call


def scatter_alone(world: World) -> Call:
    """A batch that is there already: what a call of scatter costs the host."""
    batch, pool = world.batch(), world.pool
    return lambda: scatter(batch, pool)


def full_batch(world: World) -> Call:
    """Every token of every request, from array.array parts: joined, checked, sent, scattered."""
    builder, parts = RaggedBatchBuilder(device=world.device), world.parts()
    rows, pool, report = world.rows, world.pool, world.report

    def call() -> None:
        builder.extend(rows, parts)
        scatter(builder.build(), pool, report=report)

    return call


def rescatter(world: World) -> Call:
    """A decode step as engines did it: snapshot every history by hand, send three tensors, scatter all of it again."""
    parts, device = [np.frombuffer(part, np.int64) for part in world.parts()], world.device
    lengths = np.array([len(part) for part in parts])
    pinned = device.type == "cuda"
    flat, offsets, rows = (
        torch.empty(size, dtype=torch.int64, pin_memory=pinned)
        for size in (int(lengths.sum()), len(parts) + 1, len(parts))
    )

    def call() -> None:
        np.concatenate(parts, out=flat.numpy())
        offsets[0] = 0
        np.cumsum(lengths, out=offsets.numpy()[1:])
        rows.numpy()[:] = world.rows
        flat_in, ends, row = (each.to(device, non_blocking=True) for each in (flat, offsets, rows))
        launch_scatter_req_token_ids_kernel(flat_in=flat_in, offsets=ends, req_pool_indices=row, pool_out=world.pool)

    return call


def jit_launch(world: World) -> Call:
    """The same kernel by an ordinary Triton JIT launch."""
    return plain_launch.make(world.batch(), world.pool)


STEPS = (
    Step("decode_256", "ours", 256, decode, decodes=True, host_limit=60.0),
    Step("decode_8", "ours", 8, decode, decodes=True, host_limit=45.0),
    Step("scatter_alone_256", "ours", 256, scatter_alone, back_to_back=True, host_limit=12.0),
    Step("scatter_alone_256", "triton_jit", 256, jit_launch, back_to_back=True),
    Step("full_batch_256", "ours", 256, full_batch, wall_limit=1200.0),
    Step("rescatter_256", "rescatter", 256, rescatter),
)
"""Measured one after the other. A step is added by adding an entry."""

LENGTH, QUICK_LENGTH, QUICK_REQS = 8192, 12, 4


def run(settings: Settings) -> Iterator[Row]:
    for step in STEPS:
        if settings.wants(step.provider) and settings.wants_case(step.name):
            yield from _time_step(step, settings)


def _time_step(step: Step, settings: Settings) -> Iterator[Row]:
    quick, device = settings.quick, settings.device
    world = World.make(device, QUICK_REQS if quick else step.num_reqs, QUICK_LENGTH if quick else LENGTH)
    row = Row("step", step.name, step.provider, "host", "quick" if quick else "", *_sizes(step, world))
    row = attrs.evolve(row, limit=step.host_limit if settings.has_targets else None, limit_on="median")
    try:
        call = step.make(world)
        _check(step, world, call)
        if step.back_to_back:
            yield row.timed(back_to_back_time([call], device, quick=quick))
            return
        host, wall = step_time([call], device, repeats=100 if world.tokens.size > 10**6 else 300, quick=quick)
    except Unavailable as reason:
        yield attrs.evolve(row, missing=str(reason))
        return
    yield row.timed(host)
    yield attrs.evolve(row, metric="wall", limit=step.wall_limit if settings.has_targets else None).timed(wall)


def _sizes(step: Step, world: World) -> tuple[int, int]:
    num_reqs, length = world.tokens.shape
    return num_reqs, num_reqs * (1 if step.decodes else length)


def _check(step: Step, world: World, call: Call) -> None:
    """The first call, on a poisoned pool."""
    call()
    length = world.tokens.shape[1]
    wrong = world.wrong_cells(length, world.tokens[:, :1]) if step.decodes else world.wrong_cells(0, world.tokens)
    if wrong or any(world.report.counts().values()):
        raise WrongResult(f"{step.provider}: {step.name}: {wrong} cells are wrong, report {world.report.counts()}")


SUITE = Suite(
    "step",
    "whole scheduler steps: host time until the call returns, wall time with a sync",
    run,
    tuple(dict.fromkeys(step.provider for step in STEPS)),
)
