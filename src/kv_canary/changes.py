"""The requests of one ``sync``, and what of them a pool does not hold yet."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from operator import is_, itemgetter
from typing import Any

import attrs
import numpy as np
import torch

from ragged.convert import Int64Array
from ragged.errors import RaggedTypeError, request_name

_last_of = itemgetter(-1)


@attrs.frozen
class Sent:
    """What a ``sync`` sent.

    Attributes:
        num_tokens: tokens that the pool did not hold yet.
        num_bytes: copied to the device, all told.
        num_rewritten: rows that held something and were sent whole.
    """

    num_tokens: int = 0
    num_bytes: int = 0
    num_rewritten: int = 0


class Requests:
    """Rows, ids and token sequences, column by column.

    Args:
        requests: ``(row, req_id, token sequence)`` each.

    Attributes:
        entries: the caller's own triples, where all are tuples; else none.
        all_lists: whether every sequence is a list.

    Raises: RaggedTypeError: an entry is no such triple, or what it holds is no sequence on the host.
    """

    def __init__(self, requests: Any) -> None:
        try:
            self.entries = tuple(requests)
            columns = tuple(zip(*self.entries, strict=True)) or ((), (), ())
            self.rows, self.req_ids, self.seqs = columns
        except (TypeError, ValueError) as cause:
            raise RaggedTypeError(
                "requests must be (row, req_id, token sequence) each", argument="requests", got=type(requests).__name__
            ) from cause
        if not all(issubclass(kind, tuple) for kind in set(map(type, self.entries))):
            self.entries = ()  # they may change
        kinds = set(map(type, self.seqs))
        self.all_lists = kinds <= {list}
        if not kinds <= {list, tuple, range}:
            self._check_kinds()

    def _check_kinds(self) -> None:
        for request, (req_id, seq) in enumerate(zip(self.req_ids, self.seqs, strict=True)):
            got = type(seq).__name__
            if isinstance(seq, torch.Tensor) and seq.device.type != "cpu":
                got = str(seq.device)  # comparing would have to wait for it
            elif _is_sequence(seq):
                continue
            raise RaggedTypeError(
                f"token_ids of {request_name(request, req_id)} must be a sequence on the host, got {got}",
                argument="token_ids",
                request=request,
                req_id=req_id,
                got=got,
            )

    def lens(self) -> Int64Array:
        """int64 ``[num_reqs]``."""
        return np.fromiter(map(len, self.seqs), np.int64, len(self.seqs))

    def is_made_of(self, requests: Any) -> bool:
        """Whether these are the very triples: what is known of their rows, ids and kinds is still true."""
        known = isinstance(requests, list | tuple) and 0 < len(requests) == len(self.entries)
        return known and all(map(is_, requests, self.entries))

    def is_like(self, other: Requests) -> bool:
        """The same of other triples that hold the very same rows, ids and sequences."""
        pairs = ((self.rows, other.rows), (self.req_ids, other.req_ids), (self.seqs, other.seqs))
        return len(self.rows) == len(other.rows) and all(all(map(is_, ours, theirs)) for ours, theirs in pairs)

    def last(self) -> list[Any]:
        """The last token of each; none may be empty."""
        return list(map(_last_of, self.seqs))

    def before_last(self, count: int) -> list[list[Any]]:
        """The ``count`` tokens before the last of each; all are lists, and long enough."""
        return list(map(itemgetter(slice(-1 - count, -1)), self.seqs))

    def tails(self, count: int) -> list[list[Any]]:
        """At most ``count`` last tokens of each, as a list of Python numbers."""
        found = list(map(itemgetter(slice(-count, None)), self.seqs))
        return found if self.all_lists else list(map(plain, found))

    def slices(self, starts: Sequence[int], ends: Sequence[int]) -> list[list[Any]]:
        """A stretch of each sequence, as a list of Python numbers."""
        found = [seq[start:end] for seq, start, end in zip(self.seqs, starts, ends, strict=True)]
        return found if self.all_lists else list(map(plain, found))

    def behind(self, kept: Int64Array, lens: Int64Array, last: list[Any] | None) -> Any:
        """The tokens of each behind its first ``kept``; one each (``last``, if known) as int64 ``[num_reqs, 1]``.

        256 lists of one new token: 27 us less than as slices, and 50 us less in the builder (one core of an AMD EPYC).
        """
        if last is None and (kept + 1).tobytes() == lens.tobytes():
            last = self.last()
        if last is not None and set(map(type, last)) == {int}:
            with suppress(OverflowError):  # the builder refuses it, with its name
                return np.fromiter(last, np.int64, len(last)).reshape(-1, 1)
        return [seq[start:] for seq, start in zip(self.seqs, kept.tolist(), strict=True)]


def _is_sequence(value: Any) -> bool:
    try:
        return len(value) >= 0 and len(value[0:0]) == 0
    except (TypeError, KeyError, IndexError, ValueError):
        return False


def plain(tokens: Any) -> list[Any]:
    """A slice of a sequence as a list of Python numbers."""
    if isinstance(tokens, list):
        return tokens
    return tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)
