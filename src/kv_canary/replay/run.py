"""The replay itself: plan, sync, verify, until the trace is through; and its figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter_ns

import numpy as np
import torch

from kv_canary.pool import TokenPool
from kv_canary.replay.inject import Injector
from kv_canary.replay.result import ReplayResult, ReplaySettings
from kv_canary.replay.scheduler import Scheduler, Segments, count_steps
from kv_canary.replay.trace import Trace
from kv_canary.replay.watch import Watch
from kv_canary.report import GuardReport, GuardViolation
from kv_canary.violations import CanaryViolation, ViolationLog
from ragged import RaggedBatch, RaggedError
from ragged.header import starts

__all__ = ["replay"]

VERIFY_TOKENS = 1 << 20  # compared at once: 8 arrays of this many int64 are 64 MiB, and enough
MAX_FINDINGS = 10  # lines; the rest is counted
MAX_CELLS = 4096  # of one verification that are kept for the map


def replay(
    trace: Trace,
    settings: ReplaySettings,
    *,
    on_step: Callable[[Scheduler], None] | None = None,
) -> ReplayResult:
    """Replay a trace as fast as the device takes it; its clock is not waited for.

    Every step syncs the pool with all running requests. The pool is compared with what the trace
    says every `verify_every` steps and at the end, before the last rows are freed. The
    run ends early at the first finding, and at Ctrl-C. `on_step` is called after every step.

    Raises:
        MemoryError: the device has no room for the pool.
    """
    with _one_thread(settings.device):
        return _Replay(trace, settings).run(on_step)


@contextmanager
def _one_thread(device: str) -> Iterator[None]:
    """On the CPU, one torch thread for the while.

    A step moves a few thousand tokens. Two threads wait for each other longer than they work, above all on a machine
    that others use too: on 2 such cores a step took 55 ms at p99 with two threads, 1.4 ms with one.
    """
    threads = torch.get_num_threads()
    try:
        if torch.device(device).type == "cpu":
            torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(threads)


def _allocate_pool(settings: ReplaySettings) -> TokenPool:
    """A pool that nothing has been written to; MemoryError where it does not fit the device."""
    shape = (settings.max_running + 1, settings.max_context)
    try:
        return TokenPool.allocate(*shape, device=settings.device, mode=settings.mode)
    except RuntimeError as error:
        gigabytes = TokenPool.allocation_bytes(*shape) / 1e9
        raise MemoryError(
            f"a pool of {shape[0]} x {shape[1]} int32, {gigabytes:.1f} GB, does not fit {settings.device}"
        ) from error


class _Replay:
    """One replay under way: the scheduler, the device's side of it, and what has been counted."""

    def __init__(self, trace: Trace, settings: ReplaySettings) -> None:
        self._trace = trace
        self._settings = settings
        self._pool = _allocate_pool(settings)
        self._scheduler = self._new_scheduler()
        self._report = GuardReport.allocate(settings.device)
        self._log = ViolationLog.allocate(settings.device, capacity=MAX_CELLS)
        # Row -> its request and the request's tokens, as an engine has them.
        self._sequences: dict[int, tuple[int, list[int]]] = {}
        self._injector: Injector | None = None
        self._num_steps: int | None = None
        if settings.inject is not None or settings.perturb is not None:
            # To strike in the middle of a run one must know how long it is.
            self._num_steps = count_steps(self._new_scheduler())
        self._watch: Watch | None = None
        if settings.canary or settings.perturb is not None:
            self._watch = Watch(self._pool, settings, num_steps=self._num_steps or 0)
        if settings.inject is not None and self._num_steps is not None:
            self._injector = Injector(settings.inject, trace, seed=settings.seed, num_steps=self._num_steps)
        self._host_ns: list[int] = []
        self._running: list[int] = []
        self._step_tokens: list[int] = []
        self._bytes_copied = 0
        self._rescatter_tokens = 0
        self._rescatter_bytes = 0
        self._verified = np.zeros(len(trace), np.bool_)
        self._violations = 0
        self._findings: list[str] = []
        self._cells: list[tuple[int, int]] = []

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(
            self._trace,
            max_running=self._settings.max_running,
            max_context_len=self._settings.max_context,
            prefill_budget=self._settings.prefill_budget,
        )

    def run(self, on_step: Callable[[Scheduler], None] | None) -> ReplayResult:
        """Step until the trace is through, a finding ends it, or somebody presses Ctrl-C."""
        started = perf_counter_ns()
        interrupted = False
        try:
            while not self._findings and (step := self._scheduler.plan()) is not None:
                self._take(step)
                if on_step is not None:
                    on_step(self._scheduler)
        except KeyboardInterrupt:
            interrupted = True
        if self._injector is not None and not self._findings and not interrupted:
            self._findings.append(self._injector.not_seen())
        if self._watch is not None and self._watch.perturb and not self._findings and not interrupted:
            self._findings.append(self._watch.not_seen())
        return self._result(interrupted, seconds=(perf_counter_ns() - started) / 1e9)

    def _take(self, step: Segments) -> None:
        """One step, from its tokens to the rows that it frees."""
        number = len(self._host_ns) + 1
        self._scheduler.advance(step)
        try:
            broken = self._sync(number, step)
        except RaggedError as error:
            self._found(number, str(error))
            return
        if self._injector is not None:
            self._injector.touch(number, self._scheduler, self._pool.tokens, self._next_check(number))
        due = number == self._next_check(number)
        self._check_guards(number, wait=due, broken=step if broken else None)
        if due and not broken:
            self._verify(number)
        if self._watch is not None and not self._findings:
            self._stamp(self._watch, number, step)
        live = self._scheduler.live()
        self._scheduler.retire()
        if self._watch is not None:
            self._watch.free(np.setdiff1d(live.rows, self._scheduler.live().rows))

    def _stamp(self, watch: Watch, number: int, step: Segments) -> None:
        """The canary's part of a step."""
        live = self._scheduler.live()
        try:
            watch.take(number, step, self._tokens, self._scheduler)
            if self._scheduler.drained:
                watch.verify(live, budget=None)
        except CanaryViolation as violation:
            self._found(number, str(violation))
        if watch.overdue(number) and not self._findings:
            self._found(number, watch.not_seen())

    def _next_check(self, number: int) -> int:
        """The step of the next verification, this one included."""
        every = self._settings.verify_every
        scheduled = -(-number // every) * every
        if self._num_steps is not None:
            return min(scheduled, self._num_steps)
        return number if self._scheduler.drained else scheduled

    def _sync(self, number: int, step: Segments) -> bool:
        """Make the pool hold the running requests, on the clock; whether the step was broken on purpose instead.

        The tokens are made up before the clock starts: an engine has them.
        """
        pieces, positions = step.flat()
        self._tokens = tokens = self._trace.token_ids(step.requests[pieces], positions)
        for row, request, chunk in zip(
            step.rows.tolist(),
            step.requests.tolist(),
            np.split(tokens, np.cumsum(step.lengths, dtype=np.int64)[:-1]),
            strict=True,
        ):
            if row not in self._sequences or self._sequences[row][0] != request:
                self._sequences[row] = (request, [])
            self._sequences[row][1].extend(chunk.tolist())
        live = self._scheduler.live()
        rows = live.rows if self._injector is None else self._injector.rows_of(number, live)
        running = [
            (row, request, self._tokens_of(held_by, request))
            for row, held_by, request in zip(rows.tolist(), live.rows.tolist(), live.requests.tolist(), strict=True)
        ]
        if self._injector is not None and self._injector.launch(number, step, tokens, self._pool.tokens, self._report):
            self._count(0, len(running), 0)
            return True
        started = perf_counter_ns()
        sent = self._pool.sync(running, report=self._report)
        self._count(perf_counter_ns() - started, len(running), sent.num_tokens)
        self._bytes_copied += sent.num_bytes
        self._rescatter_tokens += live.num_tokens
        self._rescatter_bytes += 8 * (live.num_tokens + starts(len(live)).token_ids)
        return False

    def _tokens_of(self, row: int, request: int) -> list[int]:
        """A request's tokens so far; one that still waits for its first step has none."""
        held_by, tokens = self._sequences.get(row, (request, []))
        return tokens if held_by == request else []

    def _count(self, host_ns: int, running: int, num_tokens: int) -> None:
        self._host_ns.append(host_ns)
        self._running.append(running)
        self._step_tokens.append(num_tokens)

    def _check_guards(self, number: int, *, wait: bool, broken: Segments | None) -> None:
        """Look at what the device guards have reported; only `wait` and a step broken on purpose sync.

        `broken` went through the raw launcher, which knows no request ids: they are named here.
        """
        if not wait and broken is None and not any((self._report.poll() or {}).values()):
            return
        try:
            self._report.raise_if_any()
        except GuardViolation as violation:
            request, owner = violation.request, ""
            if broken is not None and request is not None and 0 <= request < len(broken):
                owner = f"; request {request} is id {broken.requests[request]}, pool row {broken.rows[request]}"
            self._found(number, f"{violation}{owner}")

    def _verify(self, number: int) -> None:
        """Compare every live row with the tokens that the trace says, on the device."""
        for part in self._scheduler.live().split(VERIFY_TOKENS):
            pieces, positions = part.flat()
            batch = RaggedBatch.from_lengths(
                self._trace.token_ids(part.requests[pieces], positions),
                part.lengths,
                req_pool_indices=part.rows,
                req_ids=part.requests.tolist(),
                device=self._pool.tokens.device,
            )
            before = self._log.found
            self._pool.verify(batch, report=self._log)
            found = sorted(self._log.drain(), key=lambda violation: (violation.request, violation.column))
            for violation in found:
                self._found(number, f"pool differs: {violation}")
                self._cells.append((violation.row, violation.column))
            self._violations += self._log.found - before - len(found)
            self._verified[part.requests[part.lengths > 0]] = True

    def _found(self, number: int, what: str) -> None:
        """Count a violation; the first ones get their line."""
        self._violations += 1
        if len(self._findings) < MAX_FINDINGS:
            self._findings.append(f"step {number}: {what}")

    def _result(self, interrupted: bool, seconds: float) -> ReplayResult:
        return ReplayResult(
            trace=self._trace.name,
            settings=self._settings,
            requests=len(self._trace),
            steps=len(self._host_ns),
            requests_finished=self._scheduler.num_finished,
            refused_reasons=dict(self._scheduler.refused),
            tokens_scattered=sum(self._step_tokens),
            bytes_copied=self._bytes_copied,
            rescatter_tokens=self._rescatter_tokens,
            rescatter_bytes=self._rescatter_bytes,
            host_us=np.array(self._host_ns, np.float64) / 1000,
            running=np.array(self._running, np.int64),
            step_tokens=np.array(self._step_tokens, np.int64),
            violation_cells=np.array(self._cells, np.int64).reshape(-1, 2),
            canary=None if self._watch is None else self._watch.report(),
            tokens_verified=self._log.compared(),
            requests_verified=int(self._verified.sum()),
            violations=self._violations,
            findings=tuple(self._findings),
            interrupted=interrupted,
            seconds=seconds,
        )
