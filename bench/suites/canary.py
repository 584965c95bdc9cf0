"""Suite canary: what it costs to stamp KV slots, to verify them, and to hash their bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import attrs
import numpy as np
import torch

from bench.providers import WrongResult
from bench.results import Row, compare_to
from bench.suites.base import Settings, Suite
from bench.timing import Call, kernel_time, step_time
from kv_canary import KVCanary, KVSource, backends
from kv_canary.kinds import STAMP_FIELDS
from kv_canary.stamping import turns_of
from ragged import RaggedBatch

SETS = 4
"""Canaries that take turns: of 2 million slots each has 64 MiB of stamps, more than an H200's L2."""
STEPS = 200
BUDGET, STEP_DEVICE_US, STEP_HOST_US = 65_536, 20.0, 60.0
"""Targets of issue 6 for a decode step of 256 requests, write and verify together."""
COPY_SHARE = 1 / 0.8
"""Target of issue 6: bytes are hashed at 80% of the copy's bandwidth; a copy also writes them."""


class Shape(NamedTuple):
    """A prefill: requests of equal length, and the targets of issue 6 in microseconds of device time."""

    num_reqs: int
    length: int
    write_us: float | None = None
    verify_us: float | None = None


SHAPES = {
    "1_of_131072": Shape(1, 131_072, 12.0),
    "256_of_8192": Shape(256, 8192, None, 60.0),
    "4096_of_1": Shape(4096, 1, 4.0),
}
QUICK = {"2_of_40": Shape(2, 40)}


class World:
    """Requests whose slots are scattered at random over a KV pool, stamped."""

    def __init__(self, shape: Shape, device: torch.device, seed: int, spare: int = 1) -> None:
        random = np.random.default_rng(seed)
        self.rows = random.permutation(shape.num_reqs)
        self.lens = np.full(shape.num_reqs, shape.length)
        total = shape.num_reqs * shape.length
        self.num_slots = total + shape.num_reqs * spare + 1
        slots = 1 + random.permutation(self.num_slots - 1)
        self.slots = torch.from_numpy(slots[:total]).to(device)
        self.fresh = torch.from_numpy(slots[total : total + shape.num_reqs]).to(device)
        self.canary = KVCanary.allocate(self.num_slots, device=device)
        tokens = random.integers(0, 150_000, (shape.num_reqs, shape.length))
        self.batch = RaggedBatch.from_sequences(tokens, req_pool_indices=self.rows, device=device)
        self.table = torch.zeros(shape.num_reqs, shape.length + spare, dtype=torch.int32, device=device)
        own = self.slots.view(shape.num_reqs, shape.length).to(torch.int32)
        self.table[torch.from_numpy(self.rows).to(device), : shape.length] = own
        self.at_rows, self.at_lens = torch.from_numpy(self.rows).to(device), torch.from_numpy(self.lens).to(device)
        self.write()

    def write(self) -> None:
        self.canary.write(self.batch, self.slots)

    def verify(self) -> None:
        self.canary.verify(self.table, self.at_rows, self.at_lens)

    def check(self) -> None:
        """Clean, and a flipped bit is found."""
        self.canary.log.raise_if_any()
        self.canary.stamps[int(self.slots[-1]), 2] ^= 1
        self.verify()
        if len(self.canary.log.drain()) != 1:
            raise WrongResult("verify: a flipped bit was not found")


def run(settings: Settings) -> Iterator[Row]:
    for name, shape in (QUICK if settings.quick else SHAPES).items():
        if settings.wants_case(name):
            yield from _time_shape(name, shape, settings)
    name = f"decode_step_budget_{BUDGET}"
    if settings.wants_case(name) and settings.wants("canary"):
        yield from _time_step(name, settings)
    if settings.wants_case("kv_bytes") and settings.wants("canary"):
        yield from _time_hash(settings)


