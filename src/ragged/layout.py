"""The host truth of a ragged batch, and all invariants of a layout."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import attrs
import numpy as np

from ragged.bounds import Bounds, Overflow, duplicate_row
from ragged.convert import Converter, Int64Array, Mode, is_plain
from ragged.csr import lengths_of
from ragged.errors import RaggedOverflowError, RaggedTypeError, refuses
from ragged.header import aligned, starts, with_tiles
from ragged.options import as_ids
from ragged.rules import INT64_MAX, HasLength, apply
from ragged.tiles import NO_TILES, list_tiles

NONE = (-1, 0, 0)
"""The largest row, prefix and length of no requests."""
_UNMOVED = (
    *("lengths", "req_pool_indices", "offsets", "tiles", "bounds"),
    *("num_reqs", "num_tokens", "num_empty", "max_len", "max_row"),
)
"""What a layout shares with one whose requests start at other columns."""
FEW_ROWS, SPARSE = 8192, 32
"""Below FEW_ROWS + SPARSE * num_reqs pool rows, duplicates are found by marking rows, beyond by sorting: of 256
requests on 4,096 rows in 2.2 us, not 7.3, of 100,000 on 3,000,000 in 0.35 ms, not 1.1 (one core of an AMD EPYC)."""


@attrs.frozen(eq=False, kw_only=True)
class RaggedLayout:
    """Which request owns which tokens, and where they go. numpy int64, read-only, compared by value.

    >>> layout = RaggedLayout(lengths=[3, 0, 2], req_pool_indices=[4, 1, 7], prefix_lens=[0, 0, 5])
    >>> layout.offsets.tolist(), layout.num_tokens, layout.max_len
    ([0, 3, 3, 5], 5, 3)

    Request 1 is empty: it owns ``[3, 3)``. Request 2 owns tokens 3 and 4, which go to row 7, columns 5 and 6.

    Args:
        lengths: int64 ``[num_reqs]``, tokens of each request.
        req_pool_indices: int64 ``[num_reqs]``, its pool row; unique among requests with tokens.
        prefix_lens: int64 ``[num_reqs]``, the column at which it starts; 0 where not given.
        req_ids: the caller's own ids, for messages only.
        bounds: what the layout is held against.

    Attributes:
        offsets: int64 ``[num_reqs + 1]``, CSR.
        num_reqs, num_tokens: how many.
        num_empty: requests without tokens.
        tiles: int64 ``[num_tiles, 2]``, the work list of unequal lengths, empty for even ones (see ``ragged.tiles``).
        header: int64 ``[starts(num_reqs, num_tiles).token_ids]``, all of this as it is sent (see ``ragged.header``);
            gaps are 0, so that equal layouts have equal bytes.
        max_len, max_row, max_prefix_len, max_end: the largest length, row, prefix and end column (row -1 for none).

    Raises: RaggedTypeError, RaggedValueError, RaggedOverflowError; each names the request, the value and the bound.
    """

    lengths: Int64Array
    req_pool_indices: Int64Array
    prefix_lens: Int64Array = attrs.field(default=None)
    req_ids: tuple[object, ...] | None = attrs.field(default=None, converter=as_ids)
    bounds: Bounds = attrs.Factory(Bounds)
    offsets: Int64Array = attrs.field(init=False)
    num_reqs: int = attrs.field(init=False)
    num_tokens: int = attrs.field(init=False)
    tiles: Int64Array = attrs.field(init=False)
    header: Int64Array = attrs.field(init=False, repr=False)
    num_empty: int = attrs.field(init=False)
    max_len: int = attrs.field(init=False)
    max_row: int = attrs.field(init=False)
    max_prefix_len: int = attrs.field(init=False)

    @refuses
    def __attrs_post_init__(self) -> None:
        lengths, rows, prefix_lens = _columns(self)
        num_reqs = len(lengths)
        at, column = starts(num_reqs), aligned(num_reqs)
        # The header, and behind it a column of lengths: one memory, so that one reduction screens all three columns.
        memory = np.zeros(at.tiles + column, dtype=np.int64)
        memory[at.tiles : at.tiles + num_reqs] = lengths
        memory[at.req_pool_indices : at.req_pool_indices + num_reqs] = rows
        memory[at.prefix_lens : at.prefix_lens + num_reqs] = prefix_lens
        np.add.accumulate(lengths, out=memory[1 : num_reqs + 1])
        memory.setflags(write=False)
        table = memory[at.req_pool_indices :].reshape(3, column)
        # As uint64 a negative number is a huge one, so both ends are screened.
        max_row, max_prefix_len, max_len = np.maximum.reduce(table.view(np.uint64), 1).tolist() if num_reqs else NONE
        put = object.__setattr__
        put(self, "lengths", table[2, :num_reqs])
        put(self, "req_pool_indices", table[0, :num_reqs])
        put(self, "prefix_lens", table[1, :num_reqs])
        put(self, "offsets", memory[: num_reqs + 1])
        put(self, "num_reqs", num_reqs)
        put(self, "num_tokens", int(memory[num_reqs]))
        put(self, "num_empty", num_reqs - np.count_nonzero(lengths))
        put(self, "max_len", max_len)
        put(self, "max_row", max_row)
        put(self, "max_prefix_len", max_prefix_len)
        _check(self)
        # Where buffers are of fixed sizes, kernels learn the lengths on the device.
        fixed = self.bounds.capacity is not None
        tiles = NO_TILES if fixed else list_tiles(self.lengths, max_len, self.num_tokens)
        put(self, "tiles", tiles)
        put(self, "header", with_tiles(memory[: at.tiles], tiles))

    @refuses
    def moved(self, prefix_lens: Int64Array, req_ids: tuple[object, ...] | None) -> RaggedLayout:
        """The same rows and lengths at other columns: a decode step's layout from the one before.

        Only what columns decide is checked again: 6 us instead of 25 for 256 requests (one core of an AMD EPYC).

        Args:
            prefix_lens: int64 ``[num_reqs]``, contiguous.
            req_ids: of this step.
        """
        if len(prefix_lens) != self.num_reqs or (req_ids is not None and len(req_ids) != self.num_reqs):
            return attrs.evolve(self, prefix_lens=prefix_lens, req_ids=req_ids)  # which refuses it
        first = starts(self.num_reqs).prefix_lens
        header = self.header.copy()
        own = header[first : first + self.num_reqs]
        own[:] = prefix_lens
        header.setflags(write=False)
        own.setflags(write=False)
        moved = object.__new__(RaggedLayout)
        put = object.__setattr__
        for name in _UNMOVED:
            put(moved, name, getattr(self, name))
        put(moved, "header", header)
        put(moved, "prefix_lens", own)
        put(moved, "req_ids", req_ids)
        put(moved, "max_prefix_len", int(np.maximum.reduce(own.view(np.uint64))) if self.num_reqs else 0)
        _check_columns(moved)
        return moved

    def has(self, lengths: Int64Array, rows: Int64Array) -> bool:
        """Whether these are its lengths and rows, int64 ``[num_reqs]`` each, contiguous."""
        # As bytes: 0.4 us for 256 requests, np.array_equal takes 6.
        return lengths.tobytes() == self.lengths.tobytes() and rows.tobytes() == self.req_pool_indices.tobytes()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.lengths, self.req_pool_indices, self.prefix_lens, self.req_ids, self.bounds)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RaggedLayout):
            return NotImplemented
        return self._key() == other._key() and _same_ids(self.req_ids, other.req_ids)

    def __hash__(self) -> int:
        return hash(self._key())  # without ids: one may be a list

    def _key(self) -> tuple[Any, ...]:
        columns = (self.lengths, self.req_pool_indices, self.prefix_lens)
        return (self.bounds, *(column.tobytes() for column in columns))

    @classmethod
    @refuses
    def from_offsets(cls, offsets: Any, **fields: Any) -> RaggedLayout:
        """From CSR ``offsets`` int64 ``[num_reqs + 1]``, which start at 0 and never decrease."""
        values = Converter(Mode.STRICT).host(offsets, "offsets")
        return cls(lengths=lengths_of(values), **fields)

    @cached_property
    def max_end(self) -> int:
        """The largest end column."""
        if self.num_reqs == 0:
            return 0
        return int((self.prefix_lens.view(np.uint64) + self.lengths.view(np.uint64)).max())

    def reaches_beyond(self, column: int) -> bool:
        """Whether any segment ends beyond ``column``; the ends are looked at only where it cannot be ruled out."""
        return self.max_prefix_len + self.max_len > column and self.max_end > column

    @cached_property
    def dropped_tokens(self) -> int:
        """Tokens that do not fit their row under ``Overflow.TRUNCATE``; 0 where the pool is not known."""
        if self.bounds.pool_shape is None or not self.reaches_beyond(self.bounds.pool_shape[1]):
            return 0
        beyond = self.prefix_lens + self.lengths - self.bounds.pool_shape[1]
        return int(np.clip(beyond, 0, self.lengths).sum(dtype=np.int64))

    def check_pool(self, pool_shape: Sequence[int]) -> None:
        """Hold the layout against a pool's ``(max_reqs, max_context_len)``, under its own overflow policy."""
        max_reqs, max_context_len = pool_shape
        if self.max_row >= max_reqs or not _fits(self, max_context_len):
            _name_culprit(self, attrs.evolve(self.bounds, pool_shape=tuple(pool_shape)))

    def req_id(self, request: int) -> object:
        """The caller's id of a request, or None."""
        return None if self.req_ids is None else self.req_ids[request]


