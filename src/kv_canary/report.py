"""What the device found: counted there, read without a sync, raised on request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from kv_canary import kinds
from kv_canary.snapshot import Launches, Snapshot
from ragged import Coercion, RaggedError, RaggedTypeError
from ragged.errors import request_name
from ragged.staging import resolve_device

Launch = tuple[tuple[object, ...] | None, Any, Sequence[Any]]
"""What the host knew of a launch, to name things by later: request ids, ``num_tokens``, the pool's shape."""

_WORDS = {
    kinds.OFFSETS: "offsets must start at 0, not decrease, and end within {num_tokens} tokens, got {position}, {value}",
    kinds.ROW: "req_pool_indices must be in [0, {max_reqs}), got {value}",
    kinds.PREFIX: "prefix_lens must be in [0, {max_context_len}], got {value}",
    kinds.TOKEN: "flat_in must fit int32, got {value} at position {position}",
    kinds.DROPPED: "{value} tokens did not fit max_context_len {max_context_len}",
}


class GuardViolation(RaggedError):
    """The device guards found something; nothing wrong was written. ``offender`` is the first of it."""

    def __init__(self, message: str, offender: Offender | None = None) -> None:
        super().__init__(message)
        self.offender = offender
        if offender is not None:
            self.argument, self.request, self.req_id = offender.argument, offender.request, offender.req_id
            self.got = offender.value


@attrs.frozen
class Offender:
    """The first thing wrong of its kind: which kind (a name of ``kinds.GUARDS``), whose, where, what."""

    kind: str
    request: int
    req_id: object
    position: int
    value: int
    launch: int
    message: str

    @property
    def argument(self) -> str:
        """The launcher's argument at fault."""
        return kinds.ARGUMENTS[kinds.GUARDS.index(self.kind)]

    @property
    def whose(self) -> str:
        """The request, by position and id; or that no request owns it."""
        return "no request" if self.request < 0 else request_name(self.request, self.req_id)


class GuardReport:
    """Counters on the device, one a kind, with the first offender of each.

    Pass one to ``scatter``; read it when you like. It may serve any number of launches, and names an offender by the
    batch that it was in, even when later ones have been built since. One thread at a time: threads take one each.

    >>> report = GuardReport.allocate("cpu")
    >>> report.counts()
    {'offsets': 0, 'row': 0, 'prefix': 0, 'token': 0, 'dropped': 0}
    >>> report.first() is None
    True
    """

    def __init__(self, table: torch.Tensor) -> None:
        _check_table(table)
        self.table = table  # int64 [len(GUARDS), REPORT_COLUMNS], on the device
        self.coercions: list[Coercion] = []  # what coerce mode converted for the launches with this report
        self._launches = Launches()
        self._snapshot = Snapshot(table)

    @classmethod
    def allocate(cls, device: torch.device | str) -> GuardReport:
        """A clean report on ``device``."""
        with torch.inference_mode(False):
            shape = (len(kinds.GUARDS), kinds.REPORT_COLUMNS)
            return cls(torch.zeros(shape, dtype=torch.int64, device=resolve_device(device)))

    @staticmethod
    def allocation_bytes() -> int:
        """Device memory of a report."""
        return 8 * len(kinds.GUARDS) * kinds.REPORT_COLUMNS

    @property
    def device(self) -> torch.device:
        return self.table.device

    def begin(self, req_ids: tuple[object, ...] | None, num_tokens: int, pool_shape: Sequence[int]) -> int:
        """Number a launch, and remember how to name what it finds."""
        return self._launches.begin((req_ids, num_tokens, pool_shape))

    def counts(self) -> dict[str, int]:
        """How many of each kind so far. Syncs."""
        return _counts(self._read())

    def first(self) -> Offender | None:
        """The first offender, of the earliest launch; None where all is right. Syncs."""
        lines = self._read()
        found = [(lines[kind][kinds.LAUNCH], kind) for kind in kinds.FAULTS if lines[kind][kinds.COUNT]]
        return self._offender(lines, min(found)[1]) if found else None

    def poll(self) -> dict[str, int] | None:
        """The counts as far as they have arrived; None where none have yet. Never syncs.

        Each call picks up what the last one asked for, and asks anew, so that a step sees the counts of a step or two
        before it. On the CPU they are those of now.
        """
        arrived = self._snapshot.poll()
        return None if arrived is None else _counts(arrived.tolist())

    def raise_if_any(self) -> None:
        """Raise GuardViolation where a guard found a fault (dropped tokens are none). Syncs."""
        lines = self._read()
        found = [(lines[kind][kinds.LAUNCH], kind) for kind in kinds.FAULTS if lines[kind][kinds.COUNT]]
        if not found:
            return
        numbers = ", ".join(
            f"{lines[kind][kinds.COUNT]} {kinds.GUARDS[kind]}" for kind in kinds.FAULTS if lines[kind][0]
        )
        offender = self._offender(lines, min(found)[1])
        raise GuardViolation(
            f"kv-canary: scatter_req_token_ids {offender.message} at {offender.whose} "
            f"(found by the device guards, nothing wrong was written; in all: {numbers})",
            offender,
        )

    def clear(self) -> None:
        """Back to zero, in stream order; counts still on their way are forgotten."""
        with torch.inference_mode():
            self.table.zero_()
        self._snapshot.forget()
        self._launches.forget()
        self.coercions.clear()

    def _read(self) -> list[list[int]]:
        lines: list[list[int]] = self.table.tolist()
        return lines

    def _offender(self, lines: list[list[int]], kind: int) -> Offender:
        _, launch, request, position, value = lines[kind]
        known: Launch = self._launches.known(launch) or (None, "?", ("?", "?"))  # too long ago
        req_ids, num_tokens, (max_reqs, max_context_len) = known
        named = req_ids is not None and 0 <= request < len(req_ids)
        words = {"num_tokens": num_tokens, "max_reqs": max_reqs, "max_context_len": max_context_len}
        return Offender(
            kind=kinds.GUARDS[kind],
            request=request,
            req_id=req_ids[request] if named and req_ids is not None else None,
            position=position,
            value=value,
            launch=launch,
            message=_WORDS[kind].format(position=position, value=value, **words),
        )


def _check_table(table: Any) -> None:
    """Kernels write to it by address, so it is exactly as large as they take it to be."""
    shape = (len(kinds.GUARDS), kinds.REPORT_COLUMNS)
    sound = isinstance(table, torch.Tensor) and not table.is_nested and table.layout is torch.strided
    if not sound or table.dtype is not torch.int64 or table.shape != shape or not table.is_contiguous():
        got = f"{table.dtype} {tuple(table.shape)}" if sound else type(table).__name__
        if sound and table.dtype is torch.int64 and table.shape == shape:
            got = f"strides {table.stride()}"
        raise RaggedTypeError(
            f"table must be a contiguous int64 tensor of shape {shape}, got {got}",
            argument="table",
            got=got,
            bound=shape,
        )


def _counts(lines: list[list[int]]) -> dict[str, int]:
    return {name: lines[kind][kinds.COUNT] for kind, name in enumerate(kinds.GUARDS)}
