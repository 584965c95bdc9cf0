"""ViolationLog: what a verification found, in a ring on the device; read without stalling, raised on request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import attrs
import torch

from kv_canary import kinds
from kv_canary.snapshot import Launches, Snapshot
from ragged import RaggedError
from ragged.convert import Int64Array
from ragged.errors import request_name
from ragged.integers import as_int
from ragged.staging import resolve_device

CAPACITY = 256
"""Violations that a log keeps by default until they are read."""
NAMED = 3
"""Violations that an error's message names; all others are counted."""


class Entry(Protocol):
    """One violation: whose it is, and in words what and where (``str``)."""

    @property
    def request(self) -> int: ...

    @property
    def req_id(self) -> object: ...


V = TypeVar("V", bound=Entry)


@attrs.frozen
class Violation:
    """A pool cell, or a row's length, that is not what the scheduler thinks.

    Attributes:
        kind: a name of ``kinds.VIOLATIONS``: ``"token"`` (another token), ``"stale"`` (the cell lies beyond what the
            row validly holds), ``"length"`` (the row holds more than the request has), ``"request"`` (its row,
            prefix or offsets lead outside).
        request: its position in the batch.
        req_id: the caller's id of it, or None.
        row, column: the cell.
        expected, found: token ids; lengths for ``"length"``; start and end for ``"request"``.
    """

    kind: str
    request: int
    req_id: object
    row: int
    column: int
    expected: int
    found: int

    def __str__(self) -> str:
        where = f"{request_name(self.request, self.req_id)}, row {self.row}, column {self.column}"
        return f"{self.kind} at {where}: {_WORDS[self.kind].format(expected=self.expected, found=self.found)}"


_WORDS = {
    kinds.VIOLATIONS[kinds.MISMATCH]: "expected {expected}, found {found}",
    kinds.VIOLATIONS[kinds.STALE]: "expected {expected}, found a cell beyond the row's valid length, holding {found}",
    kinds.VIOLATIONS[kinds.LENGTH]: "expected {expected} tokens, found {found}",
    kinds.VIOLATIONS[kinds.UNREADABLE]: "its row, its prefix or its offsets [{expected}, {found}) lead outside",
}


class CanaryViolation(RaggedError):
    """A verification found something. ``violations`` are the first ones, as far as the ring could keep them."""

    def __init__(self, message: str, violations: tuple[Any, ...] = ()) -> None:
        super().__init__(message)
        self.violations = violations
        if violations:
            self.request, self.req_id = violations[0].request, violations[0].req_id


def violation_of(found: int, first: tuple[Any, ...]) -> CanaryViolation:
    """The error for so many violations, which names the first ones."""
    named, more = "; ".join(map(str, first[:NAMED])), found - len(first[:NAMED])
    return CanaryViolation(f"kv-canary: {found} violations: {named}{f'; {more} more' if more else ''}", first)


@attrs.frozen
class LogFormat(Generic[V]):
    """How a log's lines are read.

    Args:
        columns: of a line; those of ``kinds.ENTRY_KIND``, ``ENTRY_INDEX``, ``ENTRY_LAUNCH`` and ``ENTRY_REQUEST`` mean
            the same in every format, the others are its own.
        read: a line, and what the host knew of its launch (None where that was too long ago), as an entry.
    """

    columns: int
    read: Callable[[list[int], Any], V]


def _read_tokens(line: list[int], req_ids: tuple[object, ...] | None) -> Violation:
    request = line[kinds.ENTRY_REQUEST]
    return Violation(
        kind=kinds.VIOLATIONS[line[kinds.ENTRY_KIND]],
        request=request,
        req_id=req_ids[request] if req_ids is not None and 0 <= request < len(req_ids) else None,
        row=line[kinds.ENTRY_ROW],
        column=line[kinds.ENTRY_COLUMN],
        expected=line[kinds.ENTRY_EXPECTED],
        found=line[kinds.ENTRY_FOUND],
    )


TOKENS = LogFormat(kinds.VIOLATION_COLUMNS, _read_tokens)
"""Cells of a token pool; what the host knows of a launch is its request ids, or None."""


