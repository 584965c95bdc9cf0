"""New batches from old ones, on the device: the tokens that go with what ``rearrange`` does to the layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import attrs
import numpy as np
import torch

from ragged import derived, rearrange
from ragged.convert import Coercion, Int64Array
from ragged.errors import RaggedValueError
from ragged.layout import RaggedLayout
from ragged.packing import views
from ragged.staging import StagingRing
from ragged.tokens import NO_COUNTS, TokenCounts

NOTHING: Int64Array = np.empty(0, dtype=np.int64)


class Made(NamedTuple):
    """What a batch is made of; see RaggedBatch for the fields."""

    layout: RaggedLayout
    packed: torch.Tensor
    device_tokens: torch.Tensor | None = None
    counts: TokenCounts | None = None
    coercions: tuple[Coercion, ...] = ()


@attrs.frozen
class Source:
    """What a batch gives to a new one."""

    layout: RaggedLayout
    token_ids: torch.Tensor
    counts: TokenCounts | None

    @property
    def counts_of_part(self) -> TokenCounts | None:
        """A part of a batch without special tokens has none; otherwise the host has not counted the part."""
        return self.counts if self.counts == NO_COUNTS else None


def select(source: Source, indices: Int64Array) -> Made:
    """The requests at ``indices`` int64 ``[n]``, in that order."""
    layout, device = rearrange.select(source.layout, indices), source.token_ids.device
    sent = _send_header(layout, device, source.layout.offsets[indices])
    header, starts = sent.split_with_sizes([len(sent) - len(indices), len(indices)])
    offsets = views(header, layout).offsets
    owners = derived.req_ids(offsets, layout.num_tokens)
    flat = torch.arange(layout.num_tokens, dtype=torch.int64, device=device)
    tokens = source.token_ids[flat + (starts - offsets[:-1])[owners]]
    return Made(layout, torch.cat([header, tokens]), counts=source.counts_of_part)


def concat(sources: Sequence[Source]) -> Made:
    """All requests of several batches, in order; all on one device."""
    layout = rearrange.concat([source.layout for source in sources])
    device = sources[0].token_ids.device
    counts: TokenCounts | None = NO_COUNTS
    for position, source in enumerate(sources):
        if source.token_ids.device != device:
            raise RaggedValueError(
                f"batches must share one device, got {source.token_ids.device} at {position} after {device}",
                argument="batches",
                got=str(source.token_ids.device),
                bound=str(device),
            )
        counts = None if counts is None or source.counts is None else counts + source.counts
    header = _send_header(layout, device)
    return Made(layout, torch.cat([header, *(source.token_ids for source in sources)]), counts=counts)


def split(source: Source, max_tokens: int) -> list[Made]:
    """Pieces of at most ``max_tokens`` tokens."""
    first, pieces = 0, []
    for layout in rearrange.split(source.layout, max_tokens):
        tokens = source.token_ids[first : first + layout.num_tokens]
        first += layout.num_tokens
        packed = torch.cat([_send_header(layout, tokens.device), tokens])
        pieces.append(Made(layout, packed, counts=source.counts_of_part))
    return pieces


def pad_to(source: Source, num_reqs: int) -> Made:
    """Empty requests appended."""
    layout = rearrange.pad_to(source.layout, num_reqs)
    packed = torch.cat([_send_header(layout, source.token_ids.device), source.token_ids])
    return Made(layout, packed, counts=source.counts)


def _send_header(layout: RaggedLayout, device: torch.device, column: Int64Array = NOTHING) -> torch.Tensor:
    """The packed header, and behind it a column that is wanted on the device, in one copy."""
    ring = StagingRing(device, num_slots=1)
    size = len(layout.header)
    slot = ring.acquire(size + len(column))
    slot.array[:size] = layout.header
    slot.array[size : size + len(column)] = column
    return ring.send(slot, 0, size + len(column))
