"""A small continuous-batching scheduler: which tokens of which request go to which row, and when.

It replays as fast as the device takes steps: requests come in the order of the trace, its clock is
not waited for. It knows lengths only; what the tokens are, the trace says. Arrays over pool rows
hold its state, so a step costs the same few numpy calls for one running request and for thousands;
Python runs per request only where a request is admitted or prefilled.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise

import attrs
import numpy as np
import numpy.typing as npt

from kv_canary.kinds import PADDING_ROW
from kv_canary.replay.trace import Trace

__all__ = ["Scheduler", "Segments", "count_steps"]

Int64Array = npt.NDArray[np.int64]

FREE = -1  # the request of a row that has none


@attrs.frozen(eq=False)
class Segments:
    """A piece of some requests: `lengths[i]` tokens of `requests[i]` from position `starts[i]`.

    They belong in row `rows[i]` of the pool, at the same positions. All four are int64
    `[num_reqs]`. In a step the first `num_decodes` are decodes, of one token each, and the rest are
    chunks of prefill.
    """

    rows: Int64Array
    requests: Int64Array
    starts: Int64Array
    lengths: Int64Array
    num_decodes: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """Tokens of all pieces together."""
        return int(self.lengths.sum())

    def flat(self) -> tuple[Int64Array, Int64Array]:
        """Which piece each token belongs to, and its position there; both int64 `[num_tokens]`."""
        pieces = np.repeat(np.arange(len(self)), self.lengths)
        shift = self.starts - (np.cumsum(self.lengths, dtype=np.int64) - self.lengths)
        return pieces, np.arange(len(pieces), dtype=np.int64) + shift[pieces]

    def split(self, max_tokens: int) -> list[Segments]:
        """Runs of whole pieces: those that start in the first `max_tokens` tokens, and so on.

        A run is thus at most one piece longer than `max_tokens`.
        """
        first_tokens = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
        cuts = np.flatnonzero(np.diff(first_tokens // max_tokens)) + 1
        bounds = pairwise([0, *cuts.tolist(), len(self)])
        return [
            Segments(
                rows=self.rows[a:b],
                requests=self.requests[a:b],
                starts=self.starts[a:b],
                lengths=self.lengths[a:b],
            )
            for a, b in bounds
        ]


class Scheduler:
    """Plans one step after another until every request of the trace is finished or refused.

    A step is `plan()`, the caller's scatter, `advance(step)`, whatever the caller wants to look
    at while finished requests still hold their rows, and `retire()`.

    Requests are admitted first come, first served, as soon as a row is free. Prefill follows in the
    same order, at most `prefill_budget` tokens a step, so that a long context is cut into chunks.
    Every request whose context is complete decodes one token a step. A row is freed when its
    request is finished; the row freed last is taken first, so that stale rows show soon.

    A request that cannot fit a row is refused, and counted in `refused`. One without a context is
    ordinary: its prefill is an empty segment, and it decodes from position 0; one without context
    and output is finished by that empty segment.
    """

    def __init__(self, trace: Trace, *, max_running: int, max_context_len: int, prefill_budget: int) -> None:
        for name, value in [
            ("max_running", max_running),
            ("max_context_len", max_context_len),
            ("prefill_budget", prefill_budget),
        ]:
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self._trace = trace
        self._total_lens = trace.context_lens + trace.generated_lens
        too_long = self._total_lens > max_context_len
        self._prefill_budget = prefill_budget
        self._waiting = deque(np.flatnonzero(~too_long).tolist())
        self._prefilling: deque[int] = deque()  # rows, in order of admission
        self._free = list(range(max_running, PADDING_ROW, -1))  # a stack; row 1 is on top
        # By pool row: its request, the tokens that it holds, those of the context and of the whole,
        # and whether the context has been through prefill (even an empty one has to).
        self._request = np.full(max_running + 1, FREE, np.int64)
        self._valid_lens = np.zeros(max_running + 1, np.int64)
        self._context = np.zeros(max_running + 1, np.int64)
        self._total = np.zeros(max_running + 1, np.int64)
        self._prefilled = np.zeros(max_running + 1, np.bool_)
        self.refused = {"longer than max_context": int(too_long.sum())}
        self.num_finished = 0

    @property
    def num_running(self) -> int:
        """Requests that hold a row now."""
        return int(np.count_nonzero(self._request != FREE))

    @property
    def drained(self) -> bool:
        """Whether nothing waits and every row in use holds a finished request (`retire` is due)."""
        busy = self._waiting or self._prefilling
        return not busy and bool((self._valid_lens == self._total).all())

    def plan(self) -> Segments | None:
        """The next step: admits what fits, then lays out decodes and prefill; None at the end.

        A request admitted now is prefilled from now on, and decodes from the step after the one
        that completes its context.
        """
        decodes = np.flatnonzero(self._prefilled & (self._valid_lens < self._total))
        self._admit()
        chunks, chunk_lens = self._chunks()
        rows = np.concatenate([decodes, chunks])
        if not len(rows):
            return None
        return Segments(
            rows=rows,
            requests=self._request[rows],
            starts=self._valid_lens[rows],
            lengths=np.concatenate([np.ones(len(decodes), np.int64), chunk_lens]),
            num_decodes=len(decodes),
        )

    def _admit(self) -> None:
        for _ in range(min(len(self._free), len(self._waiting))):
            row, request = self._free.pop(), self._waiting.popleft()
            self._request[row] = request
            self._valid_lens[row] = 0
            self._context[row] = self._trace.context_lens[request]
            self._total[row] = self._total_lens[request]
            self._prefilling.append(row)

    def _chunks(self) -> tuple[Int64Array, Int64Array]:
        """Rows to prefill in this step and how many tokens of each, int64, first come first."""
        rows: list[int] = []
        lengths: list[int] = []
        budget = self._prefill_budget
        for row in self._prefilling:
            missing = int(self._context[row] - self._valid_lens[row])
            if missing and not budget:
                break
            rows.append(row)
            lengths.append(min(missing, budget))
            budget -= lengths[-1]
            if lengths[-1] < missing:  # nobody overtakes, not even an empty context
                break
        return np.array(rows, np.int64), np.array(lengths, np.int64)

    def advance(self, step: Segments) -> None:
        """The step has been scattered: its rows hold that much more. Nothing is freed yet."""
        self._valid_lens[step.rows] += step.lengths
        chunks = step.rows[step.num_decodes :]
        done = chunks[self._valid_lens[chunks] == self._context[chunks]]
        for _ in range(len(done)):  # prefill is first come first served: they are at the front
            self._prefilling.popleft()
        self._prefilled[done] = True

    def live(self) -> Segments:
        """What the pool must hold now: every row in use, from its start to its valid length."""
        rows = np.flatnonzero(self._request != FREE)
        return Segments(
            rows=rows,
            requests=self._request[rows],
            starts=np.zeros(len(rows), np.int64),
            lengths=self._valid_lens[rows],
        )

    def steps_left(self, rows: Int64Array) -> Int64Array:
        """Steps for which each row stays in use at the least, were it never to wait. int64."""
        return self._total[rows] - np.maximum(self._valid_lens[rows], self._context[rows])

    def retire(self) -> Int64Array:
        """Free the rows of finished requests; the requests, int64 `[number]`."""
        rows = np.flatnonzero(self._prefilled & (self._valid_lens == self._total))
        requests = self._request[rows]
        self._request[rows] = FREE
        self._prefilled[rows] = False
        self._free.extend(rows.tolist())
        self.num_finished += len(rows)
        return requests


def count_steps(scheduler: Scheduler) -> int:
    """Run a scheduler to its end without a pool; the number of steps that it took."""
    steps = 0
    while (step := scheduler.plan()) is not None:
        scheduler.advance(step)
        scheduler.retire()
        steps += 1
    return steps
