"""What the host knows of each pool row: how much it holds, for whom, and its last tokens."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

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
    """What the host knows of the rows of some requests: int64 ``[num_reqs]`` each, and their tails."""

    held: Int64Array
    """Tokens that the row holds."""
    kept: Int64Array
    """How many of them are the request's first ones, as far as ids and tails can tell."""
    tails: list[list[Any]]
    tail_lens: Int64Array
    changed: bool
    """Whether some row is not the request's own, or is no longer its beginning."""


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
        self._last: tuple[tuple[int, ...], Int64Array] = ((), np.empty(0, dtype=np.int64))  # what was checked last
        self.lens: Int64Array = np.zeros(max_reqs, dtype=np.int64)
        self._fewest = sys.maxsize // 2 if tail is None else tail
        # By plain int: looked up for hundreds of rows at once, without a Python call each.
        self._tails: dict[int, list[Any]] = {row: [] for row in range(max_reqs)}
        self._owners: dict[int, object] = dict.fromkeys(range(max_reqs), NOBODY)
        self._unseen = np.zeros(max_reqs, dtype=np.bool_)  # rows whose tail and owner are still to be forgotten

    def checked(self, rows: Any, req_ids: tuple[object, ...] | None = None) -> Int64Array:
        """Rows inside the pool, each named once. The padding row is refused where it would get tokens."""
        if rows == self._last[0] and set(map(type, rows)) == {int}:  # the same requests as a step ago
            return self._last[1]
        array = Converter(Mode.STRICT, req_ids=req_ids).host(rows, "req_pool_indices")
        if len(array) and int(array.view(np.uint64).max()) >= len(self.lens):
            for request, row in enumerate(array.tolist()):
                self._bounds.check(request, row, 0, 0, None if req_ids is None else req_ids[request])
        check_unique(array.tolist(), req_ids)
        if isinstance(rows, tuple):
            self._last = (rows, array)
        return array

    def check_starts(self, layout: RaggedLayout, starts: Int64Array) -> None:
        """Hold a layout, already inside the pool, against the column, int64 ``[max_reqs]``, at which each row goes on.

        Raises: RaggedValueError: a prefix that is not its row's; tokens for the padding row; a row named twice.
        """
        rows, padding_row = layout.req_pool_indices, self._bounds.padding_row
        if np.count_nonzero(layout.lengths) < layout.num_reqs:  # else the layout has seen to it
            check_unique(rows[rows != padding_row].tolist(), layout.req_ids)
        wrong = layout.prefix_lens != starts[rows]
        if wrong.any():
            i = int(wrong.argmax())
            what = "the valid_len" if starts is self.lens else "the start"
            says = f"must be {starts[rows[i]]}, {what} of row {rows[i]}"
            raise refuse("prefix_lens", says, layout.prefix_lens[i], starts[rows[i]], i, layout.req_id(i))
        if layout.bounds.padding_row != padding_row:  # else the layout has seen to that too
            padded = (rows == padding_row) & (layout.lengths > 0)
            if padded.any():
                i = int(padded.argmax())
                self._bounds.check(i, int(rows[i]), int(layout.lengths[i]), 0, layout.req_id(i))

    def known(self, requests: Requests, rows: Int64Array) -> Known:
        """What each request's row holds of it: the row must be its own, and the last tokens unchanged."""
        self._forget_unseen()
        held = self.lens[rows]
        tails = list(map(self._tails.__getitem__, requests.rows))
        owners = tuple(map(self._owners.__getitem__, requests.rows))
        tail_lens = np.fromiter(map(len, tails), np.int64, len(tails))
        found = requests.slices((held - tail_lens).tolist(), held.tolist())
        if found == tails and owners == requests.req_ids:
            return Known(held, held, tails, tail_lens, False)
        kept = held.copy()
        facts = enumerate(zip(found, tails, owners, requests.req_ids, strict=True))
        for i in [i for i, (last, tail, owner, req_id) in facts if last != tail or owner != req_id]:
            kept[i] = self._kept(requests.rows[i], requests.req_ids[i], requests.seqs[i])
        return Known(held, kept, tails, tail_lens, True)

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
        if known.changed:
            self._owners.update(zip(requests.rows, requests.req_ids, strict=True))
        # In a decode step tails grow by a token, and are cut back only once they are twice as long as they have to be;
        # one that was cut, or forked, is made whole.
        one_more = (lens == known.held + 1).all() and not known.changed and requests.all_lists
        whole = known.tail_lens >= np.minimum(known.held, self._fewest)
        if one_more and whole.all() and int(known.tail_lens.max()) < 2 * self._fewest:
            deque(map(list.append, known.tails, requests.last), maxlen=0)
            return
        for row, seq in zip(requests.rows, requests.seqs, strict=True):
            self._tails[row] = plain(seq[-self._fewest :])

    def hold_unseen(self, rows: Int64Array, lens: Int64Array) -> None:
        """Each row holds so many tokens, which the host has not seen."""
        self.lens[rows] = lens
        self._unseen[rows] = True  # noted at once, and acted upon when somebody asks: a decode step never does

    def _forget_unseen(self) -> None:
        if self._unseen.any():
            for row in np.flatnonzero(self._unseen).tolist():
                self._tails[row], self._owners[row] = UNSEEN if self.lens[row] else [], ANYBODY
            self._unseen[:] = False

    def cut(self, rows: Int64Array, lens: Int64Array) -> None:
        """Each row holds only its first so many tokens."""
        self._forget_unseen()
        for row, held, length in zip(rows.tolist(), self.lens[rows].tolist(), lens.tolist(), strict=True):
            self._tails[row] = self._cut_tail(row, held, length)
        self.lens[rows] = lens

    def free(self, rows: Int64Array) -> None:
        """Each row holds nothing, for nobody."""
        self._forget_unseen()
        self.lens[rows] = 0
        for row in rows.tolist():
            self._tails[row] = []
            self._owners[row] = NOBODY

    def fork(self, source: int, target: int, length: int) -> None:
        """A row holds the first so many tokens of another."""
        self._forget_unseen()
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
