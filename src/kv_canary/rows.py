"""What the host knows of each pool row: how much it holds, for whom, and its last tokens."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from itertools import compress
from operator import ne
from typing import Any, NamedTuple

import attrs
import numpy as np

from kv_canary.changes import Requests, plain
from ragged import RaggedLayout, RaggedValueError
from ragged.bounds import Bounds, duplicate_row
from ragged.convert import Converter, Int64Array, Mode
from ragged.errors import request_name

NOBODY = object()
"""Owner of a row that holds nothing."""
ANYBODY = object()
"""Owner of a row whose tokens came without an id: whoever has the same last tokens."""
UNSEEN: list[Any] = [object()]
"""The tail of a row whose last tokens the host has not kept; equal to nothing."""


class Known(NamedTuple):
    """What the host knows of the rows of some requests, int64 ``[num_reqs]`` each."""

    held: Int64Array
    """Tokens that the row holds."""
    kept: Int64Array
    """How many of them are the request's first ones, as far as ids and tails can tell."""
    changed: tuple[int, ...]
    """The requests whose row is not their own, or is no longer their beginning."""
    last: list[Any] | None = None
    """Each request's last token, where every one is the last sync's with a token more; else None."""


_NOTHING = (Requests(()), np.empty(0, dtype=np.int64))


@attrs.define
class _Steady:
    """What the last sync left, while nothing else has changed the pool: all sequences are lists."""

    requests: Requests
    tails: list[list[Any]]
    tail_len: int  # of each


