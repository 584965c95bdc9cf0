"""A canary that is broken on purpose, in every way, on a small KV pool: does it see?"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

from kv_canary.canary import KVCanary
from kv_canary.pool import TokenPool
from kv_canary.stamping import KVSource
from ragged import RaggedBatchBuilder
from ragged.staging import resolve_device

NUM_REQS, LENGTH, STEPS = 5, 40, 6
NUM_SLOTS, BYTES = 512, 64


@attrs.frozen
class Trial:
    """One perturbation, and what the canary said of it.

    Attributes:
        name: ``"clean"`` or the perturbation.
        found: violations.
        reasons: their reasons, in order.
        first: the first one, in words; empty where there was none.
        passed: a clean run found nothing, any other one what it had to.
    """

    name: str
    found: int
    reasons: tuple[str, ...]
    first: str
    passed: bool


@attrs.define
class Engine:
    """What an engine has: a KV pool, its page table, the tokens that it thinks are there."""

    canary: KVCanary
    pool: TokenPool
    req_to_token: torch.Tensor
    kv: torch.Tensor
    lens: list[int]

    @property
    def rows(self) -> list[int]:
        return list(range(1, NUM_REQS + 1))

    @property
    def sources(self) -> tuple[KVSource, ...]:
        return (KVSource(self.kv, BYTES),)


def _slot_swap(engine: Engine) -> None:
    line = engine.req_to_token[2]
    line[3], line[4] = int(line[4]), int(line[3])


def _early_free(engine: Engine) -> None:
    taken = int(engine.req_to_token[1, 5])
    engine.canary.owns([taken], None)
    engine.canary.owns([taken], "another")
    builder = RaggedBatchBuilder(device=engine.kv.device)
    builder.add(6, [999])
    engine.canary.write(builder.build(), [taken], kv_sources=engine.sources)


def _token_flip(engine: Engine) -> None:
    engine.pool.tokens[3, 7] ^= 1


def _position_shift(engine: Engine) -> None:
    line = engine.req_to_token[4]
    line[1 : LENGTH - 1] = line[: LENGTH - 2].clone()


def _kv_bytes(engine: Engine) -> None:
    engine.kv[int(engine.req_to_token[5, 11]), 9] ^= 4


def _page_map(engine: Engine) -> None:
    engine.req_to_token[2, 8:16], engine.req_to_token[3, 8:16] = (
        engine.req_to_token[3, 8:16].clone(),
        engine.req_to_token[2, 8:16].clone(),
    )


PERTURBATIONS: dict[str, tuple[Callable[[Engine], None], str]] = {
    "slot-swap": (_slot_swap, "position"),
    "early-free": (_early_free, "position"),
    "token-flip": (_token_flip, "token"),
    "position-shift": (_position_shift, "position"),
    "kv-bytes": (_kv_bytes, "kv"),
    "page-map": (_page_map, "chain"),
}
"""What is done, and a reason that must be among those given."""


def selftest(device: torch.device | str) -> list[Trial]:
    """Run a small engine once clean and once for each perturbation, on ``device``. Takes about a second; syncs."""
    perturbations: dict[str, tuple[Callable[[Engine], None] | None, str]] = {"clean": (None, ""), **PERTURBATIONS}
    return [_trial(name, perturb, reason, resolve_device(device)) for name, (perturb, reason) in perturbations.items()]


def _trial(name: str, perturb: Callable[[Engine], None] | None, reason: str, device: torch.device) -> Trial:
    engine = _prepare(device)
    if perturb is not None:
        perturb(engine)
    engine.canary.verify(
        engine.req_to_token,
        engine.rows,
        engine.lens,
        kv_sources=engine.sources,
        req_ids=[f"request-{row}" for row in engine.rows],
    )
    violations = engine.canary.log.drain()
    reasons = tuple(dict.fromkeys(word for violation in violations for word in violation.reasons))
    alive = engine.canary.health().is_alive
    passed = alive and (reason in reasons if perturb is not None else not violations)
    return Trial(name, engine.canary.log.found, reasons, str(violations[0]) if violations else "", passed)


def _prepare(device: torch.device) -> Engine:
    """Requests prefilled and decoded for a few steps, their slots scattered."""
    pool = TokenPool.allocate(NUM_REQS + 2, LENGTH + 8, device=device)
    random = torch.Generator().manual_seed(0)
    kv = torch.randint(0, 256, (NUM_SLOTS, BYTES), dtype=torch.uint8, generator=random).to(device)
    slots = (torch.randperm(NUM_SLOTS - 1, generator=random) + 1).tolist()
    req_to_token = torch.zeros(NUM_REQS + 2, LENGTH + 8, dtype=torch.int32, device=device)
    engine = Engine(KVCanary.allocate(NUM_SLOTS, device=device, pool=pool), pool, req_to_token, kv, [0] * NUM_REQS)
    builder, last = RaggedBatchBuilder(device=device), [-1] * NUM_REQS
    for step in range(STEPS):
        lengths = [LENGTH - STEPS + 1 if step == 0 else 1] * NUM_REQS
        taken = [[slots.pop() for _ in range(length)] for length in lengths]
        tokens = [
            [1000 * row + done + i for i in range(n)]
            for row, done, n in zip(engine.rows, engine.lens, lengths, strict=True)
        ]
        builder.extend(engine.rows, tokens, prefix_lens=engine.lens)
        batch = builder.build()
        pool.append(batch)
        for row, done, own in zip(engine.rows, engine.lens, taken, strict=True):
            req_to_token[row, done : done + len(own)] = torch.tensor(own, dtype=torch.int32)
            engine.canary.owns(own, f"request-{row}")
        flat = [slot for own in taken for slot in own]
        engine.canary.write(batch, flat, seed_slots=last, kv_sources=engine.sources)
        last = [own[-1] for own in taken]
        engine.lens = [done + length for done, length in zip(engine.lens, lengths, strict=True)]
        engine.canary.step()
    return engine
