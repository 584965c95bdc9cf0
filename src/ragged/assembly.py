"""Assembling a batch: requests in, one packed buffer out. The work behind the builder and the constructors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch

from ragged import rearrange
from ragged.bounds import Bounds, Capacity, Overflow, duplicate_row
from ragged.convert import Coercion, Converter, Int64Array, Mode
from ragged.errors import RaggedError, RaggedValueError
from ragged.header import starts
from ragged.integers import as_int
from ragged.join import join
from ragged.layout import RaggedLayout
from ragged.options import as_ids
from ragged.regroup import Made
from ragged.rules import HasLength, apply
from ragged.sequences import Sequences, count, mixed_devices, read_flat, read_part, read_sequences
from ragged.staging import Slot, StagingRing
from ragged.tokens import NO_COUNTS, TokenRules, WideTokens


@attrs.define
class _Pending:
    """Requests taken one by one, not yet a layout."""

    rows: list[int] = attrs.field(factory=list)
    lengths: list[int] = attrs.field(factory=list)
    prefix_lens: list[int] = attrs.field(factory=list)
    req_ids: list[object] = attrs.field(factory=list)

    def take(self, row: int, length: int, prefix_len: int, req_id: object) -> None:
        self.rows.append(row)
        self.lengths.append(length)
        self.prefix_lens.append(prefix_len)
        self.req_ids.append(req_id)

    def layout(self, bounds: Bounds) -> RaggedLayout:
        return RaggedLayout(
            lengths=np.array(self.lengths, dtype=np.int64),
            req_pool_indices=np.array(self.rows, dtype=np.int64),
            prefix_lens=np.array(self.prefix_lens, dtype=np.int64),
            req_ids=tuple(self.req_ids) if any(i is not None for i in self.req_ids) else None,
            bounds=bounds,
        )


class Assembly:
    """Requests under way to become a batch. Every method either takes all of its input or changes nothing.

    Host tokens are copied at once into a slot of the staging ring, behind room for the header; ``finish`` writes the
    header just before them, so that what is sent is one piece and nothing is copied twice.
    """

    def __init__(
        self,
        *,
        device: torch.device | str = "cpu",
        mode: Mode | str = Mode.STRICT,
        vocab_size: int | None = None,
        pool_shape: tuple[int, int] | None = None,
        overflow: Overflow | str = Overflow.RAISE,
        allow_placeholders: bool = False,
        wide_tokens: WideTokens | str = WideTokens.REFUSE,
        padding_row: int | None = None,
        capacity: Capacity | None = None,
    ) -> None:
        self.mode = Mode(mode)
        self.bounds = Bounds(pool_shape, overflow, padding_row, capacity)
        self.token_rules = TokenRules(vocab_size, allow_placeholders, wide_tokens)
        self.ring = StagingRing(device)
        self._static: torch.Tensor | None = None
        if self.bounds.capacity is not None:
            size = starts(self.bounds.capacity.max_reqs).token_ids + self.bounds.capacity.max_tokens
            with torch.inference_mode(False):
                self._static = torch.zeros(size, dtype=torch.int64, device=self.ring.device)
        self._slot: Slot | None = None
        self._reserve = starts(64).token_ids
        self._pending = _Pending()
        nothing = np.empty(0, dtype=np.int64)
        self._nothing = RaggedLayout(lengths=nothing, req_pool_indices=nothing, bounds=self.bounds)
        self._last = self._nothing  # of the batch before
        self._reset()

    def _reset(self) -> None:
        self._layout = self._nothing
        if self._pending.rows:
            self._pending = _Pending()
        self._taken: dict[int, int] | None = {}  # row -> request with tokens; None: to be counted anew
        self._num_tokens = 0  # staged on the host
        self._device_parts: list[torch.Tensor] = []
        self._counts = NO_COUNTS
        self._coercions: list[Coercion] = []

    def __len__(self) -> int:
        return self._layout.num_reqs + len(self._pending.rows)

    def clear(self) -> None:
        """Forget what was taken; the slot stays acquired, for nothing has been sent from it."""
        self._reset()

    def add(self, row: Any, parts: Sequence[Any], prefix_len: Any, req_id: object) -> None:
        """One request, its tokens joined from ``parts``."""
        request = len(self)
        row = as_int(row, "req_pool_index", request=request, req_id=req_id)
        prefix_len = as_int(prefix_len, "prefix_len", request=request, req_id=req_id)
        convert = Converter(self.mode)
        read = [read_part(part, convert, self.ring.device, request, req_id) for part in parts]
        length = sum(part.shape[0] for part in read)
        self.bounds.check(request, row, length, prefix_len, req_id)
        self.bounds.check_sizes(request + 1, self._num_tokens + sum(map(len, self._device_parts)) + length)
        if length and row in (taken := self._rows_taken()):
            first = taken[row]
            raise duplicate_row(row, first, request, self._flushed().req_id(first), req_id)
        host = [part for part in read if isinstance(part, np.ndarray) and len(part)]
        device = [part for part in read if isinstance(part, torch.Tensor) and len(part)]
        if host and device:
            raise mixed_devices(request, req_id, self.ring.device)
        offsets = np.array([0, length], dtype=np.int64)
        self._take_tokens(Sequences(offsets[1:], host, device), offsets, (req_id,))
        self._pending.take(row, length, prefix_len, req_id)
        if length and self._taken is not None:
            self._taken[row] = request
        self._coercions += convert.coercions

    def extend(self, rows: Any, sequences: Any, prefix_lens: Any, req_ids: Sequence[object] | None) -> None:
        """Many requests at once, one sequence each."""
        req_ids, first = as_ids(req_ids), len(self)
        convert = Converter(self.mode, first_request=first, req_ids=req_ids)
        rows = convert.host(rows, "req_pool_indices")
        _same_number(rows, count(sequences), req_ids)
        read = read_sequences(sequences, convert, self.ring.device, req_ids, first)
        self._take(convert, read.lengths, rows, prefix_lens, req_ids, read)

    def extend_flat(
        self,
        token_ids: Any,
        lengths: Int64Array,
        rows: Any,
        prefix_lens: Any,
        req_ids: Sequence[object] | None,
        *,
        convert: Converter,
        total: str,
    ) -> None:
        """Many requests at once, from flat tokens; ``total`` says in words what the tokens must number."""
        rows, ids = convert.host(rows, "req_pool_indices"), as_ids(req_ids)
        try:
            read = read_flat(token_ids, convert, self.ring.device)
        except RaggedError:
            fits = isinstance(token_ids, list | tuple) and sum(lengths.tolist()) == len(token_ids)
            if fits and not (lengths < 0).any():  # one list a request: then the culprit has a name
                bounds = zip(lengths.tolist(), lengths.cumsum().tolist(), strict=True)
                parts = [token_ids[end - length : end] for length, end in bounds]
                names = ids if ids is not None and len(ids) == len(parts) else None
                read_sequences(parts, convert, self.ring.device, names)
            raise
        got, bound = int(read.lengths[0]), sum(lengths.tolist())
        if got != bound and not (lengths < 0).any():
            raise RaggedValueError(
                f"token_ids length {got} != {total} ({bound})", argument="token_ids", got=got, bound=bound
            )
        self._take(convert, lengths, rows, prefix_lens, ids, read)

    def finish(self) -> Made:
        """The parts of the batch; on success the assembly is empty again."""
        layout, capacity = self._flushed(), self.bounds.capacity
        if capacity is not None:
            layout = rearrange.pad_to(layout, capacity.max_reqs)
        header = len(layout.header)
        slot = self._room(header, 0)
        start = self._reserve - header
        slot.array[start : self._reserve] = layout.header
        packed = self.ring.send(slot, start, self._reserve + self._num_tokens, into=self._static)
        tokens, counts = _joined(self._device_parts), None if self._device_parts else self._counts
        if self._static is not None and tokens is not None:
            self._static[header : header + len(tokens)].copy_(tokens)
            packed, tokens = self._static[: header + len(tokens)], None
        made = Made(layout, packed, tokens, counts, tuple(self._coercions))
        self._slot, self._last = None, layout
        self._reset()
        return made

    def _take(
        self,
        convert: Converter,
        lengths: Int64Array,
        rows: Int64Array,
        prefix_lens: Any,
        req_ids: tuple[object, ...] | None,
        read: Sequences,
    ) -> None:
        """Check a group of requests, stage its tokens, and only then count it in."""
        if prefix_lens is None:
            prefix_lens = np.zeros(len(lengths), dtype=np.int64)
        else:
            prefix_lens = convert.host(prefix_lens, "prefix_lens")
            if len(prefix_lens) != len(lengths):
                rule = HasLength("prefix_lens", "number of requests", lambda _: len(lengths))
                apply([rule], {"prefix_lens": prefix_lens})
        first = len(self)
        if first:  # one layout over old and new, so that positions and duplicates are the whole batch's
            old = self._flushed()
            lengths, rows = np.concatenate([old.lengths, lengths]), np.concatenate([old.req_pool_indices, rows])
            prefix_lens = np.concatenate([old.prefix_lens, prefix_lens])
            if old.req_ids is not None or req_ids is not None:
                new = len(lengths) - first
                req_ids = (old.req_ids or (None,) * first) + (req_ids or (None,) * new)
        if self._last.has(lengths, rows):
            layout = self._last.moved(prefix_lens, req_ids)
        else:
            layout = RaggedLayout(
                lengths=lengths, req_pool_indices=rows, prefix_lens=prefix_lens, req_ids=req_ids, bounds=self.bounds
            )
        offsets = layout.offsets[first:] - layout.offsets[first] if first else layout.offsets
        self._take_tokens(read, offsets, None if layout.req_ids is None else layout.req_ids[first:])
        self._layout, self._taken = layout, None
        if self._pending.rows:
            self._pending = _Pending()
        self._coercions += convert.coercions

    def _take_tokens(self, read: Sequences, offsets: Int64Array, req_ids: tuple[object, ...] | None) -> None:
        """Copy the tokens of the requests after those taken; ``offsets`` start at 0."""
        num_reqs, num_tokens = len(offsets) - 1, int(offsets[-1])
        if num_tokens == 0:
            return  # an empty request comes from nowhere
        if (read.device_parts and self._num_tokens) or (read.parts and self._device_parts):
            raise mixed_devices(len(self), None if req_ids is None else req_ids[0], self.ring.device)
        if read.device_parts:
            self._device_parts.append(torch.cat(read.device_parts))
        else:
            slot = self._room(starts(len(self) + num_reqs).token_ids, num_tokens)
            first = self._reserve + self._num_tokens
            staged = slot.array[first : first + num_tokens]
            if join(read.parts, staged) > self.token_rules.largest:
                self._counts += self.token_rules.check(staged, offsets, first_request=len(self), req_ids=req_ids)
            self._num_tokens += num_tokens

    def _room(self, header: int, more_tokens: int) -> Slot:
        """The acquired slot, with room for a header of this size and so many more tokens."""
        if self._slot is None:
            self._reserve = max(self._reserve, header)
            self._slot = self.ring.acquire(self._reserve + more_tokens)
            return self._slot
        slot = self._slot
        needed = max(self._reserve, header) + self._num_tokens + more_tokens
        if needed > len(slot.array):
            self.ring.grow(slot, needed)
        if header > self._reserve:
            staged = slot.array[self._reserve : self._reserve + self._num_tokens]
            slot.array[header : header + self._num_tokens] = staged.copy()
            self._reserve = header
        return slot

    def _flushed(self) -> RaggedLayout:
        """All requests taken so far as one layout."""
        if not self._pending.rows:
            return self._layout
        pending = self._pending.layout(self.bounds)
        return rearrange.concat([self._layout, pending]) if self._layout.num_reqs else pending

    def _rows_taken(self) -> dict[int, int]:
        if self._taken is None:
            layout = self._flushed()
            used = np.flatnonzero(layout.lengths)
            self._taken = dict(zip(layout.req_pool_indices[used].tolist(), used.tolist(), strict=True))
        return self._taken


def _joined(parts: list[torch.Tensor]) -> torch.Tensor | None:
    """Device parts are copies already, so a single one is taken as it is."""
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _same_number(rows: Int64Array, num_sequences: int, req_ids: tuple[object, ...] | None) -> None:
    """As many sequences and ids as rows."""
    if num_sequences != len(rows) or (req_ids is not None and len(req_ids) != len(rows)):
        numbers = {"sequences": num_sequences, "req_ids": len(rows) if req_ids is None else len(req_ids)}
        given = {name: np.empty(number, dtype=np.bool_) for name, number in numbers.items()}
        apply([HasLength(name, "number of req_pool_indices", lambda _: len(rows)) for name in given], given)
