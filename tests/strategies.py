"""Hypothesis strategies and plain-list models that all tests share.

Length 0 is drawn as often as any other length: most kernels and many formulas of others are wrong only there.
"""

import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

INT64_MAX = 2**63 - 1


@dataclass(frozen=True)
class Request:
    """One request as a person would write it down: the model that batches are held to."""

    row: int
    tokens: list[int]
    prefix_len: int = 0


@dataclass(frozen=True)
class Model:
    """A batch as a list of requests. Everything is computed by walking them: no offsets, no sums over arrays."""

    requests: list[Request] = field(default_factory=list)

    @classmethod
    def of_lengths(cls, lengths: list[int]) -> "Model":
        """Requests of these lengths on rows 1, 2, 3, ...; every token is another number."""
        numbers = iter(range(10**9))
        return cls([Request(row, [next(numbers) for _ in range(n)]) for row, n in enumerate(lengths, 1)])

    @property
    def rows(self) -> list[int]:
        return [request.row for request in self.requests]

    @property
    def sequences(self) -> list[list[int]]:
        return [request.tokens for request in self.requests]

    @property
    def prefix_lens(self) -> list[int]:
        return [request.prefix_len for request in self.requests]

    @property
    def lengths(self) -> list[int]:
        return [len(request.tokens) for request in self.requests]

    @property
    def offsets(self) -> list[int]:
        seen: list[int] = []
        offsets = [0]
        for request in self.requests:
            seen.extend(request.tokens)
            offsets.append(len(seen))
        return offsets

    @property
    def token_ids(self) -> list[int]:
        return [token for request in self.requests for token in request.tokens]

    @property
    def req_ids(self) -> list[int]:
        return [index for index, request in enumerate(self.requests) for _ in request.tokens]

    @property
    def positions(self) -> list[int]:
        return [request.prefix_len + i for request in self.requests for i, _ in enumerate(request.tokens)]

    @property
    def last_token_indices(self) -> list[int]:
        owners = self.req_ids
        return [max((t for t, owner in enumerate(owners) if owner == r), default=-1) for r in range(len(self.requests))]

    def padded(self, value: int) -> list[list[int]]:
        width = max(self.lengths, default=0)
        return [request.tokens + [value] * (width - len(request.tokens)) for request in self.requests]

    def select(self, indices: list[int]) -> "Model":
        return Model([self.requests[index] for index in indices])

    def split(self, max_tokens: int) -> list["Model"]:
        """Deal the tokens one by one; an empty request is dealt into the piece that is open when it comes."""
        pieces: list[list[Request]] = [[]]
        room = max_tokens
        for index, request in enumerate(self.requests):
            part, start = list[int](), request.prefix_len
            if not request.tokens:
                # A full piece is closed only when something comes that is not in it, and this comes after it.
                if room == 0 and any(later.tokens for later in self.requests[index:]):
                    pieces.append([])
                    room = max_tokens
                pieces[-1].append(request)
                continue
            for token in request.tokens:
                if room == 0:
                    if part:
                        pieces[-1].append(Request(request.row, part, start))
                    part, start = [], start + len(part)
                    pieces.append([])
                    room = max_tokens
                part.append(token)
                room -= 1
            pieces[-1].append(Request(request.row, part, start))
        return [Model(piece) for piece in pieces]


def lengths(max_len: int = 7) -> st.SearchStrategy[int]:
    """A request's length; 0 at least as often as any other."""
    return st.sampled_from([0, *range(max_len + 1)])


def tokens(max_len: int = 7, max_token: int = 2**31 - 1) -> st.SearchStrategy[list[int]]:
    """A request's token ids; small ones and the largest are both likely."""
    token = st.integers(0, 9) | st.integers(0, max_token) | st.just(max_token)
    return lengths(max_len).flatmap(lambda n: st.lists(token, min_size=n, max_size=n))


@st.composite
def models(
    draw: st.DrawFn,
    *,
    max_reqs: int = 9,
    max_len: int = 7,
    max_row: int = 60,
    max_prefix_len: int = 40,
    min_row: int = 0,
) -> Model:
    """Any legal batch: rows are unique among requests with tokens; an empty request may repeat one."""
    sequences = draw(st.lists(tokens(max_len), max_size=max_reqs))
    rows = draw(st.lists(st.integers(min_row, max_row), min_size=len(sequences), max_size=len(sequences), unique=True))
    if rows and draw(st.booleans()):
        rows = [draw(st.sampled_from(rows)) if not seq else row for row, seq in zip(rows, sequences, strict=True)]
    prefix = st.just(0) | st.integers(0, max_prefix_len)
    return Model([Request(row, seq, draw(prefix)) for row, seq in zip(rows, sequences, strict=True)])


KINDS = {
    "list": list,
    "tuple": tuple,
    "array": lambda tokens: array.array("q", tokens),
    "numpy": lambda tokens: np.array(tokens, dtype=np.int64),
    "read_only_numpy": lambda tokens: _read_only(np.array(tokens, dtype=np.int64)),
    "tensor": lambda tokens: torch.tensor(tokens, dtype=torch.int64),
    "memoryview": lambda tokens: memoryview(np.array(tokens, dtype=np.int64)),
    "dlpack": lambda tokens: DLPackOnly(np.array(tokens, dtype=np.int64)),
    "numpy_scalars": lambda tokens: [np.uint32(token) for token in tokens],
}
"""The same int64 tokens as every kind of sequence that strict mode takes."""


