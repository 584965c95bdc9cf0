"""The replay itself: plan, build, scatter, verify, until the trace is through; and its figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter_ns

import numpy as np
import torch

from kv_canary.kinds import PADDING_ROW, PLACEHOLDER
from kv_canary.replay.inject import Injector
from kv_canary.replay.result import ReplayResult, ReplaySettings
from kv_canary.replay.scheduler import Scheduler, Segments, count_steps
from kv_canary.replay.trace import Trace
from kv_canary.report import GuardReport, GuardViolation
from kv_canary.scatter import scatter
from ragged import RaggedBatchBuilder, RaggedError

__all__ = ["replay"]

VERIFY_TOKENS = 1 << 20  # compared at once: 8 arrays of this many int64 are 64 MiB, and enough
MAX_FINDINGS = 10  # of one verification; the rest is counted


def replay(
    trace: Trace,
    settings: ReplaySettings,
    *,
    on_step: Callable[[Scheduler], None] | None = None,
) -> ReplayResult:
    """Replay a trace as fast as the device takes it; its clock is not waited for.

    Every step builds one batch and scatters it into the pool. The pool is compared with what the
    scheduler knows every `verify_every` steps and at the end, before the last rows are freed. The
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


def _allocate_pool(shape: tuple[int, int], device: str) -> torch.Tensor:
    """An int32 pool that nothing has been written to; MemoryError where it does not fit the device."""
    try:
        return torch.full(shape, PLACEHOLDER, dtype=torch.int32, device=device)
    except RuntimeError as error:
        gigabytes = 4 * shape[0] * shape[1] / 1e9
        raise MemoryError(
            f"a pool of {shape[0]} x {shape[1]} int32, {gigabytes:.1f} GB, does not fit {device}"
        ) from error


class _Replay:
    """One replay under way: the scheduler, the device's side of it, and what has been counted."""

    def __init__(self, trace: Trace, settings: ReplaySettings) -> None:
        self._trace = trace
        self._settings = settings
        shape = (settings.max_running + 1, settings.max_context)
        self._pool = _allocate_pool(shape, settings.device)
        self._scheduler = self._new_scheduler()
        self._report = GuardReport.allocate(settings.device)
        self._builder = RaggedBatchBuilder(
            device=settings.device,
            mode=settings.mode,
            pool_shape=shape,
            padding_row=PADDING_ROW,
        )
        self._injector: Injector | None = None
        self._num_steps: int | None = None
        if settings.inject is not None:
            # To strike in the middle of a run one must know how long it is.
            self._num_steps = count_steps(self._new_scheduler())
            self._injector = Injector(settings.inject, seed=settings.seed, num_steps=self._num_steps)
        self._host_ns: list[int] = []
        self._tokens_scattered = 0
        self._bytes_copied = 0
        self._tokens_verified = 0
        self._verified = np.zeros(len(trace), np.bool_)
        self._violations = 0
        self._findings: list[str] = []

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
        return self._result(interrupted, seconds=(perf_counter_ns() - started) / 1e9)

    def _take(self, step: Segments) -> None:
        """One step, from the batch to the rows that it frees."""
        number = len(self._host_ns) + 1
        try:
            broken = self._scatter(number, step)
        except RaggedError as error:
            self._found(number, str(error))
            return
        self._scheduler.advance(step)
        if self._injector is not None:
            self._injector.touch(number, self._scheduler, self._pool, self._next_check(number))
        due = number == self._next_check(number)
        self._check_guards(number, wait=due, broken=step if broken else None)
        if due:
            self._verify(number)
        self._scheduler.retire()

    def _next_check(self, number: int) -> int:
        """The step of the next verification, this one included."""
        every = self._settings.verify_every
        scheduled = -(-number // every) * every
        if self._num_steps is not None:
            return min(scheduled, self._num_steps)
        return number if self._scheduler.drained else scheduled

    def _scatter(self, number: int, step: Segments) -> bool:
        """Build the batch of a step and scatter it, on the clock; whether it was broken on purpose.

        The tokens are made up before the clock starts: an engine has them.
        """
        pieces, positions = step.flat()
        tokens = self._trace.token_ids(step.requests[pieces], positions)
        rows = step.rows if self._injector is None else self._injector.rows_of(number, step)
        req_ids = step.requests.tolist()
        decodes = step.num_decodes
        chunks = np.split(tokens[decodes:], np.cumsum(step.lengths[decodes:])[:-1])

        started = perf_counter_ns()
        if decodes:
            self._builder.extend(
                rows[:decodes],
                tokens[:decodes, None],
                prefix_lens=step.starts[:decodes],
                req_ids=req_ids[:decodes],
            )
        if decodes < len(step):
            self._builder.extend(
                rows[decodes:],
                chunks,
                prefix_lens=step.starts[decodes:],
                req_ids=req_ids[decodes:],
            )
        batch = self._builder.build()
        broken = self._injector is not None and self._injector.launch(number, batch, self._pool, self._report)
        if not broken:
            scatter(batch, self._pool, report=self._report)
        self._host_ns.append(perf_counter_ns() - started)
        self._tokens_scattered += batch.num_tokens
        self._bytes_copied += batch.packed.nbytes
        return broken

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
        device = self._pool.device
        for part in self._scheduler.live().split(VERIFY_TOKENS):
            pieces, positions = part.flat()
            tokens = self._trace.token_ids(part.requests[pieces], positions)
            rows = torch.from_numpy(part.rows[pieces]).to(device)
            found = self._pool[rows, torch.from_numpy(positions).to(device)]
            differing = torch.nonzero(found != torch.from_numpy(tokens).to(device))[:, 0]
            for i in differing[:MAX_FINDINGS].tolist():
                piece = pieces[i]
                self._found(
                    number,
                    f"pool differs: request id {part.requests[piece]}, row {part.rows[piece]}, "
                    f"position {positions[i]}: expected {tokens[i]}, found {int(found[i])}",
                )
            self._violations += max(0, len(differing) - MAX_FINDINGS)
            self._tokens_verified += len(tokens)
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
            tokens_scattered=self._tokens_scattered,
            bytes_copied=self._bytes_copied,
            host_us=np.array(self._host_ns, np.float64) / 1000,
            tokens_verified=self._tokens_verified,
            requests_verified=int(self._verified.sum()),
            violations=self._violations,
            findings=tuple(self._findings),
            interrupted=interrupted,
            seconds=seconds,
        )