def _time_shape(case: str, shape: Shape, settings: Settings) -> Iterator[Row]:
    """``write`` and ``verify``, against an ``index_copy_`` of as many stamps of 32 bytes."""
    device, quick, targets = settings.device, settings.quick, settings.has_targets
    worlds = [World(shape, device, seed) for seed in range(2 if quick else SETS)]
    row = Row("canary", case, "", "", "", shape.num_reqs, shape.num_reqs * shape.length, num_sets=len(worlds))

    def timed(provider: str, metric: str, calls: list[Call], limit: float | None) -> Row:
        limited = limit if targets else None
        named = attrs.evolve(row, provider=provider, metric=metric, limit=limited, limit_on="median")
        return named.timed(kernel_time(calls, device, quick=quick))

    copies: list[Call] = [_index_copy(world) for world in worlds]
    yield from compare_to(
        [
            timed("index_copy", "write", copies, None),
            timed("canary", "write", [world.write for world in worlds], shape.write_us),
        ],
        "index_copy",
    )
    yield timed("canary", "verify", [world.verify for world in worlds], shape.verify_us)
    worlds[0].check()


def _index_copy(world: World) -> Call:
    stamps = torch.empty_like(world.canary.stamps)
    values = torch.zeros(len(world.slots), STAMP_FIELDS, dtype=torch.int64, device=stamps.device)
    return lambda: stamps.index_copy_(0, world.slots, values)


def _time_step(case: str, settings: Settings) -> Iterator[Row]:
    """One token a request written and a share of everything verified; host time by arrays of the host."""
    shape = Shape(8, 40) if settings.quick else Shape(256, 8192)
    world, device = World(shape, settings.device, 0), settings.device
    seeds = world.table[world.at_rows, shape.length - 1].to(torch.int64)
    tokens = np.full((shape.num_reqs, 1), 7)
    batch = RaggedBatch.from_sequences(tokens, req_pool_indices=world.rows, prefix_lens=world.lens, device=device)
    world.table[world.at_rows, shape.length] = world.fresh.to(torch.int32)
    lens = world.lens + 1
    at_lens = torch.from_numpy(lens).to(device)

    def on_host() -> None:
        world.canary.write(batch, world.fresh, seed_slots=seeds)
        world.canary.verify(world.table, world.rows, lens, budget=BUDGET)

    def on_device() -> None:
        world.canary.write(batch, world.fresh, seed_slots=seeds)
        world.canary.verify(world.table, world.at_rows, at_lens, budget=BUDGET)

    row = Row("canary", case, "canary", "kernel", "", shape.num_reqs, shape.num_reqs, limit_on="median")
    targets = settings.has_targets
    yield attrs.evolve(row, limit=STEP_DEVICE_US if targets else None).timed(
        kernel_time([on_device], device, quick=settings.quick)
    )
    host, wall = step_time([on_host], device, repeats=STEPS, quick=settings.quick)
    yield attrs.evolve(row, metric="host", limit=STEP_HOST_US if targets else None).timed(host)
    yield attrs.evolve(row, metric="wall").timed(wall)
    world.canary.log.raise_if_any()


def _time_hash(settings: Settings) -> Iterator[Row]:
    """A sweep of slots of 1 KiB each with their KV bytes, against a copy of those bytes."""
    count, size = (16, 64) if settings.quick else (131_072, 1024)
    device = settings.device
    kv = torch.randint(0, 2**62, (count + 1, size // 8), dtype=torch.int64, device=device)
    turns = turns_of([KVSource(kv, size)], None, count + 1, device)
    slots = torch.arange(1, count + 1, dtype=torch.int64, device=device)
    hashes, into = backends.resolve("auto", device, "stamps").hash_kv, torch.empty_like(kv)
    calls: dict[str, list[Call]] = {
        "copy": [lambda: into.copy_(kv)],
        "canary": [lambda: hashes(slots, count + 1, turns)],
    }
    row = Row("canary", "kv_bytes", "", "kernel", "", 1, count)
    limit = COPY_SHARE if settings.has_targets else None
    yield from compare_to(
        [
            attrs.evolve(row, provider=name, limit=limit if name == "canary" else None).timed(
                kernel_time(timed, device, quick=settings.quick)
            )
            for name, timed in calls.items()
        ],
        "copy",
    )


SUITE = Suite(
    "canary", "stamping KV slots beside an index_copy_ of as many, verifying and hashing them", run, ("canary",)
)