class DLPackOnly:
    """An object that can be read through ``__dlpack__`` and in no other way."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


def _read_only(values: Any) -> Any:
    values.setflags(write=False)
    return values


def kinds() -> st.SearchStrategy[Any]:
    """A function that turns a list of tokens into one of the kinds of sequence that strict mode takes."""
    return st.sampled_from(list(KINDS)).map(lambda name: KINDS[name])


def cuts(values: list[int]) -> st.SearchStrategy[list[list[int]]]:
    """``values`` cut into parts whose concatenation they are; some parts are empty."""
    places = st.lists(st.integers(0, len(values)), max_size=3).map(sorted)
    return places.map(lambda at: [values[i:j] for i, j in zip([0, *at], [*at, len(values)], strict=True)])


SMALL_AND_EXTREME = (-(2**63), -(2**62), -2, -1, 0, 1, 2, 3, 4, 5, 2**31, 2**62, INT64_MAX - 1, INT64_MAX)
"""Numbers at which sums wrap, bounds lie and signs turn."""


@st.composite
def columns(draw: st.DrawFn, max_reqs: int = 6) -> tuple[list[int], list[int], list[int]]:
    """lengths, rows and prefix_lens, good or bad: most numbers are small and legal, some are extreme."""
    num_reqs = draw(st.integers(0, max_reqs))
    number = st.integers(0, 5) | st.sampled_from(SMALL_AND_EXTREME) if draw(st.booleans()) else st.integers(0, 5)
    column = st.lists(number, min_size=num_reqs, max_size=num_reqs)
    rows = st.permutations(range(num_reqs)).map(list) | column
    return draw(column), draw(rows), draw(column)


# ---- the scatter -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RawScatter:
    """Arguments of a raw scatter as plain lists, sound or corrupted."""

    max_reqs: int
    max_context_len: int
    flat_in: list[int]
    offsets: list[int]
    req_pool_indices: list[int]
    prefix_lens: list[int]
    corrupted: frozenset[int] = frozenset()
    """Requests that a report may name; -1 where a token may have lost its owner."""

    @property
    def columns(self) -> dict[str, list[int]]:
        return {
            "flat_in": self.flat_in,
            "offsets": self.offsets,
            "req_pool_indices": self.req_pool_indices,
            "prefix_lens": self.prefix_lens,
        }

    @property
    def shared_rows(self) -> set[int]:
        """Rows of more than one request: which of them a cell holds is not specified."""
        return {row for row in self.req_pool_indices if self.req_pool_indices.count(row) > 1}


@st.composite
def raw_scatters(draw: st.DrawFn) -> RawScatter:
    """A sound one: every token its own number, so that one out of place shows; some tokens beyond the last offset."""
    max_reqs, max_context_len = draw(st.integers(1, 9)), draw(st.sampled_from([1, 2, 5, 16]))
    num_reqs = draw(st.integers(0, max_reqs))
    some = {"min_size": num_reqs, "max_size": num_reqs}
    request_lens = draw(st.lists(st.sampled_from([0, 0, 1, 2, 7, 8, 9, max_context_len, max_context_len + 3]), **some))
    offsets = [sum(request_lens[:r]) for r in range(num_reqs + 1)]
    return RawScatter(
        max_reqs=max_reqs,
        max_context_len=max_context_len,
        flat_in=[1000 + index for index in range(offsets[-1] + draw(st.sampled_from([0, 0, 3])))],
        offsets=offsets,
        req_pool_indices=draw(st.permutations(range(max_reqs)))[:num_reqs],
        prefix_lens=draw(st.lists(st.sampled_from([0, 0, 1, max_context_len // 2, max_context_len]), **some)),
    )


WIDE_TOKENS = (2**31, -(2**31) - 1, 2**32 + 5, 2**62, INT64_MAX, -(2**63))
"""Token ids that do not fit int32; the third would become 5."""


@st.composite
def corrupted_scatters(draw: st.DrawFn) -> RawScatter:
    """One with up to four numbers of its metadata or tokens replaced by wrong, extreme or merely other ones."""
    sound = draw(raw_scatters().filter(lambda raw: raw.req_pool_indices))
    tokens, offsets = list(sound.flat_in), list(sound.offsets)
    rows, prefix_lens = list(sound.req_pool_indices), list(sound.prefix_lens)
    num_reqs, max_reqs, max_context_len = len(rows), sound.max_reqs, sound.max_context_len
    extreme = (-1, -2, 2**31, 2**32, 2**32 + 1, 2**40, 2**62, INT64_MAX, -(2**31), -(2**62), -(2**63))
    named: set[int] = set()
    for _ in range(draw(st.integers(1, 4))):
        what = draw(st.sampled_from(["row", "prefix", "offset", "token"]))
        if what == "row":
            request = draw(st.integers(0, num_reqs - 1))
            rows[request] = draw(st.sampled_from([*extreme, max_reqs, max_reqs + 1]))
            named.add(request)
        elif what == "prefix":
            request = draw(st.integers(0, num_reqs - 1))
            prefix_lens[request] = draw(st.sampled_from([*extreme, max_context_len + 1]))
            named.add(request)
        elif what == "offset":
            at = draw(st.integers(0, num_reqs))
            offsets[at] = draw(st.sampled_from([*extreme, 0, 1, len(tokens), len(tokens) + 1]) | st.integers(0, 20))
            named |= {-1, at - 1, at}
        elif tokens:
            at = draw(st.integers(0, len(tokens) - 1))
            tokens[at] = draw(st.sampled_from(WIDE_TOKENS))
    wide = [at for at, token in enumerate(tokens) if not -(2**31) <= token < 2**31]
    named |= {r for r in range(num_reqs) for at in wide if offsets[r] <= at < offsets[r + 1]}
    named.discard(num_reqs)
    return RawScatter(max_reqs, max_context_len, tokens, offsets, rows, prefix_lens, frozenset(named))
