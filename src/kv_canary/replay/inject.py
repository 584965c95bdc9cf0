"""Faults on purpose: each breaks one step of a replay in a way that the guards must see.

A fault strikes once, at the first step from a seeded one in the middle of the run on that has what
it needs (two requests with tokens, say). Metadata is broken the way engines break it: the tensors
of a good batch of the step are replaced and given to the raw launcher, which is always strict here.
Cells are broken on the device, behind everybody's back.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kv_canary.kinds import PADDING_ROW, UNWRITTEN
from kv_canary.replay.scheduler import FREE, Scheduler, Segments
from kv_canary.replay.trace import Trace
from kv_canary.report import GuardReport
from kv_canary.scatter import launch_scatter_req_token_ids_kernel
from ragged import RaggedBatch

__all__ = ["KINDS", "Injector"]

Int64Array = npt.NDArray[np.int64]

KINDS = {
    "int32-offsets": "offsets are int32, the launcher refuses them",
    "short-offsets": "offsets lack their last entry, the launcher refuses them",
    "bad-row": "a row outside the pool on the device, the kernel skips and reports it",
    "duplicate-row": "two requests share a row, sync refuses them",
    "bad-token": "a token that does not fit int32 on the device, the kernel reports it",
    "flip": "one bit of a pool cell changes behind our back, verification finds it",
    "stale-row": "a recycled row keeps tokens of the request before, verification finds them",
    "lost-token": "a row misses a token, the later ones stand a column early, verification finds it",
    "swapped-rows": "two rows hold each other's tokens, verification finds them",
}

FLIP_BITS = 16  # the flipped bit is one of the lowest, so that the cell still looks like a token


class Injector:
    """One fault of a kind. Each method is called at every step, and acts when its time has come.

    `done` says what was broken, and is None until then.
    """

    def __init__(self, kind: str, trace: Trace, *, seed: int, num_steps: int) -> None:
        if kind not in KINDS:
            raise ValueError(f"inject must be one of {', '.join(KINDS)}, got {kind!r}")
        self._rng = np.random.default_rng(seed)
        self._from_step = int(self._rng.integers(num_steps // 4, 3 * num_steps // 4 + 1))
        self.kind = kind
        self._trace = trace
        self._tenants: dict[int, tuple[int, int]] = {}  # row -> the request before, and the one that has it now
        self.done: str | None = None

    def _due(self, number: int, *kinds: str) -> bool:
        return self.kind in kinds and self.done is None and number >= self._from_step

    def _pick(self, candidates: npt.NDArray[np.int64], count: int = 1) -> list[int]:
        return [int(i) for i in self._rng.choice(candidates, count, replace=False)]

    def not_seen(self) -> str:
        """The line for a run that ended without a finding: the guards are blind, or had no case."""
        if self.done is None:
            return f"inject {self.kind}: NOT injected: no step had what it needs"
        return f"inject {self.kind}: NOT seen, although {self.done}"

    def rows_of(self, number: int, step: Segments) -> Int64Array:
        """The rows to give `sync`; under `duplicate-row` two requests have the same one."""
        with_tokens = np.flatnonzero(step.lengths)
        if not self._due(number, "duplicate-row") or len(with_tokens) < 2:
            return step.rows
        first, second = sorted(self._pick(with_tokens, 2))
        rows = step.rows.copy()
        rows[second] = rows[first]
        self.done = f"request {second} was given row {rows[first]} of request {first}"
        return rows

    def launch(self, number: int, step: Segments, tokens: Int64Array, pool: torch.Tensor, report: GuardReport) -> bool:
        """Scatter a step's tokens, int64 `[num_tokens]`, with a tensor broken; False when it is not time to."""
        with_tokens = np.flatnonzero(step.lengths)
        kinds = ("int32-offsets", "short-offsets", "bad-row", "bad-token")
        if not self._due(number, *kinds) or not len(with_tokens):
            return False
        batch = RaggedBatch.from_lengths(
            tokens, step.lengths, req_pool_indices=step.rows, prefix_lens=step.starts, device=pool.device
        )
        flat_in, offsets, rows = batch.token_ids, batch.offsets, batch.req_pool_indices
        if self.kind == "int32-offsets":
            offsets = offsets.to(torch.int32)
            self.done = "offsets became int32"
        elif self.kind == "short-offsets":
            offsets = offsets[:-1]
            self.done = f"offsets were cut to {len(offsets)} entries"
        elif self.kind == "bad-row":
            [request] = self._pick(with_tokens)
            rows = rows.clone()
            rows[request] = pool.shape[0] + int(self._rng.integers(1000))
            self.done = f"the row of request {request} became {int(rows[request])}"
        else:
            flat_in = flat_in.clone()
            [token] = self._pick(np.arange(batch.num_tokens))
            flat_in[token] = 2**31 + int(self._rng.integers(2**31))
            self.done = f"token {token} of the step became {int(flat_in[token])}"
        launch_scatter_req_token_ids_kernel(
            flat_in=flat_in,
            offsets=offsets,
            req_pool_indices=rows,
            prefix_lens=batch.prefix_lens,
            pool_out=pool,
            report=report,
        )
        return True

    def touch(self, number: int, scheduler: Scheduler, pool: torch.Tensor, verify_at: int) -> None:
        """Change cells of rows that are still in use at the step `verify_at`."""
        live = scheduler.live()
        for row, request in zip(live.rows.tolist(), live.requests.tolist(), strict=True):
            if self._tenants.get(row, (FREE, FREE))[1] != request:
                self._tenants[row] = (self._tenants.get(row, (FREE, FREE))[1], request)
        if not self._due(number, *CELLS):
            return
        stays = scheduler.steps_left(live.rows) >= verify_at - number
        candidates = np.flatnonzero(stays & (live.lengths > 0))
        if len(candidates):
            CELLS[self.kind](self, live, candidates, pool)

    def _flip(self, live: Segments, candidates: Int64Array, pool: torch.Tensor) -> None:
        [piece] = self._pick(candidates)
        row, position = int(live.rows[piece]), int(self._rng.integers(live.lengths[piece]))
        pool[row, position] ^= 1 << int(self._rng.integers(FLIP_BITS))
        self.done = f"a bit of row {row}, position {position} was flipped"

    def _keep_stale(self, live: Segments, candidates: Int64Array, pool: torch.Tensor) -> None:
        for piece in self._rng.permutation(candidates).tolist():
            row, request, length = int(live.rows[piece]), int(live.requests[piece]), int(live.lengths[piece])
            before = self._tenants[row][0]
            if before == FREE:
                continue
            positions = np.arange(min(length, self._trace.context_lens[before] + self._trace.generated_lens[before]))
            old = self._trace.token_ids(before, positions)
            if not np.array_equal(old, self._trace.token_ids(request, positions)):  # a shared prompt is not stale
                pool[row, : len(old)] = torch.from_numpy(old).to(pool)
                self.done = f"row {row} kept {len(old)} tokens of request id {before}"
                return

    def _lose_token(self, live: Segments, candidates: Int64Array, pool: torch.Tensor) -> None:
        [piece] = self._pick(candidates)
        row, length = int(live.rows[piece]), int(live.lengths[piece])
        position = int(self._rng.integers(length))
        pool[row, position : length - 1] = pool[row, position + 1 : length].clone()
        pool[row, length - 1] = UNWRITTEN
        self.done = f"row {row} lost its token at position {position}"

    def _swap_rows(self, live: Segments, candidates: Int64Array, pool: torch.Tensor) -> None:
        [first] = self._pick(live.rows[candidates])
        others = live.rows[candidates] if len(candidates) > 1 else np.arange(PADDING_ROW + 1, len(pool))
        [second] = self._pick(others[others != first])
        longest = int(live.lengths[np.isin(live.rows, [first, second])].max())
        if not torch.equal(pool[first, :longest], pool[second, :longest]):
            pool[[first, second], :longest] = pool[[second, first], :longest]
            self.done = f"rows {first} and {second} were swapped"


CELLS = {
    "flip": Injector._flip,
    "stale-row": Injector._keep_stale,
    "lost-token": Injector._lose_token,
    "swapped-rows": Injector._swap_rows,
}
"""The kinds that change cells, and how."""
