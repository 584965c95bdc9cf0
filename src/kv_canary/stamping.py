"""What every backend of the stamps takes: the canary's own memory, a source of KV bytes, a plan of checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import attrs
import torch

from kv_canary.guards import POOL
from ragged.errors import RaggedTypeError, RaggedValueError
from ragged.integers import as_int

WORD = 8
"""Bytes of a word that is hashed at a time."""


class Memory(NamedTuple):
    """Device memory of a canary, int64: stamps ``[num_slots, STAMP_FIELDS]``, the log's table, the state, counters."""

    stamps: torch.Tensor
    log: torch.Tensor
    state: torch.Tensor
    counters: torch.Tensor


class Pooled(NamedTuple):
    """The tokens that stamps are held against: int32 ``[max_reqs, max_context_len]``, int64 ``[max_reqs]``."""

    tokens: torch.Tensor
    valid_lens: torch.Tensor


class Checks(NamedTuple):
    """Which stamps a verification looks at.

    table: int32 or int64 ``[max_reqs, max_context_len]``, the slot of each position of each row.
    rows, lens: int64 ``[num_reqs]``.
    window: how many last positions; period: every how manieth of them.
    most: at most so many checks in all, known to the host.
    """

    table: torch.Tensor
    rows: torch.Tensor
    lens: torch.Tensor
    window: int
    period: int
    most: int


@attrs.frozen(eq=False)
class KVSource:
    """KV bytes of each slot: which memory, and how a slot finds its own in it.

    Slot s begins ``(s // page_size) * page_stride + (s % page_size) * token_stride`` bytes into ``tensor``.

    Args:
        tensor: on the canary's device, of any dtype and shape; layers and heads are sources of their own.
        bytes_per_token: contiguous bytes that a slot has there.
        page_size: slots a page.
        token_stride: bytes from a slot to the next one in its page; ``bytes_per_token`` where not given.
        page_stride: bytes from a page to the next; ``page_size * token_stride`` where not given.
        leading_bytes: how many of a slot's bytes are read; all where not given.

    Raises: RaggedTypeError, RaggedValueError. Bytes are read in words of 8: a length, stride or address that is no
        multiple of 8 is refused.
    """

    tensor: torch.Tensor
    bytes_per_token: int
    page_size: int = attrs.field(default=1, kw_only=True)
    token_stride: int = attrs.field(default=0, kw_only=True)
    page_stride: int = attrs.field(default=0, kw_only=True)
    leading_bytes: int = attrs.field(default=0, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.tensor, torch.Tensor) or self.tensor.layout is not torch.strided:
            got = type(self.tensor).__name__
            raise RaggedTypeError(f"{POOL}kv_sources tensor must be a tensor, got {got}", argument="kv_sources")
        put = object.__setattr__
        put(self, "bytes_per_token", as_int(self.bytes_per_token, "bytes_per_token", least=WORD))
        put(self, "page_size", as_int(self.page_size, "page_size", least=1))
        put(self, "token_stride", as_int(self.token_stride, "token_stride", least=0) or self.bytes_per_token)
        whole = self.page_size * self.token_stride
        put(self, "page_stride", as_int(self.page_stride, "page_stride", least=0) or whole)
        put(self, "leading_bytes", as_int(self.leading_bytes, "leading_bytes", least=0) or self.bytes_per_token)
        if self.leading_bytes > self.bytes_per_token:
            self._refuse("leading_bytes", f"must be at most bytes_per_token {self.bytes_per_token}", self.leading_bytes)
        for name in ("leading_bytes", "token_stride", "page_stride"):
            if getattr(self, name) % WORD:
                self._refuse(name, f"must be a multiple of {WORD}", getattr(self, name))
        if self.tensor.data_ptr() % WORD:
            self._refuse("tensor", f"must be aligned to {WORD} bytes", self.tensor.data_ptr() % WORD)

    def check(self, num_slots: int, device: torch.device) -> None:
        """Whether every slot's bytes lie inside the tensor.

        Raises: RaggedValueError naming the last slot that does, or both devices.
        """
        if self.tensor.device != device:
            self._refuse("tensor", f"must be on {device}", str(self.tensor.device))
        last = num_slots - 1
        pages, rest = divmod(last, self.page_size)
        inner = min(last, self.page_size - 1) * self.token_stride if pages else rest * self.token_stride
        ends = max(pages * self.page_stride + rest * self.token_stride, max(pages - 1, 0) * self.page_stride + inner)
        if (needed := ends + self.leading_bytes) > (held := _bytes_of(self.tensor)):
            self._refuse("tensor", f"must hold {needed} bytes for {num_slots} slots", held)

    def words(self) -> torch.Tensor:
        """The tensor's memory from its first byte on, int64 ``[n]``, a view."""
        count = _bytes_of(self.tensor) // WORD
        flat = torch.as_strided(self.tensor, (count * WORD // self.tensor.element_size(),), (1,))
        return flat.view(torch.int64)

    def _refuse(self, name: str, says: str, got: object) -> None:
        raise RaggedValueError(f"{POOL}kv_sources {name} {says}, got {got}", argument="kv_sources", got=got)


def _bytes_of(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its memory."""
    return int(tensor.untyped_storage().nbytes()) - int(tensor.storage_offset()) * tensor.element_size()


class Turn(NamedTuple):
    """A source and the slots that it is hashed of: slot s takes those numbered ``(s + j) % among``, ``j < share``."""

    source: KVSource
    number: int
    among: int
    share: int

    def takes(self, slot: Any) -> Any:
        """Whether a slot's hash covers this source; slots may be a tensor."""
        return (self.number - slot) % self.among < self.share


def turns_of(
    sources: Sequence[KVSource], rotation: int | None, num_slots: int, device: torch.device
) -> tuple[Turn, ...]:
    """Sources that every slot can be read from, ``rotation`` of them for each slot, or all.

    Raises: RaggedTypeError, RaggedValueError.
    """
    for source in sources:
        if not isinstance(source, KVSource):
            got = type(source).__name__
            raise RaggedTypeError(f"{POOL}kv_sources must be KVSources, got {got}", argument="kv_sources", got=got)
        source.check(num_slots, device)
    among = len(sources)
    share = among if rotation is None else min(rotation, among)
    return tuple(Turn(source, number, among, share) for number, source in enumerate(sources))