def _same_ids(ids: tuple[object, ...] | None, others: tuple[object, ...] | None) -> bool:
    """Whether they are equal; ids that cannot say so, such as arrays, are the same where they are one object."""
    try:
        return ids == others
    except Exception:  # an id is the caller's, and may raise anything
        return False


def _rebuild(*fields: Any) -> RaggedLayout:
    """Unpickle through the constructor: what arrives is checked like what is made here."""
    lengths, req_pool_indices, prefix_lens, req_ids, bounds = fields
    return RaggedLayout(
        lengths=lengths,
        req_pool_indices=req_pool_indices,
        prefix_lens=prefix_lens,
        req_ids=req_ids,
        bounds=bounds,
    )


def _columns(layout: RaggedLayout) -> tuple[Int64Array, Int64Array, Int64Array]:
    """The three given columns as int64 of one length."""
    if not isinstance(layout.bounds, Bounds):
        got = type(layout.bounds).__name__
        raise RaggedTypeError(f"bounds must be a Bounds, got {got}", argument="bounds", got=got)
    lengths, rows, prefix_lens = layout.lengths, layout.req_pool_indices, layout.prefix_lens
    if not (is_plain(lengths) and is_plain(rows) and is_plain(prefix_lens)):
        convert = Converter(Mode.STRICT, req_ids=layout.req_ids).host
        lengths, rows = convert(lengths, "lengths"), convert(rows, "req_pool_indices")
        none = np.zeros(len(lengths), dtype=np.int64)
        prefix_lens = none if prefix_lens is None else convert(prefix_lens, "prefix_lens")
    num_reqs, ids = len(lengths), layout.req_ids
    if len(rows) != num_reqs or len(prefix_lens) != num_reqs or (ids is not None and len(ids) != num_reqs):
        given = {"req_pool_indices": rows, "prefix_lens": prefix_lens}
        if ids is not None:
            given["req_ids"] = np.empty(len(ids), dtype=np.bool_)
        apply([HasLength(name, "number of requests", lambda _: num_reqs) for name in given], given)
    return lengths, rows, prefix_lens