class ViolationLog(Generic[V]):
    """A ring on the device that keeps the first violations, and a counter that counts them all.

    >>> log = ViolationLog.allocate("cpu")
    >>> log.drain(), log.found, log.lost
    ([], 0, 0)

    Reading frees the ring for the next ones, and gives each violation once. What came while it was full is counted in
    ``lost``: the first ones of a fault say more than the last. A log serves any number of launches; they and its
    readers use one stream.

    Attributes:
        table: int64 ``[1 + capacity, columns]`` on the device: a header line, then the ring.
        extra: int64 ``[num_extra, columns]`` on the device, the caller's own lines.
        found: violations that the reads so far have seen, those lost included.
        lost: how many of them the ring had no room for.
    """

    def __init__(self, lines: torch.Tensor, log_format: LogFormat[V], num_extra: int = 0) -> None:
        self.table = lines[: lines.shape[0] - num_extra]
        self.extra = lines[lines.shape[0] - num_extra :]
        self.found = 0
        self.lost = 0
        self._format = log_format
        self._launches = Launches()
        self._snapshot = Snapshot(lines)
        self._cells = 0
        self._first: list[V] = []

    @classmethod
    def allocate(
        cls,
        device: torch.device | str,
        *,
        capacity: int = CAPACITY,
        log_format: LogFormat[Any] = TOKENS,
        num_extra: int = 0,
    ) -> ViolationLog[Any]:
        """A clean log on ``device`` that keeps ``capacity`` violations until they are read.

        ``num_extra``: lines of the caller's own, which ``poll`` brings along.
        """
        shape = (1 + as_int(capacity, "capacity", least=1) + num_extra, log_format.columns)
        with torch.inference_mode(False):
            return cls(torch.zeros(shape, dtype=torch.int64, device=resolve_device(device)), log_format, num_extra)

    @staticmethod
    def allocation_bytes(capacity: int = CAPACITY, log_format: LogFormat[Any] = TOKENS) -> int:
        """Device memory of a log."""
        return 8 * (1 + capacity) * log_format.columns

    @property
    def device(self) -> torch.device:
        return self.table.device

    @property
    def capacity(self) -> int:
        return self.table.shape[0] - 1

    def begin(self, known: Any, num_cells: int) -> int:
        """Number a launch that compares ``num_cells``, and remember ``known`` to name what it finds."""
        self._cells += num_cells
        return self._launches.begin(known)

    def poll(self, label: int = 0) -> list[V]:
        """The violations that have arrived since the last read. Never syncs: a step or two late, now on the CPU.

        ``label``: the caller's number of this poll, for ``arrived_extra``.
        """
        arrived = self._snapshot.poll(label)
        return [] if arrived is None else self._take(arrived[: self.table.shape[0]])

    def arrived_extra(self) -> tuple[int, Int64Array] | None:
        """The extra lines as they last arrived, and the label of the poll that had asked for them."""
        if self._snapshot.arrived is None:
            return None
        label, lines = self._snapshot.arrived
        return label, lines[self.table.shape[0] :]

    def drain(self) -> list[V]:
        """The violations of all launches so far that no read has given yet. Syncs."""
        return self._take(self.table.cpu().numpy())

    def compared(self) -> int:
        """Cells that were really compared: not placeholders, not stale. Syncs."""
        return self._cells - int(self.table[0, kinds.NOT_COMPARED])

    def raise_if_any(self) -> None:
        """Raise CanaryViolation where anything has been found since ``clear``, read already or not. Syncs.

        Reads nothing away: a ``drain`` after it still gives the new ones.
        """
        lines = self.table.cpu().numpy()
        found = int(lines[0, kinds.FOUND_COUNT])
        if not found:
            return
        first = (*self._first, *self._new(lines))[:NAMED]
        raise violation_of(found, first)

    def clear(self) -> None:
        """As newly allocated, in stream order; what is still on its way is forgotten."""
        with torch.inference_mode():
            self.table.zero_()
        self._snapshot.forget()
        self._launches.forget()
        self.found = self.lost = self._cells = 0
        self._first.clear()

    def _new(self, lines: Any) -> list[V]:
        """Entries that no read has given yet. Each carries its number: a lost one's place may hold an older one."""
        ring = lines[1:]
        fresh = ring[ring[:, kinds.ENTRY_INDEX] > self.found]
        ordered = fresh[fresh[:, kinds.ENTRY_INDEX].argsort()].tolist()
        return [self._format.read(line, self._launches.known(line[kinds.ENTRY_LAUNCH])) for line in ordered]

    def _take(self, lines: Any) -> list[V]:
        """Give what is new, and free its place on the device, in stream order."""
        found = int(lines[0, kinds.FOUND_COUNT])
        if found <= self.found:
            return []
        new = self._new(lines)
        self.lost += found - self.found - len(new)
        self.found = found
        self._first += new[: NAMED - len(self._first)]
        with torch.inference_mode():
            self.table[0, kinds.FREED].fill_(found)
        return new
