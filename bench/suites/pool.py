"""Suite pool: what a decode step of the resident pool costs, beside a full re-scatter; and what verification costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import NamedTuple

import attrs
import numpy as np
import torch

from bench.inputs import num_sets
from bench.providers import WrongResult
from bench.results import Row, compare_to
from bench.suites.base import Settings, Suite
from bench.suites.step import LENGTH, QUICK_LENGTH, QUICK_REQS, World, rescatter
from bench.timing import Call, Sample, kernel_time, step_time
from kv_canary import Sent, TokenPool, ViolationLog
from ragged import RaggedBatch, RaggedBatchBuilder
from ragged.header import starts

NUM_REQS, SPARE, REPEATS = 256, 1024, 300
"""Requests, columns of the pool beyond the history, and timed decode steps."""
MOST_BYTES = 10_000.0
"""Target of issue 4: copied in a decode step."""
VERIFY_LIMIT = 1.3
"""Target of issue 4: verification against a reduction over the same bytes."""


class Decode(NamedTuple):
    """A decode step: its call, what the caller does before it, and what must hold after all of them."""

    call: Call
    before: Call
    check: Call
    bytes_copied: Callable[[], int]


def sync(world: World) -> Decode:
    """Python lists of tokens that the requests own; one token is appended to each before the step."""
    pool, lists, numbers = _pool(world), world.tokens.tolist(), count(1000)
    requests = [(row, f"r{row}", tokens) for row, tokens in zip(world.rows.tolist(), lists, strict=True)]
    pool.sync(requests)
    sent = [Sent()]

    def before() -> None:
        token = next(numbers)
        for tokens in lists:
            tokens.append(token)

    def call() -> None:
        sent[0] = pool.sync(requests)

    return Decode(call, before, lambda: pool.verify(requests).raise_if_any(), lambda: sent[0].num_bytes)


def append(world: World) -> Decode:
    """Arrays: the new tokens, the rows, the valid lengths that the scheduler knows."""
    pool, builder, numbers = _pool(world), RaggedBatchBuilder(device=world.device), count(1000)
    pool.write(world.batch())
    num_reqs, length = world.tokens.shape
    steps = [(np.full((num_reqs, 1), 0), np.full(num_reqs, length))]
    batches: list[RaggedBatch] = []

    def before() -> None:
        token = next(numbers)
        steps[0] = np.full((num_reqs, 1), token), np.full(num_reqs, length + token - 1000)

    def call() -> None:
        token_ids, prefix_lens = steps[0]
        builder.extend(world.rows, token_ids, prefix_lens=prefix_lens)
        batch = builder.build()
        pool.append(batch)
        batches[:] = [batch]

    def check() -> None:
        new = np.broadcast_to(np.arange(1000, next(numbers)), (num_reqs, int(pool.host_valid_lens[0]) - length))
        whole = np.concatenate([world.tokens, new], axis=1)
        pool.verify(
            [(row, None, tokens) for row, tokens in zip(world.rows.tolist(), whole, strict=True)]
        ).raise_if_any()

    return Decode(call, before, check, lambda: batches[0].packed.nbytes)


def full(world: World) -> Decode:
    """What engines did: every request's whole history, copied and scattered at every step."""
    num_reqs, length = world.tokens.shape
    return Decode(rescatter(world), lambda: None, lambda: None, lambda: 8 * (num_reqs * length + 2 * num_reqs + 1))


def floor(world: World) -> Decode:
    """What any step pays: a copy of as many bytes as ``append`` sends, the event behind it, one kernel."""
    on_gpu, num_reqs = world.device.type == "cuda", len(world.rows)
    staged = torch.zeros(starts(num_reqs).token_ids + num_reqs, dtype=torch.int64, pin_memory=on_gpu)
    copied, cell = torch.cuda.Event() if on_gpu else None, torch.zeros(1, device=world.device)

    def call() -> None:
        staged.to(world.device, non_blocking=True)
        if copied is not None:
            copied.record()
        cell.add_(1)

    return Decode(call, lambda: None, lambda: None, lambda: staged.nbytes)


@attrs.frozen
class Provider:
    """A way of a decode step, and its target of issue 4 in microseconds of host time."""

    name: str
    make: Callable[[World], Decode]
    host_limit: float | None = None