def _check(layout: RaggedLayout) -> None:
    """All invariants. The screens may only err towards a closer look; ``_name_culprit`` decides and words it."""
    bounds, lengths, rows, num_reqs = layout.bounds, layout.lengths, layout.req_pool_indices, layout.num_reqs
    if num_reqs == 0:
        return
    max_reqs = INT64_MAX if bounds.pool_shape is None else bounds.pool_shape[0]
    if layout.max_len > INT64_MAX or layout.max_row > min(max_reqs - 1, INT64_MAX):
        _name_culprit(layout, bounds)
    _check_columns(layout)
    if layout.max_len > INT64_MAX // num_reqs and sum(lengths.tolist()) > INT64_MAX:
        total = sum(lengths.tolist())
        raise RaggedOverflowError(
            f"lengths must sum to at most {INT64_MAX}, got {total}", argument="lengths", got=total, bound=INT64_MAX
        )
    bounds.check_sizes(num_reqs, layout.num_tokens)
    used = rows[lengths > 0] if layout.num_empty else rows
    is_unique, is_padding = _look_for(bounds.padding_row, used, layout.max_row)
    if is_padding:
        _name_culprit(layout, bounds)
    if not is_unique:
        _name_duplicate(layout)


def _check_columns(layout: RaggedLayout) -> None:
    """The invariants of where requests start and end."""
    max_context_len = INT64_MAX if layout.bounds.pool_shape is None else layout.bounds.pool_shape[1]
    beyond = layout.max_prefix_len > INT64_MAX or layout.reaches_beyond(INT64_MAX)
    if beyond or not _fits(layout, max_context_len):
        _name_culprit(layout, layout.bounds)


def _look_for(padding_row: int | None, rows: Int64Array, max_row: int) -> tuple[bool, bool]:
    """Whether all rows differ, and whether any is the padding row."""
    if max_row < FEW_ROWS + SPARSE * len(rows):
        marked = np.zeros(max_row + 1, dtype=np.bool_)
        marked[rows] = True
        is_unique = np.count_nonzero(marked) == len(rows)
        return is_unique, padding_row is not None and padding_row <= max_row and bool(marked[padding_row])
    rows = np.sort(rows)
    return not np.count_nonzero(rows[1:] == rows[:-1]), padding_row is not None and padding_row in rows


def _fits(layout: RaggedLayout, max_context_len: int) -> bool:
    """Under its own overflow policy."""
    if layout.bounds.overflow is Overflow.RAISE:
        return not layout.reaches_beyond(max_context_len)
    return layout.max_prefix_len <= max_context_len


def _name_culprit(layout: RaggedLayout, bounds: Bounds) -> None:
    """The slow path of a refusal: request by request, until one is found."""
    columns = (layout.req_pool_indices.tolist(), layout.lengths.tolist(), layout.prefix_lens.tolist())
    for request, (row, length, prefix_len) in enumerate(zip(*columns, strict=True)):
        bounds.check(request, row, length, prefix_len, layout.req_id(request))


def _name_duplicate(layout: RaggedLayout) -> None:
    owner: dict[int, int] = {}
    for request, (row, length) in enumerate(
        zip(layout.req_pool_indices.tolist(), layout.lengths.tolist(), strict=True)
    ):
        if length and row in owner:
            raise duplicate_row(row, owner[row], request, layout.req_id(owner[row]), layout.req_id(request))
        if length:
            owner[row] = request
