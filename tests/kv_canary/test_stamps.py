"""Stamps by every backend, held to the serial walk of the reference: written, hashed, verified, swept."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_canary import backends, kinds, stamps_reference
from kv_canary.stamping import Checks, KVSource, Memory, Pooled, Turn, turns_of
from ragged import RaggedBatch

POISON = -7
CAPACITY = 300
WIDTH = 12
MAX_REQS = 6
TINY: dict[str, Any] = {
    "BLOCK": 8,
    "TURNS": 2,
    "MANY": 20,
    "WINDOW": 4,
    "PLAN_BLOCK": 4,
    "KV_TOKENS": 2,
    "KV_TURNS": 1,
    "SHAPES": ((1, 4, 1), (2, 2, 2)),
    "LONG": 4,
    "TILE": 4,
}


class Side:
    """A canary's memory on one device, its stamps in the middle of poison."""

    def __init__(self, num_slots: int, device: str) -> None:
        self.whole = torch.full((num_slots + 4, kinds.STAMP_FIELDS), POISON, dtype=torch.int64, device=device)
        self.whole[2:-2] = -1
        log = torch.zeros(1 + CAPACITY, kinds.STAMP_COLUMNS, dtype=torch.int64, device=device)
        state = torch.zeros(2 + kinds.PHASES, dtype=torch.int64, device=device)
        counters = torch.zeros(kinds.COUNTER_LINES, kinds.COUNTERS, dtype=torch.int64, device=device)
        self.memory = Memory(self.whole[2:-2], log, state, counters)

    def told(self) -> tuple[Any, ...]:
        """All that a backend leaves behind; the order of entries is nobody's promise."""
        memory = self.memory
        count = int(memory.log[0, kinds.FOUND_COUNT])
        lines = memory.log[1 : 1 + min(count, CAPACITY)].tolist()
        entries = sorted(line[: kinds.ENTRY_INDEX] + line[kinds.ENTRY_INDEX + 1 :] for line in lines)
        seen = memory.state[kinds.STATE_CALLS :][: 1 + WIDTH].tolist()  # beyond it phases repeat
        return self.whole.tolist(), memory.counters.sum(0).tolist(), seen, count, entries


@contextmanager
def run_of(target: Any) -> Iterator[Any]:
    """The backend's module, its tiles shrunk for a tiny target."""
    module = backends.resolve(target.backend, torch.device(target.device), "stamps")
    with target.tiles(), pytest.MonkeyPatch.context() as patch:
        for name, value in TINY.items() if target.tiny else ():
            patch.setattr(module, name, value)
        yield module


SLOTS = st.integers(-1, 31) | st.sampled_from([-1, 0, -2, 32, 2**40, -(2**63)])
TOKENS = st.integers(0, 9) | st.sampled_from([-1, 2**31 - 1, 2**40, 2**62])


@st.composite
def steps(draw: st.DrawFn) -> dict[str, Any]:
    """A batch with slots, seeds and an oracle, some of them wrong."""
    lengths = draw(st.lists(st.integers(0, 4) | st.integers(0, WIDTH), min_size=1, max_size=5))
    total = sum(lengths)
    fresh = draw(st.permutations(range(1, 32)))[:total]
    fresh += [-1] * (total - len(fresh))
    slots = [slot if draw(st.integers(0, 9)) else draw(st.sampled_from([-1, 0, -2, 32, 2**40])) for slot in fresh]
    tokens = draw(st.lists(TOKENS, min_size=total, max_size=total))
    seeds = draw(st.none() | st.lists(SLOTS, min_size=len(lengths), max_size=len(lengths)))
    return {
        "lengths": lengths,
        "rows": draw(st.permutations(range(MAX_REQS)))[: len(lengths)],
        "prefix_lens": draw(st.lists(st.integers(0, 5), min_size=len(lengths), max_size=len(lengths))),
        "tokens": tokens,
        "slots": slots,
        # The stamp of a seed is of an earlier call.
        "seeds": None if seeds is None else [-1 if seed in slots else seed for seed in seeds],
        "expected": draw(st.none() | st.just(tokens) | st.lists(TOKENS, min_size=total, max_size=total)),
    }


def turns_over(kv: torch.Tensor, number: int, rotation: int | None) -> tuple[Turn, ...]:
    made = (
        KVSource(kv, 16),
        KVSource(kv.view(torch.bfloat16)[4:], 24, page_size=4, page_stride=104, leading_bytes=16),
    )
    return turns_of(made[:number], rotation, 32, kv.device)


@st.composite
def tables(draw: st.DrawFn) -> dict[str, Any]:
    """A page table, requests and a pool, some of them wrong."""
    cell = SLOTS.filter(lambda slot: abs(slot) < 2**31)
    num_reqs = draw(st.integers(1, 5))
    some = {"min_size": num_reqs, "max_size": num_reqs}
    line = st.lists(cell, min_size=WIDTH, max_size=WIDTH)
    return {
        "table": torch.tensor(draw(st.lists(line, min_size=MAX_REQS, max_size=MAX_REQS))).to(
            draw(st.sampled_from([torch.int32, torch.int64]))
        ),
        "rows": torch.tensor(
            draw(st.lists(st.integers(0, MAX_REQS - 1) | st.sampled_from([-1, MAX_REQS, 2**40]), **some))
        ),
        "lens": torch.tensor(draw(st.lists(st.integers(0, WIDTH) | st.sampled_from([-1, WIDTH + 1, 2**40]), **some))),
        "window": draw(st.sampled_from([1 << 62, 1, 3])),
        "period": draw(st.sampled_from([1, 2, 4])),
        "cells": torch.tensor(draw(st.lists(st.integers(-1, 9), min_size=45, max_size=45)), dtype=torch.int32),
        "valid": torch.tensor(draw(st.lists(st.integers(-3, 20), min_size=5, max_size=5))),
        "pooled": draw(st.booleans()),
    }