PROVIDERS = (
    Provider("rescatter", full),
    Provider("sync", sync, 200.0),
    Provider("append", append, 60.0),
    Provider("floor", floor),
)
"""The first is what the others are compared to. A provider is added by adding an entry."""


def run(settings: Settings) -> Iterator[Row]:
    quick, device = settings.quick, settings.device
    num_reqs, length = (QUICK_REQS, QUICK_LENGTH) if quick else (NUM_REQS, LENGTH)
    world = World.make(device, num_reqs, length)
    name = f"decode_{num_reqs}_of_{length}"
    if settings.wants_case(name):
        wanted = [each for each in PROVIDERS if settings.wants(each.name) or each is PROVIDERS[0]]
        rows = [row for each in wanted for row in _time_decode(name, each, world, settings)]
        yield from compare_to([row for row in rows if row.metric == "host"], PROVIDERS[0].name)
        yield from (row for row in rows if row.metric != "host")
    name = f"verify_{num_reqs}_of_{length}"
    if settings.wants_case(name) and settings.wants("verify"):
        yield from compare_to(_time_verify(name, world, settings), "reduction")


def _time_decode(case: str, provider: Provider, world: World, settings: Settings) -> Iterator[Row]:
    decode, limited = provider.make(world), settings.has_targets and provider.host_limit is not None
    host, wall = step_time([decode.call], settings.device, repeats=REPEATS, quick=settings.quick, before=decode.before)
    decode.check()
    row = Row("pool", case, provider.name, "host", "", len(world.rows), len(world.rows), limit_on="median")
    yield attrs.evolve(row, limit=provider.host_limit if limited else None).timed(host)
    yield attrs.evolve(row, metric="wall").timed(wall)
    copied = float(decode.bytes_copied())
    row = attrs.evolve(row, metric="bytes copied", limit=MOST_BYTES if limited else None)
    yield row.timed(Sample(copied, copied, copied, 1))


def _time_verify(case: str, world: World, settings: Settings) -> Iterator[Row]:
    """Against a reduction over the batch's tokens and the pool's cells, which reads as much."""
    num_reqs, length = world.tokens.shape
    number = num_sets(num_reqs * length, num_reqs) if settings.device.type == "cuda" else 2
    pools = [TokenPool.allocate(num_reqs, length, device=settings.device, padding_row=None) for _ in range(number)]
    batches, logs = [world.batch() for _ in pools], [ViolationLog.allocate(settings.device) for _ in pools]
    for pool, batch in zip(pools, batches, strict=True):
        pool.write(batch)
    floors: list[Call] = [_reduce(pool, batch) for pool, batch in zip(pools, batches, strict=True)]
    calls: list[Call] = [_verify(*each) for each in zip(pools, batches, logs, strict=True)]
    row = Row("pool", case, "reduction", "kernel", "", num_reqs, num_reqs * length, num_sets=number)
    yield row.timed(kernel_time(floors, settings.device, quick=settings.quick))
    limit = VERIFY_LIMIT if settings.has_targets else None
    yield attrs.evolve(row, provider="verify", limit=limit).timed(
        kernel_time(calls, settings.device, quick=settings.quick)
    )
    for log in logs:
        log.raise_if_any()
    pools[0].tokens[0, 0] ^= 1
    calls[0]()
    if len(logs[0].drain()) != 1:
        raise WrongResult("verify: a flipped bit was not found")


def _reduce(pool: TokenPool, batch: RaggedBatch) -> Call:
    token_ids, cells = batch.token_ids, pool.tokens
    return lambda: (token_ids.amax(), cells.amax())


def _verify(pool: TokenPool, batch: RaggedBatch, log: ViolationLog) -> Call:
    return lambda: pool.verify(batch, report=log)


def _pool(world: World) -> TokenPool:
    num_reqs, length = world.tokens.shape
    return TokenPool.allocate(num_reqs, length + SPARE, device=world.device, padding_row=None)


SUITE = Suite(
    "pool",
    "a decode step by sync and by append beside a full re-scatter, bytes copied; verification beside a reduction",
    run,
    (*(provider.name for provider in PROVIDERS), "verify"),
)
