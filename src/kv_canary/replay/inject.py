"""Faults on purpose: each breaks one step of a replay in a way that the guards must see.

A fault strikes once, at the first step from a seeded one in the middle of the run on that has what
it needs (two requests with tokens, say). The metadata is broken the way engines break it: the
tensors of a good batch are replaced and given to the raw launcher, which is always strict here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kv_canary.replay.scheduler import Scheduler, Segments
from kv_canary.report import GuardReport
from kv_canary.scatter import launch_scatter_req_token_ids_kernel
from ragged import RaggedBatch

__all__ = ["KINDS", "Injector"]

Int64Array = npt.NDArray[np.int64]

KINDS = {
    "int32-offsets": "offsets are int32, the launcher refuses them",
    "short-offsets": "offsets lack their last entry, the launcher refuses them",
    "bad-row": "a row outside the pool on the device, the kernel skips and reports it",
    "duplicate-row": "two requests share a row, the builder refuses them",
    "bad-token": "a token that does not fit int32 on the device, the kernel reports it",
    "flip": "one bit of a pool cell changes behind our back, verification finds it",
}

FLIP_BITS = 16  # the flipped bit is one of the lowest, so that the cell still looks like a token


class Injector:
    """One fault of a kind. Each method is called at every step, and acts when its time has come.

    `done` says what was broken, and is None until then.
    """

    def __init__(self, kind: str, *, seed: int, num_steps: int) -> None:
        if kind not in KINDS:
            raise ValueError(f"inject must be one of {', '.join(KINDS)}, got {kind!r}")
        self._rng = np.random.default_rng(seed)
        self._from_step = int(self._rng.integers(num_steps // 4, 3 * num_steps // 4 + 1))
        self.kind = kind
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
        """The rows to give the builder; under `duplicate-row` two requests have the same one."""
        with_tokens = np.flatnonzero(step.lengths)
        if not self._due(number, "duplicate-row") or len(with_tokens) < 2:
            return step.rows
        first, second = sorted(self._pick(with_tokens, 2))
        rows = step.rows.copy()
        rows[second] = rows[first]
        self.done = f"request {second} was given row {rows[first]} of request {first}"
        return rows

    def launch(self, number: int, batch: RaggedBatch, pool: torch.Tensor, report: GuardReport) -> bool:
        """Scatter the batch with one of its tensors broken; False when it is not time to."""
        with_tokens = np.flatnonzero(batch.layout.lengths)
        kinds = ("int32-offsets", "short-offsets", "bad-row", "bad-token")
        if not self._due(number, *kinds) or not len(with_tokens):
            return False
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
        """Under `flip`, change a cell of a row that is still in use at the step `verify_at`."""
        if not self._due(number, "flip"):
            return
        live = scheduler.live()
        stays = scheduler.steps_left(live.rows) >= verify_at - number
        candidates = np.flatnonzero(stays & (live.lengths > 0))
        if not len(candidates):
            return
        [piece] = self._pick(candidates)
        row, position = int(live.rows[piece]), int(self._rng.integers(live.lengths[piece]))
        pool[row, position] ^= 1 << int(self._rng.integers(FLIP_BITS))
        self.done = f"a bit of row {row}, position {position} was flipped"
