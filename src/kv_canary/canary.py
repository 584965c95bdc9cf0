"""KVCanary: stamps on KV cache slots, written with the tokens and verified step after step."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import numpy as np
import torch

from kv_canary import backends, kinds
from kv_canary.findings import Health, Known, OnViolation, Owners, StampViolation, StepCounts, read_stamp
from kv_canary.guards import POOL, STAMPS
from kv_canary.intake import Column, Intake, length_of_tokens, period_of, refuse_continuing
from kv_canary.pool import TokenPool
from kv_canary.scatter import keep_until_read
from kv_canary.snapshot import lasting_ids
from kv_canary.stamping import Checks, KVSource, Memory, Pooled, Turn, turns_of
from kv_canary.violations import LogFormat, ViolationLog, violation_of
from kv_canary.vitals import EXTRA_LINES, Vitals
from ragged import RaggedBatch, RaggedTypeError
from ragged.errors import refuses
from ragged.integers import as_int
from ragged.options import as_ids
from ragged.rules import HasColumns, HasLength, HasOwnRows, IsContiguous, apply
from ragged.staging import resolve_device

RING_CAPACITY = 1024
WHOLE = 1 << 62
"""A window that no request is longer than."""

logger = logging.getLogger(__name__)


class KVCanary:
    """A stamp of 32 bytes for each KV slot: token, position, chain hash, hash of the KV bytes.

    >>> canary = KVCanary.allocate(16, device="cpu", mode="raise")
    >>> batch = RaggedBatch.from_sequences([[11, 12, 13]], req_pool_indices=[2])
    >>> canary.write(batch, [5, 6, 7])
    >>> req_to_token = torch.zeros(4, 8, dtype=torch.int32)
    >>> req_to_token[2, :3] = torch.tensor([5, 7, 6])  # two entries swapped
    >>> canary.verify(req_to_token, [2], [3])
    1
    >>> [(violation.reasons, violation.slot, violation.position) for violation in canary.log.drain()]
    [(('chain', 'position'), 7, 1), (('chain', 'position'), 6, 2)]

    The chain hash of a token is a prefix sum over its request (see ``kv_canary.mixing``), so stamps are written in
    parallel, and a slot is verified by itself and its predecessor. Slot 0 is padding: nobody writes or verifies it. A
    slot of -1 is skipped. What leads outside is skipped and reported.

    Nothing but ``health``, ``coverage`` and ``counts`` waits for the device; launches run on the current stream of the
    device, in order, and can be captured in a CUDA graph where their arguments are tensors on the device.

    Attributes:
        stamps: int64 ``[num_slots, 4]`` on the device.
        log: the violations, a ViolationLog.
        step_number: how often ``step`` was called.
    """

    def __init__(
        self,
        stamps: torch.Tensor,
        *,
        ring_capacity: int = RING_CAPACITY,
        mode: OnViolation | str = OnViolation.LOG,
        pool: TokenPool | None = None,
        max_age: int | None = None,
        kv_rotation: int | None = None,
        backend: str = "auto",
    ) -> None:
        apply(STAMPS, {"stamps": stamps}, where=POOL)
        device = stamps.device
        self.stamps = stamps
        self.log: ViolationLog[StampViolation] = ViolationLog.allocate(
            device,
            capacity=ring_capacity,
            log_format=LogFormat(kinds.STAMP_COLUMNS, self._read),
            num_extra=EXTRA_LINES,
        )
        self.step_number = 0
        self._mode = OnViolation(mode)
        self._pool = None if pool is None else Pooled(pool.tokens, pool.valid_lens)
        self._rotation = None if kv_rotation is None else as_int(kv_rotation, "kv_rotation", least=1)
        self._run = backends.resolve(backend, device, "stamps")
        self._intake = Intake(device)
        with torch.inference_mode(False):
            state = torch.zeros(2 + kinds.PHASES, dtype=torch.int64, device=device)
        counters = self.log.extra.view(kinds.COUNTER_LINES, kinds.COUNTERS)
        self._memory = Memory(stamps, self.log.table, state, counters)
        age = None if max_age is None else as_int(max_age, "max_age", least=1)
        self._vitals = Vitals(self._memory, self.log, has_pool=pool is not None, max_age=age)
        self._owners = Owners()
        self._bounds = np.zeros(1, dtype=np.int64)  # positions of each request that was verified last

    @classmethod
    @refuses
    def allocate(cls, num_slots: int, *, device: torch.device | str, **options: Any) -> KVCanary:
        """A canary whose slots were never written.

        Args:
            num_slots: of the KV pool, the padding slot 0 included.
            device: where the KV pool is.
            ring_capacity: violations that are kept until they are read; all are counted.
            mode: ``"log"`` or ``"raise"``, for ``step``.
            pool: a TokenPool that stamps are held against, too.
            max_age: ``health`` warns where ``coverage`` is more.
            kv_rotation: each slot's KV hash covers only so many of the sources (layers, heads), which ones goes round
                with the slot's number: bytes read for a slot do not grow with the layers, and every layer is watched.
            backend: ``"auto"``, ``"triton"`` or ``"torch"``.
        """
        shape = (as_int(num_slots, "num_slots", least=1), kinds.STAMP_FIELDS)
        with torch.inference_mode(False):
            stamps = torch.full(shape, -1, dtype=torch.int64, device=resolve_device(device))
        return cls(stamps, **options)

    @staticmethod
    def allocation_bytes(num_slots: int, ring_capacity: int = RING_CAPACITY) -> int:
        """Device memory of a canary."""
        lines = (1 + ring_capacity) * kinds.STAMP_COLUMNS
        counters = kinds.COUNTER_LINES * kinds.COUNTERS
        return 8 * (num_slots * kinds.STAMP_FIELDS + lines + 2 + kinds.PHASES + counters)

    @property
    def device(self) -> torch.device:
        return self.stamps.device

    @property
    def num_slots(self) -> int:
        return self.stamps.shape[0]

    @refuses
    def write(
        self,
        batch: RaggedBatch,
        out_cache_loc: Any,
        *,
        seed_slots: Any = None,
        kv_sources: Sequence[KVSource] = (),
        expected: Any = None,
        tag: str = "write",
    ) -> None:
        """Stamp every token of a batch, once its KV has been written.

        Args:
            batch: on the canary's device; a token's position is its request's ``prefix_len`` plus its index.
            out_cache_loc: int64 ``[num_tokens]``, the slot of each token, each once; host integers or on the device.
                Of a batch with a capacity ``[max_tokens]``, whatever lies behind its tokens.
            seed_slots: int64 ``[num_reqs]``, the slot of the token before the batch's first; -1 for a request that
                starts. Needed where any request with tokens has a prefix.
            kv_sources: hashed into the stamp.
            expected: int64 ``[num_tokens]``, what the tokens ought to be; -1 is not compared. What differs is reported
                as ``"write-input"``; the chain goes on with what was really written.
            tag: names the launch in violations.

        Raises: RaggedTypeError, RaggedValueError.
        """
        if not isinstance(batch, RaggedBatch):
            got = type(batch).__name__
            raise RaggedTypeError(f"{POOL}batch must be a RaggedBatch, got {got}", argument="batch", got=got)
        self._intake.check(batch.packed, "batch", IsContiguous, "int64", ndim=1)
        layout = batch.layout
        num_tokens, meaning = length_of_tokens(layout)
        given = [Column(out_cache_loc, "out_cache_loc", num_tokens, meaning)]
        if seed_slots is None:
            refuse_continuing(layout)
        else:
            given.append(Column(seed_slots, "seed_slots", layout.num_reqs, "num_reqs"))
        if expected is not None:
            given.append(Column(expected, "expected", num_tokens, meaning))
        turns = self._turns(kv_sources)
        (slots, _), *more = self._intake.columns(*given)
        if num_tokens == 0:
            return
        wanted, seeds = (None if each is None else more.pop().tensor for each in (expected, seed_slots))
        kv = self._run.hash_kv(slots, self.num_slots, turns) if turns else None
        launch = self.log.begin(Known(tag, lasting_ids(layout.req_ids, self.device)), num_tokens)
        self._run.write(batch, slots, seeds, kv, wanted, self._memory, launch)
        if slots.is_cuda:
            keep_until_read(batch)

    @refuses
    def verify(
        self,
        req_to_token: torch.Tensor,
        rows: Any,
        seq_lens: Any,
        *,
        window: int | None = None,
        budget: int | None = None,
        kv_sources: Sequence[KVSource] = (),
        req_ids: Sequence[object] | None = None,
        tag: str = "verify",
    ) -> int:
        """Hold the stamps of running requests against what they must be.

        For every position: the stamp's position is this one; its chain hash follows from its predecessor's stamp; its
        token is the pool's, where one is attached (not -1, and within the row's valid length); its KV hash is that of
        the bytes, where sources are given.

        Args:
            req_to_token: int32 or int64 ``[max_reqs, max_context_len]`` on the device, the slot of each position.
            rows: int64 ``[num_reqs]``, each request's row of it; host integers, or on the device.
            seq_lens: int64 ``[num_reqs]``, likewise. Where they are on the device the host plans for full rows.
            window: only the last so many positions; the first of them is not held against its predecessor.
            budget: at most so many slots a call, every k-th position of each request, in turn.
            kv_sources: as they were when the slots were written.
            req_ids: the caller's ids, for messages.
            tag: names the launch in violations.

        Returns: how many calls look at everything, k: each position is looked at once in k calls in a row.

        Raises: RaggedTypeError, RaggedValueError; also for a budget below the number of requests.
        """
        kind = "int64" if isinstance(req_to_token, torch.Tensor) and req_to_token.dtype is torch.int64 else "int32"
        self._intake.check(req_to_token, "req_to_token", HasOwnRows, kind, ndim=2)
        turns = self._turns(kv_sources)
        (own, _), (lens, host_lens) = self._intake.columns(Column(rows, "rows"), Column(seq_lens, "seq_lens"))
        num_reqs = own.shape[0]
        if lens.shape[0] != num_reqs:
            rule = HasLength("seq_lens", "number of rows", lambda _: num_reqs)
            apply([rule], {"seq_lens": lens}, where=POOL)
        window = WHOLE if window is None else as_int(window, "window", least=1)
        if num_reqs == 0:
            return 1
        longest = min(window, req_to_token.shape[1])
        bounds = np.full(num_reqs, longest) if host_lens is None else np.minimum(np.maximum(host_lens, 0), longest)
        self._bounds = bounds
        period, most = period_of(bounds, None if budget is None else as_int(budget, "budget", least=1))
        checks = Checks(req_to_token, own, lens, window, period, most)
        launch = self.log.begin(Known(tag, lasting_ids(as_ids(req_ids), self.device)), most)
        self._run.check(checks, self._pool, turns, self._memory, launch)
        return period

    @refuses
    def sweep(self, slots: Any, *, kv_sources: Sequence[KVSource] = (), tag: str = "sweep") -> None:
        """Hold cached slots that no running request owns against what they must be: a radix cache.

        Args:
            slots: int64 ``[n, 3]``: slot, its predecessor's slot (-1 at position 0), position; on the host or device.
            kv_sources: as they were when the slots were written.
            tag: names the launch in violations.
        """
        turns = self._turns(kv_sources)
        if not isinstance(slots, torch.Tensor):
            slots = torch.from_numpy(np.array(slots, dtype=np.int64).reshape(-1, 3)).to(self.device)
        self._intake.check(slots, "slots", HasOwnRows, "int64", ndim=2)
        apply([HasColumns("slots", 3)], {"slots": slots}, where=POOL)
        if slots.shape[0]:
            launch = self.log.begin(Known(tag, None), slots.shape[0])
            self._run.sweep(slots.contiguous(), turns, self._memory, launch)

    def owns(self, slots: Iterable[int], req_id: object) -> None:
        """The allocator gave these slots to a request; None: they are free. For the messages only, on the host."""
        self._owners.set(slots, req_id)

    def step(self) -> list[StampViolation]:
        """End a step: what has arrived since the last one, logged or raised. Does not wait for the device.

        Raises: CanaryViolation, in mode ``"raise"``.
        """
        new = self.log.poll(self.step_number)
        self._vitals.end_step()
        self.step_number += 1
        with torch.inference_mode():
            self._memory.state[kinds.STATE_STEP].fill_(self.step_number)
        if new and self._mode is OnViolation.RAISE:
            raise violation_of(self.log.found, tuple(new))
        for violation in new:
            logger.warning("kv-canary: %s", violation)
        return new

    @property
    def last_steps(self) -> StepCounts | None:
        """What was really done in the step, or the steps, whose counters came last; ``step`` asks for them."""
        return self._vitals.last_steps

    def counts(self) -> dict[str, int]:
        """Comparisons really made so far by kind, slots written and skipped. Syncs."""
        return self._vitals.counts()

    def coverage(self) -> int:
        """Steps since the least recently verified position of the last ``verify``'s requests was looked at. Syncs.

        Under a budget with period k and one call a step it is at most k.
        """
        return self._vitals.coverage(self.step_number, int(self._bounds.max()))

    def health(self) -> Health:
        """Whether the canary is alive: a canary that checks nothing is always clean. Syncs."""
        return self._vitals.health(self.step_number, int(self._bounds.max()))

    def _turns(self, kv_sources: Sequence[KVSource]) -> tuple[Turn, ...]:
        return turns_of(kv_sources, self._rotation, self.num_slots, self.device)

    def _read(self, line: list[int], known: Known | None) -> StampViolation:
        violation = read_stamp(line, known)
        return attrs.evolve(violation, owner=self._owners.other(violation.slot, violation.req_id))
