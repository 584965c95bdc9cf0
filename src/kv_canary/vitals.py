"""What a canary really did, by its counters on the device: in all, step by step, and whether that makes it alive."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from kv_canary import kinds
from kv_canary.findings import Health, StepCounts
from kv_canary.stamping import Memory
from kv_canary.violations import ViolationLog

EXTRA_LINES = kinds.COUNTER_LINES * kinds.COUNTERS // kinds.STAMP_COLUMNS
"""Lines of a log of stamp violations that the counters take: they travel with it."""

logger = logging.getLogger(__name__)


class Vitals:
    """Reads a canary's counters and state.

    Args:
        memory: the canary's; its counters are the log's extra lines.
        log: its violations.
        has_pool: whether tokens are to be compared.
        max_age: steps that a position may go unverified without a warning, or None.
    """

    def __init__(self, memory: Memory, log: ViolationLog[Any], *, has_pool: bool, max_age: int | None) -> None:
        self._memory = memory
        self._log = log
        self._has_pool = has_pool
        self._max_age = max_age
        self._asked = _by_name(np.zeros(kinds.COUNTERS, dtype=np.int64))
        self._step = (-1, np.zeros(kinds.COUNTERS, dtype=np.int64))
        self.last_steps: StepCounts | None = None

    def end_step(self) -> None:
        """Look at the counters that the log's last poll brought along, labelled with their step."""
        arrived = self._log.arrived_extra()
        if arrived is None or arrived[0] == self._step[0]:
            return
        step, lines = arrived
        totals = lines.reshape(-1, kinds.COUNTERS).sum(0)
        self.last_steps = StepCounts(self._step[0] + 1, step, _by_name(totals - self._step[1]))
        self._step = (step, totals)

    def counts(self) -> dict[str, int]:
        """All comparisons so far by kind, slots written and skipped. Syncs."""
        return _by_name(self._memory.counters.sum(0).cpu().numpy())

    def coverage(self, step: int, longest: int) -> int:
        """Steps since the least recently verified of the first ``longest`` positions was looked at. Syncs."""
        live = min(longest, kinds.PHASES)
        return step - int(self._memory.state[2 : 2 + live].min()) if live else 0

    def health(self, step: int, longest: int) -> Health:
        """Whether the canary is alive. Syncs."""
        counts, before, coverage = self.counts(), self._asked, self.coverage(step, longest)
        since = {name: counts[name] - before[name] for name in counts}
        self._asked = counts
        problems = []
        if not counts["written"]:
            problems.append("no slot has ever been written")
        if not since["position"]:
            problems.append("no slot has been verified since health was last asked")
        if self._has_pool and since["position"] and not since["token"]:
            problems.append("a pool is attached, and no token has been compared since health was last asked")
        if self._max_age is not None and coverage > self._max_age:
            problems.append(f"a position has gone unverified for {coverage} steps, max_age is {self._max_age}")
        for problem in problems:
            logger.warning("kv-canary: %s", problem)
        found = int(self._memory.log[0, kinds.FOUND_COUNT])
        return Health(step, counts, since, found, self._log.lost, coverage, tuple(problems))


def _by_name(totals: Any) -> dict[str, int]:
    return dict(zip(kinds.COUNTER_NAMES, totals.tolist(), strict=False))
