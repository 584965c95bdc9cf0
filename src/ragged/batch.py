"""RaggedBatch: a checked layout and its tensors on the device, as views of one packed buffer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Unpack

import attrs
import torch

from ragged import derived, interop, regroup
from ragged.assembly import Assembly
from ragged.convert import Coercion, Converter, Mode
from ragged.csr import lengths_of
from ragged.errors import RaggedTypeError, refuses
from ragged.layout import RaggedLayout
from ragged.options import BatchOptions, as_ids
from ragged.packing import Views, check_parts, views
from ragged.rules import HasLength, apply
from ragged.staging import resolve_device
from ragged.tokens import TokenCounts


@attrs.frozen(eq=False, repr=False)
class RaggedBatch:
    """Requests of different lengths, on the device, correct by construction.

    >>> batch = RaggedBatch.from_sequences([[5, 6, 7], [], [8, 9]], req_pool_indices=[4, 1, 7])
    >>> batch
    RaggedBatch(num_reqs=3, num_tokens=5, lengths=[3, 0, 2], rows=[4, 1, 7], device=cpu)
    >>> batch.offsets.tolist(), batch.req_ids.tolist(), batch.last_token_indices.tolist()
    ([0, 3, 3, 5], [0, 0, 0, 2, 2], [2, -1, 4])

    A batch owns its data: the caller may change or free its arrays as soon as the call returns. Nothing here syncs
    with the device, but for ``to`` and ``from_nested`` of a device's tensor. Batches compare by identity, layouts by
    value.

    Attributes:
        layout: the host truth, numpy arrays.
        packed: int64, offsets, rows, prefixes, tiles and tokens one after the other (see ``ragged.packing``).
        device_tokens: tokens that came in on the device, copied there and unseen by the host; else None.
        counts: placeholders and wide ids among the tokens; None for tokens the host has not seen.
        coercions: the conversions that coerce mode paid for.
    """

    layout: RaggedLayout
    packed: torch.Tensor
    device_tokens: torch.Tensor | None = None
    counts: TokenCounts | None = None
    coercions: tuple[Coercion, ...] = ()

    def __attrs_post_init__(self) -> None:
        check_parts(self.layout, self.packed, self.device_tokens)

    @classmethod
    @refuses
    def from_sequences(
        cls,
        seqs: Any,
        *,
        req_pool_indices: Any,
        prefix_lens: Any = None,
        req_ids: Sequence[object] | None = None,
        **options: Unpack[BatchOptions],
    ) -> RaggedBatch:
        """From one token sequence a request: list, tuple, range, array.array, numpy array, buffer, DLPack, tensor.

        ``options`` are ``ragged.options.BatchOptions``: device, mode, vocab_size, pool_shape and so on.
        """
        assembly = Assembly(**options)
        assembly.extend(req_pool_indices, seqs, prefix_lens, req_ids)
        return batch_of(assembly.finish())

    @classmethod
    @refuses
    def from_lengths(
        cls,
        token_ids: Any,
        lengths: Any,
        *,
        req_pool_indices: Any,
        prefix_lens: Any = None,
        req_ids: Sequence[object] | None = None,
        **options: Unpack[BatchOptions],
    ) -> RaggedBatch:
        """From flat ``token_ids`` [num_tokens] and ``lengths`` [num_reqs]; keywords as in ``from_sequences``."""
        assembly, req_ids = Assembly(**options), as_ids(req_ids)
        convert = Converter(assembly.mode, req_ids=req_ids)
        counted = convert.host(lengths, "lengths")
        assembly.extend_flat(
            token_ids, counted, req_pool_indices, prefix_lens, req_ids, convert=convert, total="sum of lengths"
        )
        return batch_of(assembly.finish())

    @classmethod
    @refuses
    def from_offsets(
        cls,
        token_ids: Any,
        offsets: Any,
        *,
        req_pool_indices: Any,
        prefix_lens: Any = None,
        req_ids: Sequence[object] | None = None,
        **options: Unpack[BatchOptions],
    ) -> RaggedBatch:
        """From flat ``token_ids`` [num_tokens], CSR ``offsets`` [num_reqs + 1]; keywords as in ``from_sequences``."""
        assembly, req_ids = Assembly(**options), as_ids(req_ids)
        convert = Converter(assembly.mode, req_ids=req_ids)
        rows = convert.host(req_pool_indices, "req_pool_indices")
        given = {"offsets": convert.host(offsets, "offsets")}
        apply([HasLength("offsets", "number of req_pool_indices + 1", lambda _: len(rows) + 1)], given)
        lengths = lengths_of(given["offsets"])
        assembly.extend_flat(token_ids, lengths, rows, prefix_lens, req_ids, convert=convert, total="last of offsets")
        return batch_of(assembly.finish())

    @classmethod
    @refuses
    def from_nested(
        cls,
        nested: torch.Tensor,
        *,
        req_pool_indices: Any,
        prefix_lens: Any = None,
        req_ids: Sequence[object] | None = None,
        **options: Unpack[BatchOptions],
    ) -> RaggedBatch:
        """From a jagged ``torch.nested`` tensor. Offsets on a device are read back: this syncs."""
        token_ids, offsets = interop.from_nested(nested)
        own = {"req_pool_indices": req_pool_indices, "prefix_lens": prefix_lens, "req_ids": req_ids}
        return cls.from_offsets(token_ids, offsets.cpu(), **own, **options)

    @property
    def num_reqs(self) -> int:
        return self.layout.num_reqs

    @property
    def num_tokens(self) -> int:
        return self.layout.num_tokens

    @property
    def max_len(self) -> int:
        """The longest request, as a Python int."""
        return self.layout.max_len

    @property
    def device(self) -> torch.device:
        return self.packed.device

    @property
    def dropped_tokens(self) -> int:
        """Tokens that ``Overflow.TRUNCATE`` drops at the pool's edge; 0 where ``pool_shape`` was not given."""
        return self.layout.dropped_tokens

    @property
    def num_placeholders(self) -> int | None:
        """Tokens of -1; None where the host has not seen the tokens."""
        return None if self.counts is None else self.counts.placeholders

    @property
    def num_wide_tokens(self) -> int | None:
        """Tokens above 2^31-1; None where the host has not seen the tokens."""
        return None if self.counts is None else self.counts.wide

    @cached_property
    def _views(self) -> Views:
        # Made at first use: a step that only scatters needs none, and each costs over a microsecond.
        return views(self.packed, self.layout)

    @property
    def offsets(self) -> torch.Tensor:
        """int64 ``[num_reqs + 1]``, CSR."""
        return self._views.offsets

    @property
    def req_pool_indices(self) -> torch.Tensor:
        """int64 ``[num_reqs]``, the pool row of each request."""
        return self._views.req_pool_indices

    @property
    def prefix_lens(self) -> torch.Tensor:
        """int64 ``[num_reqs]``, the column at which each request starts."""
        return self._views.prefix_lens

    @property
    def tiles(self) -> torch.Tensor:
        """int64 ``[num_tiles, 2]``, request and tile of a kernel's work list; empty for even lengths."""
        return self._views.tiles

    @property
    def token_ids(self) -> torch.Tensor:
        """int64 ``[num_tokens]``. Those that came in on the device are the device guards' to check."""
        return self._views.token_ids if self.device_tokens is None else self.device_tokens

    @cached_property
    def cu_seqlens(self) -> torch.Tensor:
        """int32 ``[num_reqs + 1]``; RaggedOverflowError past 2^31-1 tokens."""
        return derived.cu_seqlens(self.offsets, self.num_tokens)

    @cached_property
    def req_ids(self) -> torch.Tensor:
        """int64 ``[num_tokens]``: the request of every token (``layout.req_ids`` has the caller's names)."""
        return derived.req_ids(self.offsets, self.num_tokens)

    @cached_property
    def positions(self) -> torch.Tensor:
        """int64 ``[num_tokens]``: the column of every token, its prefix included."""
        return derived.positions(self.offsets, self.prefix_lens, self.req_ids)

    @cached_property
    def last_token_indices(self) -> torch.Tensor:
        """int64 ``[num_reqs]``: index of each request's last token, -1 for an empty request."""
        return derived.last_token_indices(self.offsets)

    @refuses
    def select(self, indices: Any) -> RaggedBatch:
        """A new batch of the requests at ``indices`` (host integers), in that order."""
        return batch_of(regroup.select(self._source(), Converter(Mode.STRICT).host(indices, "indices")))

    @staticmethod
    @refuses
    def concat(batches: Sequence[RaggedBatch]) -> RaggedBatch:
        """A new batch of all requests of ``batches``, in order; all on one device, with the same bounds."""
        wrong: list[Any] = [batches]
        if isinstance(batches, list | tuple):
            wrong = [batch for batch in batches if not isinstance(batch, RaggedBatch)]
        if wrong:
            got = type(wrong[0]).__name__
            raise RaggedTypeError(f"batches must be a list of RaggedBatch, got {got}", argument="batches", got=got)
        return batch_of(regroup.concat([batch._source() for batch in batches]))

    @refuses
    def split(self, max_tokens: int) -> list[RaggedBatch]:
        """New batches of at most ``max_tokens`` tokens each, in order: chunked prefill.

        A request may be cut; its later part has the ``prefix_len`` at which the earlier one ended.
        """
        return [batch_of(made) for made in regroup.split(self._source(), max_tokens)]

    @refuses
    def pad_to(self, num_reqs: int) -> RaggedBatch:
        """A new batch with empty requests appended; they point to the padding row, row 0 where none is set."""
        return batch_of(regroup.pad_to(self._source(), num_reqs))

    @refuses
    def to(self, device: torch.device | str) -> RaggedBatch:
        """The same batch on another device, which syncs; itself where it is there already."""
        target = resolve_device(device)
        if target == self.device:
            return self
        tokens = None if self.device_tokens is None else self.device_tokens.to(target)
        return attrs.evolve(self, packed=self.packed.to(target), device_tokens=tokens)

    def unbind(self) -> tuple[torch.Tensor, ...]:
        """Each request's tokens, int64 ``[length]``, as views."""
        return self.token_ids.split_with_sizes(self.layout.lengths.tolist())

    @refuses
    def to_nested(self) -> torch.Tensor:
        """A jagged ``torch.nested`` tensor over the same memory; RaggedValueError for zero requests."""
        return interop.to_nested(self.token_ids, self.offsets, self.layout.lengths)

    @refuses
    def to_padded(self, value: int) -> torch.Tensor:
        """int64 ``[num_reqs, max_len]``, each row a request's tokens, then ``value``."""
        return interop.to_padded(self.token_ids, self.offsets, self.req_ids, self.max_len, value)

    def __repr__(self) -> str:
        unusual = ("num_placeholders", "num_wide_tokens", "dropped_tokens")
        extras = "".join(f", {name}={getattr(self, name)}" for name in unusual if getattr(self, name))
        lengths, rows = _first(self.layout.lengths), _first(self.layout.req_pool_indices)
        numbers = f"num_reqs={self.num_reqs}, num_tokens={self.num_tokens}"
        return f"RaggedBatch({numbers}, lengths={lengths}, rows={rows}{extras}, device={self.device})"

    def __reduce__(self) -> tuple[Any, ...]:
        tokens = None if self.device_tokens is None else _owned(self.device_tokens)
        return RaggedBatch, (self.layout, _owned(self.packed), tokens, self.counts, self.coercions)

    def _source(self) -> regroup.Source:
        return regroup.Source(self.layout, self.token_ids, self.counts)


def batch_of(made: regroup.Made) -> RaggedBatch:
    """The batch of what an assembly or a regrouping has made."""
    return RaggedBatch(*made)


def _owned(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose storage holds nothing but its own elements, so that pickling ships no stale tail."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _first(values: Any) -> str:
    """The first few values, as a list's repr."""
    shown = ", ".join(map(str, values[:6].tolist()))
    return f"[{shown}, ...]" if len(values) > 6 else f"[{shown}]"