class Rows:
    """The host mirror of a pool's rows.

    Args:
        bounds: the pool's.
        tail: how many of a row's last tokens are kept at least, twice as many at most; None for all.

    Attributes:
        lens: int64 ``[max_reqs]``, tokens that each row validly holds.
    """

    def __init__(self, bounds: Bounds, tail: int | None) -> None:
        max_reqs = 0 if bounds.pool_shape is None else bounds.pool_shape[0]
        self._bounds = bounds
        self._asked = _NOTHING  # the requests of the last sync, and their rows
        self._steady: _Steady | None = None
        self.lens: Int64Array = np.zeros(max_reqs, dtype=np.int64)
        self._fewest = sys.maxsize // 2 if tail is None else tail
        # By plain int: looked up for hundreds of rows at once, without a Python call each.
        self._tails: dict[int, list[Any]] = {row: [] for row in range(max_reqs)}
        self._owners: dict[int, object] = dict.fromkeys(range(max_reqs), NOBODY)
        self._unseen = np.zeros(max_reqs, dtype=np.bool_)  # rows whose tail and owner are still to be forgotten
        self._has_unseen = False

    def asked(self, requests: Any) -> tuple[Requests, Int64Array]:
        """The requests of a sync and their rows; those of the last one where they are the same.

        256 of them: 5 us for the same tuples, 30 for new tuples of the same, 60 for others (one core of an AMD EPYC).
        """
        if not self._asked[0].is_made_of(requests):
            new = Requests(requests)
            if not new.is_like(self._asked[0]):
                self._asked = (new, self.checked(new.rows, new.req_ids))
        return self._asked

    def checked(self, rows: Any, req_ids: tuple[object, ...] | None = None) -> Int64Array:
        """Rows inside the pool, each named once. The padding row is refused where it would get tokens."""
        array = Converter(Mode.STRICT, req_ids=req_ids).host(rows, "req_pool_indices")
        if len(array) and int(array.view(np.uint64).max()) >= len(self.lens):
            for request, row in enumerate(array.tolist()):
                self._bounds.check(request, row, 0, 0, None if req_ids is None else req_ids[request])
        check_unique(array.tolist(), req_ids)
        return array

    def check_starts(self, layout: RaggedLayout, *, fresh: bool) -> None:
        """Hold a layout against the column at which each row goes on: 0 where it is ``fresh``, else its valid length.

        Raises: RaggedValueError: a prefix that is not its row's; tokens for the padding row; a row named twice.
        """
        rows, prefix_lens, padding_row = layout.req_pool_indices, layout.prefix_lens, self._bounds.padding_row
        if layout.max_row >= len(self.lens):
            return  # the scatter refuses it
        if layout.num_empty:  # else the layout has seen to it
            check_unique(rows[rows != padding_row].tolist(), layout.req_ids)
        starts = np.zeros_like(rows) if fresh else self.lens[rows]
        if prefix_lens.tobytes() != starts.tobytes():
            i = int((prefix_lens != starts).argmax())
            says = f"must be {starts[i]}, {'the start' if fresh else 'the valid_len'} of row {rows[i]}"
            raise refuse("prefix_lens", says, prefix_lens[i], starts[i], i, layout.req_id(i))
        if layout.bounds.padding_row != padding_row:  # else the layout has seen to that too
            padded = (rows == padding_row) & (layout.lengths > 0)
            if padded.any():
                i = int(padded.argmax())
                self._bounds.check(i, int(rows[i]), int(layout.lengths[i]), 0, layout.req_id(i))

    def known(self, requests: Requests, rows: Int64Array, lens: Int64Array) -> Known:
        """What each request's row holds of it: the row must be its own, and the last tokens unchanged."""
        self._forget_unseen()
        held, steady = self.lens[rows], self._steady
        if (
            steady is not None
            and steady.requests is requests
            and (held + 1).tobytes() == lens.tobytes()
            and requests.before_last(steady.tail_len) == steady.tails  # one slice for all: 45 us, one for each: 110
        ):
            return Known(held, held, changed=(), last=requests.last())
        tails = list(map(self._tails.__getitem__, requests.rows))
        owners = tuple(map(self._owners.__getitem__, requests.rows))
        tail_lens = np.fromiter(map(len, tails), np.int64, len(tails))
        found = requests.slices((held - tail_lens).tolist(), held.tolist())
        if found == tails and owners == requests.req_ids:
            return Known(held, held, changed=())
        kept = held.copy()
        numbers = range(len(tails))
        rewritten, taken_over = map(ne, found, tails), map(ne, owners, requests.req_ids)
        changed = {*compress(numbers, rewritten), *compress(numbers, taken_over)}
        for i in changed:
            kept[i] = self._kept(requests.rows[i], requests.req_ids[i], requests.seqs[i])
        return Known(held, kept, tuple(changed))

    def _kept(self, row: int, req_id: object, seq: Sequence[Any]) -> int:
        """The same for one request whose row is not simply what it was, or longer."""
        owner, tail, held = self._owners[row], self._tails[row], int(self.lens[row])
        if owner is not ANYBODY and (owner is NOBODY or owner != req_id):
            return 0
        end, begin = min(held, len(seq)), held - len(tail)
        if begin >= end:  # cut deeper than the tail: nothing is left to compare
            return 0
        return end if plain(seq[begin:end]) == tail[: end - begin] else 0

    def hold(self, requests: Requests, rows: Int64Array, known: Known, lens: Int64Array) -> None:
        """Each row holds exactly its request."""
        self.lens[rows] = lens
        for i in known.changed:
            self._owners[requests.rows[i]] = requests.req_ids[i]
        steady = self._steady
        # In a decode step tails grow by a token, and are cut back only once they are twice as long as they have to be.
        if known.last is not None and steady is not None and steady.tail_len + 1 < 2 * self._fewest:
            deque(map(list.append, steady.tails, known.last), maxlen=0)
            steady.tail_len += 1
            return
        tails = requests.tails(self._fewest)
        self._tails.update(zip(requests.rows, tails, strict=True))
        tail_lens = set(map(len, tails))
        is_steady = requests.all_lists and len(tail_lens) == 1
        self._steady = _Steady(requests, tails, tail_lens.pop()) if is_steady else None

    def hold_unseen(self, layout: RaggedLayout, max_context_len: int) -> None:
        """Each row of a layout holds its tokens, which the host has not seen."""
        rows = layout.req_pool_indices
        ends = layout.prefix_lens + layout.lengths
        if layout.reaches_beyond(max_context_len):
            np.minimum(ends, max_context_len, out=ends)
        self.lens[rows] = ends
        # Noted at once, and acted upon when somebody asks: a decode step by ``append`` never does.
        self._unseen[rows] = True
        self._has_unseen = True

    def _forget_unseen(self) -> None:
        if self._has_unseen:
            self._steady = None
            for row in np.flatnonzero(self._unseen).tolist():
                self._tails[row], self._owners[row] = UNSEEN if self.lens[row] else [], ANYBODY
            self._unseen[:] = False
            self._has_unseen = False

    def _forget_all(self) -> None:
        """And that the rows are as the last sync left them; the caller's requests are let go of, too."""
        self._forget_unseen()
        self._steady, self._asked = None, _NOTHING

    def cut(self, rows: Int64Array, lens: Int64Array) -> None:
        """Each row holds only its first so many tokens."""
        self._forget_all()
        for row, held, length in zip(rows.tolist(), self.lens[rows].tolist(), lens.tolist(), strict=True):
            self._tails[row] = self._cut_tail(row, held, length)
        self.lens[rows] = lens

    def free(self, rows: Int64Array) -> None:
        """Each row holds nothing, for nobody."""
        self._forget_all()
        self.lens[rows] = 0
        for row in rows.tolist():
            self._tails[row] = []
            self._owners[row] = NOBODY

    def fork(self, source: int, target: int, length: int) -> None:
        """A row holds the first so many tokens of another."""
        self._forget_all()
        self._tails[target] = self._cut_tail(source, int(self.lens[source]), length)
        self._owners[target] = ANYBODY
        self.lens[target] = length

    def _cut_tail(self, row: int, held: int, length: int) -> list[Any]:
        tail = self._tails[row]
        left = len(tail) - (held - length)
        return [] if length == 0 else tail[:left] if left > 0 and tail is not UNSEEN else UNSEEN


def check_unique(rows: Sequence[int], req_ids: Sequence[object] | None = None) -> None:
    """No row is named twice; RaggedValueError names both requests."""
    if len(set(rows)) == len(rows):
        return
    first: dict[int, int] = {}
    for request, row in enumerate(rows):
        if row in first:
            names = (None, None) if req_ids is None else (req_ids[first[row]], req_ids[request])
            raise duplicate_row(row, first[row], request, *names)
        first[row] = request


def refuse(argument: str, says: str, got: Any, bound: Any, request: int, req_id: object = None) -> RaggedValueError:
    """The error for one number of one request."""
    got, bound = int(got), int(bound)
    return RaggedValueError(
        f"{argument} {says}, got {got} at {request_name(request, req_id)}",
        argument=argument,
        request=request,
        req_id=req_id,
        got=got,
        bound=bound,
    )
