"""What a canary says: a violation of a stamp, and its own health."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import attrs

from kv_canary import kinds
from ragged.convert import Choice
from ragged.errors import request_name


class OnViolation(Choice):
    """What ``KVCanary.step`` does with what was found: a log line each, or an error."""

    LOG = "log"
    RAISE = "raise"


class Known(NamedTuple):
    """What the host knew of a launch, to name things by later."""

    tag: str
    req_ids: tuple[object, ...] | None


@attrs.frozen
class StampViolation:
    """A KV slot whose stamp is not what the scheduler thinks.

    Attributes:
        reasons: names of ``kinds.REASONS``: ``"chain"``, ``"position"``, ``"token"``, ``"kv"``, ``"write-input"``,
            ``"slot"`` (outside the stamps), ``"request"`` (its row or its length leads outside).
        tag: what launched it: ``"write"``, ``"verify"``, ``"sweep"``, or the caller's own word.
        step: the canary's step.
        request, req_id: position in the launch, -1 for a sweep; the caller's id, or None.
        row, slot, position: where it was looked for; ``stored_position`` is what the stamp says, -1 for none.
        stored_token, expected_token: -1 where there was nothing to compare.
        stored_hash, expected_hash: chain hashes, or KV hashes where the chain was right.
        owner: whom the slot belonged to last, as far as the allocator's calls told; None otherwise.
    """

    reasons: tuple[str, ...]
    tag: str
    step: int
    request: int
    req_id: object
    row: int
    slot: int
    position: int
    stored_position: int
    stored_token: int
    expected_token: int
    stored_hash: int
    expected_hash: int
    owner: object = None

    def __str__(self) -> str:
        whose = "no request" if self.request < 0 else request_name(self.request, self.req_id)
        words = [f"{'+'.join(self.reasons)} at {whose}, row {self.row}, position {self.position}, slot {self.slot}"]
        words.append(f"step {self.step} ({self.tag})")
        if "position" in self.reasons:
            holds = "never written" if self.stored_position < 0 else f"holds position {self.stored_position}"
            words.append(f"the slot {holds}")
        if {"token", "write-input"} & set(self.reasons):
            words.append(f"expected token {self.expected_token}, found {self.stored_token}")
        if self.owner is not None:
            words.append(f"the slot was {self.owner}'s")
        return ", ".join(words)


def read_stamp(line: list[int], known: Known | None) -> StampViolation:
    """A line of the ring."""
    request, req_ids = line[kinds.ENTRY_REQUEST], None if known is None else known.req_ids
    return StampViolation(
        reasons=tuple(name for bit, name in kinds.REASONS.items() if line[kinds.ENTRY_KIND] & bit),
        tag="?" if known is None else known.tag,
        step=line[kinds.STAMP_STEP],
        request=request,
        req_id=req_ids[request] if req_ids is not None and 0 <= request < len(req_ids) else None,
        row=line[kinds.STAMP_ROW],
        slot=line[kinds.STAMP_SLOT],
        position=line[kinds.STAMP_AT],
        stored_position=line[kinds.STORED_POSITION],
        stored_token=line[kinds.STORED_TOKEN],
        expected_token=line[kinds.EXPECTED_TOKEN],
        stored_hash=line[kinds.STORED_HASH],
        expected_hash=line[kinds.EXPECTED_HASH],
    )


class Owners:
    """Whose each slot is and was, as far as an allocator tells; on the host."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[object, object]] = {}  # slot -> who has it, who had it before

    def set(self, slots: Iterable[int], req_id: object) -> None:
        """These slots are a request's now; None: nobody's."""
        for slot in slots:
            holder, before = self._held.get(slot, (None, None))
            self._held[slot] = (req_id, before if holder is None else holder)

    def other(self, slot: int, req_id: object) -> object:
        """Who has a slot that ``req_id`` thinks is its own; where that is so, who had it before."""
        holder, before = self._held.get(slot, (None, None))
        return before if holder is None or holder == req_id else holder


class StepCounts(NamedTuple):
    """What was really done in some steps: comparisons by kind (chain, position, token, kv), slots written, skipped."""

    first: int
    last: int
    counts: dict[str, int]


@attrs.frozen
class Health:
    """Whether a canary is alive, by how much it really did.

    Attributes:
        step: the canary's step.
        counts: comparisons so far by kind (chain, position, token, kv), slots written, slots skipped.
        since: the same, since ``health`` was last asked.
        found, lost: violations so far; how many of them the ring had no room for.
        coverage: see ``KVCanary.coverage``.
        problems: why "clean" would mean nothing, in words; empty where the canary is alive.
    """

    step: int
    counts: dict[str, int]
    since: dict[str, int]
    found: int
    lost: int
    coverage: int
    problems: tuple[str, ...]

    @property
    def is_alive(self) -> bool:
        return not self.problems
