"""The canary beside a replay: a paged KV pool that is only bytes, stamped and verified step by step, and broken.

Pages are taken from a stack and given back, the last freed first, so that a page freed too early is soon somebody
else's.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from kv_canary.canary import KVCanary
from kv_canary.pool import TokenPool
from kv_canary.replay.result import ReplaySettings, Watched
from kv_canary.replay.scheduler import Scheduler, Segments
from kv_canary.stamping import KVSource
from ragged import RaggedBatchBuilder

__all__ = ["PERTURBATIONS", "Watch"]

Int64Array = npt.NDArray[np.int64]

BUDGET = 16_384
"""Slots that a step verifies at the most, where every running request still gets its share."""
KV_WORDS = 2
"""Words of 8 bytes that a slot's KV has here."""


class Watch:
    """KV slots for a replay's tokens, and a canary over them.

    Args:
        pool: the resident pool that stamps are held against.
        settings: ``page_size`` slots a page, page 0 is padding; ``perturb`` and ``seed``.
        num_steps: of the run, to strike in its middle.
    """

    def __init__(self, pool: TokenPool, settings: ReplaySettings, *, num_steps: int) -> None:
        max_reqs, max_context_len = pool.tokens.shape
        device = pool.tokens.device
        page_size = settings.page_size
        pages_a_row = -(-max_context_len // page_size)
        num_pages = 1 + (max_reqs - 1) * pages_a_row
        self.pool, self.page_size = pool, page_size
        self.canary = KVCanary.allocate(num_pages * page_size, device=device, mode="raise", pool=pool)
        self.req_to_token = torch.zeros(max_reqs, max_context_len, dtype=torch.int32, device=device)
        self.kv = torch.zeros(num_pages * page_size, KV_WORDS, dtype=torch.int64, device=device)
        self.free_pages = list(range(num_pages - 1, 0, -1))
        self.pages = np.zeros((max_reqs, pages_a_row), dtype=np.int64)
        self.num_pages = np.zeros(max_reqs, dtype=np.int64)
        self.period = 1
        self.perturb, self.done, self.done_at = settings.perturb, "", 0
        self.taken_early: int | None = None  # a page that was freed too early, until somebody has it
        self.rng = np.random.default_rng(settings.seed)
        self._from_step = int(self.rng.integers(num_steps // 4, num_steps // 2 + 1))
        self._builder = RaggedBatchBuilder(device=device, pool_shape=(max_reqs, max_context_len))
        self._source = (KVSource(self.kv, 8 * KV_WORDS),)

    def take(self, number: int, step: Segments, tokens: Int64Array, scheduler: Scheduler) -> None:
        """Stamp a step's tokens, int64 ``[num_tokens]``, break what is to be broken, and verify.

        Raises: CanaryViolation.
        """
        self._allocate(number, step)
        slots = self._slots(step)
        pieces, positions = step.flat()
        device = self.kv.device
        self._builder.extend(step.rows, np.split(tokens, np.cumsum(step.lengths)[:-1]), prefix_lens=step.starts)
        batch = self._builder.build()
        on_device = torch.from_numpy(slots).to(device)
        self.kv[on_device] = torch.stack([batch.token_ids, batch.positions], 1)
        rows = torch.from_numpy(step.rows[pieces]).to(device)
        self.req_to_token[rows, torch.from_numpy(positions).to(device)] = on_device.to(torch.int32)
        before = np.maximum(step.starts - 1, 0)
        seeds = np.where(step.starts > 0, self._slot_of(step.rows, before), -1)
        self.canary.write(batch, on_device, seed_slots=seeds, kv_sources=self._source)
        self._strike(number, scheduler)
        self.verify(scheduler.live(), budget=BUDGET)

    def verify(self, live: Segments, *, budget: int | None) -> None:
        """Verify what lives, all of it where there is no budget. Raises: CanaryViolation."""
        held = live.lengths > 0
        live = Segments(live.rows[held], live.requests[held], live.starts[held], live.lengths[held])
        budget = None if budget is None else max(budget, len(live))
        self.period = self.canary.verify(
            self.req_to_token,
            live.rows,
            live.lengths,
            budget=budget,
            kv_sources=self._source,
            req_ids=live.requests.tolist(),
        )
        self.canary.step()

    def free(self, rows: Int64Array) -> None:
        """Give back the pages of finished requests."""
        for row in rows.tolist():
            pages = self.pages[row, : self.num_pages[row]].tolist()
            top = len(self.free_pages) - (self.taken_early is not None)  # that page stays the next to be taken
            self.free_pages[top:top] = pages
            self._owned(pages, None)
            self.num_pages[row] = 0

    def overdue(self, number: int) -> bool:
        """Whether a perturbation must have been seen: each position has had its turn, and one to arrive."""
        return bool(self.done) and self.taken_early is None and number - self.done_at > self.period + 2

    def not_seen(self) -> str:
        """The line for a run in which nothing was found."""
        if not self.done:
            return f"perturb {self.perturb}: NOT done: no step had what it needs"
        return f"perturb {self.perturb}: NOT seen, although {self.done}"

    def report(self) -> Watched:
        """The figures. Syncs."""
        perturbed = f"step {self.done_at}: {self.done}" if self.done else None
        return Watched(self.canary.counts(), self.period, perturbed)

    def _allocate(self, number: int, step: Segments) -> None:
        needed = -(-(step.starts + step.lengths) // self.page_size)
        for i in np.flatnonzero(needed > self.num_pages[step.rows]).tolist():
            row, first, last = int(step.rows[i]), int(self.num_pages[step.rows[i]]), int(needed[i])
            pages = [self.free_pages.pop() for _ in range(last - first)]
            self.pages[row, first:last] = pages
            if self.taken_early in pages:
                self.taken_early, self.done_at = None, number
            self._owned(pages, int(step.requests[i]))
            self.num_pages[row] = last

    def _owned(self, pages: list[int], request: int | None) -> None:
        for page in pages:
            self.canary.owns(range(page * self.page_size, (page + 1) * self.page_size), request)

    def _slot_of(self, rows: Int64Array, positions: Int64Array) -> Int64Array:
        at: Int64Array = self.pages[rows, positions // self.page_size] * self.page_size + positions % self.page_size
        return at

    def _slots(self, step: Segments) -> Int64Array:
        pieces, positions = step.flat()
        return self._slot_of(step.rows[pieces], positions)

    def _strike(self, number: int, scheduler: Scheduler) -> None:
        """Break something of the requests that stay the longest, once, as soon as there is something to break."""
        if self.perturb is None or self.done or number < self._from_step:
            return
        live = scheduler.live()
        order = np.argsort(-scheduler.steps_left(live.rows), kind="stable")
        long_enough = order[live.lengths[order] >= 2 * self.page_size]
        if len(long_enough) >= 2:
            victims = [(int(live.rows[i]), int(live.requests[i]), int(live.lengths[i])) for i in long_enough[:2]]
            self.done = PERTURBATIONS[self.perturb](self, victims)
            self.done_at = number


Victims = list[tuple[int, int, int]]
"""Row, request, length."""


def _slot_swap(watch: Watch, victims: Victims) -> str:
    row, request, length = victims[0]
    first, second = sorted(watch.rng.choice(length, 2, replace=False).tolist())
    line = watch.req_to_token[row]
    line[[first, second]] = line[[second, first]]
    return f"slots of positions {first} and {second} of request id {request} were swapped"


def _early_free(watch: Watch, victims: Victims) -> str:
    row, request, _ = victims[0]
    page = int(watch.pages[row, 0])
    watch.free_pages.append(page)
    watch.taken_early = page
    return f"page {page} of request id {request} was freed too early"


def _token_flip(watch: Watch, victims: Victims) -> str:
    row, request, length = victims[0]
    position = int(watch.rng.integers(length))
    watch.pool.tokens[row, position] ^= 1
    return f"a bit of the token at position {position} of request id {request} was flipped"


def _position_shift(watch: Watch, victims: Victims) -> str:
    row, request, length = victims[0]
    line = watch.req_to_token[row]
    line[1:length] = line[: length - 1].clone()
    return f"the slots of request id {request} were shifted by a position"


def _kv_bytes(watch: Watch, victims: Victims) -> str:
    row, request, length = victims[0]
    position = int(watch.rng.integers(length))
    slot = int(watch.req_to_token[row, position])
    watch.kv[slot, 0] ^= 1 << int(watch.rng.integers(62))
    return f"a bit of the KV of position {position} of request id {request} was flipped"


def _page_map(watch: Watch, victims: Victims) -> str:
    (first, request, _), (second, other, _) = victims
    size = watch.page_size
    lines = watch.req_to_token
    lines[first, :size], lines[second, :size] = lines[second, :size].clone(), lines[first, :size].clone()
    return f"the first pages of request ids {request} and {other} were swapped"


PERTURBATIONS: dict[str, Callable[[Watch, Victims], str]] = {
    "slot-swap": _slot_swap,
    "early-free": _early_free,
    "token-flip": _token_flip,
    "position-shift": _position_shift,
    "kv-bytes": _kv_bytes,
    "page-map": _page_map,
}