def checks_of(drawn: dict[str, Any], device: str) -> tuple[Checks, Pooled | None]:
    """What a backend takes; the host knows the lengths."""
    lens, window, period = drawn["lens"], drawn["window"], drawn["period"]
    most = sum(-(-min(max(length, 0), window, WIDTH) // period) for length in lens.tolist())
    table, rows, at_lens = (drawn[name].to(device) for name in ("table", "rows", "lens"))
    pool = Pooled(drawn["cells"].reshape(5, 9).to(device), drawn["valid"].to(device)) if drawn["pooled"] else None
    return Checks(table, rows, at_lens, window, period, most), pool


def write_both(target: Any, run: Any, step: dict[str, Any], turns: Any, sides: Any, launch: int) -> None:
    """The same step by a backend and by the reference."""
    for side, device, module, own in zip(sides, (target.device, "cpu"), (run, stamps_reference), turns, strict=True):
        side.memory.state[kinds.STATE_STEP] = launch
        if not step["tokens"]:
            continue
        batch = RaggedBatch.from_lengths(
            step["tokens"],
            step["lengths"],
            req_pool_indices=step["rows"],
            prefix_lens=step["prefix_lens"],
            allow_placeholders=True,
            wide_tokens="opaque",
            device=device,
        )
        slots, seeds, expected = (
            None if step[name] is None else torch.tensor(step[name], dtype=torch.int64, device=device)
            for name in ("slots", "seeds", "expected")
        )
        hashes = module.hash_kv(slots, 32, own) if own else None
        module.write(batch, slots, seeds, hashes, expected, side.memory, launch)


@settings(max_examples=25)  # each writes, checks in every phase, and sweeps
@given(
    written=st.lists(steps(), min_size=1, max_size=3),
    checked=tables(),
    triples=st.lists(st.tuples(SLOTS, SLOTS, st.integers(0, 5)), min_size=1, max_size=20),
    num_sources=st.integers(0, 2),
    rotation=st.none() | st.just(1),
)
def test_every_backend_does_what_the_serial_walk_does(
    target: Any,
    written: list[dict[str, Any]],
    checked: dict[str, Any],
    triples: Any,
    num_sources: int,
    rotation: int | None,
) -> None:
    ours, oracle = Side(32, target.device), Side(32, "cpu")
    kv = torch.arange(32 * 32, dtype=torch.int64).mul(37).remainder(251).to(torch.uint8)
    turns = turns_over(kv.to(target.device), num_sources, rotation), turns_over(kv, num_sources, rotation)
    with run_of(target) as run:
        for launch, step in enumerate(written, 1):
            write_both(target, run, step, turns, (ours, oracle), launch)
            assert ours.told() == oracle.told()
        for launch in range(10, 10 + checked["period"]):  # every phase
            run.check(*checks_of(checked, target.device), turns[0], ours.memory, launch)
            stamps_reference.check(*checks_of(checked, "cpu"), turns[1], oracle.memory, launch)
            assert ours.told() == oracle.told()
        run.sweep(torch.tensor(triples, device=target.device), turns[0], ours.memory, 20)
        stamps_reference.sweep(torch.tensor(triples), turns[1], oracle.memory, 20)
        assert ours.told() == oracle.told()


@pytest.mark.parametrize("length", [1, 1023, 1024, 1025, 5000])
def test_a_long_request_is_stamped_in_parallel_as_in_a_walk(target: Any, length: int) -> None:
    length = length // 50 if target.tiny else length  # as many tiles, and the interpreter is slow
    tokens = torch.arange(length, dtype=torch.int64).mul(7919).remainder(50_000)
    step = {
        "lengths": [3, length, 0, 2],
        "rows": [1, 2, 3, 4],
        "prefix_lens": [0, 5, 0, 0],
        "tokens": [1, 2, 3, *tokens.tolist(), 8, 9],
        "slots": (torch.randperm(length + 5) + 1).tolist(),
        "seeds": None,
        "expected": None,
    }
    ours, oracle = Side(length + 6, target.device), Side(length + 6, "cpu")
    with run_of(target) as run:
        write_both(target, run, step, ((), ()), (ours, oracle), 1)
    assert torch.equal(ours.whole.cpu(), oracle.whole)


@pytest.mark.parametrize(("found", "freed"), [(-5, 0), (-(2**63), 2), (2**63 - 1, 2**62), (3, 2**63 - 1)])
def test_a_header_that_was_overwritten_leads_nowhere_outside_the_ring(target: Any, found: int, freed: int) -> None:
    side = Side(16, target.device)
    memory = torch.full((3 + 1 + 4 + 3, kinds.STAMP_COLUMNS), -9, dtype=torch.int64, device=target.device)
    log = memory[3:-3].zero_()
    log[0, kinds.FOUND_COUNT], log[0, kinds.FREED] = found, freed
    batch = target.batch([range(10)], [1])
    with run_of(target) as run:
        slots = target.ints([99] * 10)  # each outside, each a violation
        run.write(batch, slots, None, None, None, side.memory._replace(log=log), 1)
    assert bool((memory[:3] == -9).all()) and bool((memory[-3:] == -9).all())
    assert not bool(log[0, kinds.FREED + 1 :].any())
