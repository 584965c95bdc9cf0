"""The format of the packed buffer: ``offsets | req_pool_indices | prefix_lens | tiles | token_ids``, int64.

Each part starts at a multiple of 128 bytes, so that kernels see one alignment. ``tiles`` is empty for batches of even
lengths. Where tokens live elsewhere (they came in on the device) the buffer is the header: all but ``token_ids``.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from ragged.convert import Int64Array
from ragged.errors import RaggedTypeError
from ragged.layout import RaggedLayout
from ragged.rules import HasDtype, HasLength, HasNDim, IsContiguous, IsDense, OnDevice, Rule, apply

ALIGNMENT = 16
"""In int64 elements: 128 bytes, one cache line of an NVIDIA GPU."""


class Starts(NamedTuple):
    """Where each part starts, in elements."""

    offsets: int
    req_pool_indices: int
    prefix_lens: int
    tiles: int
    token_ids: int


def aligned(num_elements: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-num_elements // ALIGNMENT) * ALIGNMENT


@functools.lru_cache(maxsize=1024)
def starts(num_reqs: int, num_tiles: int = 0) -> Starts:
    """The format itself. The last start is the header's size.

    >>> starts(num_reqs=16)
    Starts(offsets=0, req_pool_indices=32, prefix_lens=48, tiles=64, token_ids=64)
    """
    column = aligned(num_reqs)
    first = aligned(num_reqs + 1)
    tiles = first + 2 * column
    return Starts(0, first, first + column, tiles, tiles + aligned(2 * num_tiles))


def starts_of(layout: RaggedLayout) -> Starts:
    """The format for this layout."""
    return starts(layout.num_reqs, len(layout.tiles))


class Views(NamedTuple):
    """The parts of a packed buffer: int64, 1-D but for ``tiles`` ``[num_tiles, 2]``."""

    offsets: torch.Tensor
    req_pool_indices: torch.Tensor
    prefix_lens: torch.Tensor
    tiles: torch.Tensor
    token_ids: torch.Tensor


def views(packed: torch.Tensor, layout: RaggedLayout) -> Views:
    """Slice a packed buffer, int64 ``[header size + num_tokens]``, into its parts."""
    at, num_reqs, num_tiles = starts_of(layout), layout.num_reqs, len(layout.tiles)
    return Views(
        packed[: num_reqs + 1],
        packed[at.req_pool_indices : at.req_pool_indices + num_reqs],
        packed[at.prefix_lens : at.prefix_lens + num_reqs],
        packed[at.tiles : at.tiles + 2 * num_tiles].view(num_tiles, 2),
        packed[at.token_ids :],
    )


def write_header(header: Int64Array, layout: RaggedLayout) -> None:
    """Fill a header, int64 ``[starts_of(layout).token_ids]``; the gaps become 0: equal batches are equal bytes."""
    at, num_reqs = starts_of(layout), layout.num_reqs
    header.fill(0)
    header[: num_reqs + 1] = layout.offsets
    header[at.req_pool_indices : at.req_pool_indices + num_reqs] = layout.req_pool_indices
    header[at.prefix_lens : at.prefix_lens + num_reqs] = layout.prefix_lens
    if len(layout.tiles):
        header[at.tiles : at.tiles + 2 * len(layout.tiles)] = layout.tiles.reshape(-1)


def addresses(packed: torch.Tensor, layout: RaggedLayout, device_tokens: torch.Tensor | None) -> Starts:
    """Where each part starts in the device's memory, in bytes: what a kernel launch takes instead of tensors."""
    base, at = packed.data_ptr(), starts_of(layout)
    tokens = base + 8 * at.token_ids if device_tokens is None else device_tokens.data_ptr()
    return Starts(base, base + 8 * at[1], base + 8 * at[2], base + 8 * at[3], tokens)


def static_tokens(packed: torch.Tensor, layout: RaggedLayout) -> torch.Tensor:
    """All token memory behind a header, whatever a batch uses of it: int64, at most the capacity's ``max_tokens``."""
    first, capacity = starts_of(layout).token_ids, layout.bounds.capacity
    room = packed.untyped_storage().nbytes() // packed.element_size() - int(packed.storage_offset()) - first
    most = layout.num_tokens if capacity is None else min(capacity.max_tokens, room)
    return packed.as_strided((most,), (1,), int(packed.storage_offset()) + first)


def check_parts(layout: Any, packed: Any, device_tokens: Any) -> None:
    """Hold what a batch is made of against its layout: kernels follow it by address, with the layout's sizes.

    Raises: RaggedTypeError, RaggedValueError.
    """
    if not isinstance(layout, RaggedLayout):
        raise _not_a("RaggedLayout", layout, "layout")
    in_packed = layout.num_tokens if device_tokens is None else 0
    _check_buffer("packed", packed, starts_of(layout).token_ids + in_packed, "length of its layout")
    if device_tokens is not None:
        _check_buffer("device_tokens", device_tokens, layout.num_tokens, "num_tokens of its layout")
        together = {"packed": packed, "device_tokens": device_tokens}
        apply([OnDevice("device_tokens", "packed", lambda arrays: arrays["packed"].device)], together)


def _check_buffer(name: str, tensor: Any, length: int, meaning: str) -> None:
    """int64 ``[length]``, contiguous."""
    if type(tensor) is torch.Tensor and tensor.dtype is torch.int64 and not tensor.is_nested:
        if tensor.shape == (length,) and tensor.is_contiguous():
            return
    elif not isinstance(tensor, torch.Tensor):
        raise _not_a("tensor", tensor, name)
    rules: list[Rule] = [IsDense(name), HasNDim(name, 1), HasDtype(name)]
    apply([*rules, HasLength(name, meaning, lambda _: length), IsContiguous(name)], {name: tensor})


def _not_a(kind: str, value: Any, argument: str) -> RaggedTypeError:
    got = type(value).__name__
    return RaggedTypeError(f"{argument} must be a {kind}, got {got}", argument=argument, got=got)
