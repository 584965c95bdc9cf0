"""The packed buffer of a batch on its device (the format is ``ragged.header``'s): slices, addresses, checks.

Where tokens live elsewhere (they came in on the device) the buffer is the header: all but ``token_ids``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ragged.errors import RaggedTypeError
from ragged.header import Starts, starts
from ragged.layout import RaggedLayout
from ragged.rules import HasDtype, HasLength, HasNDim, IsContiguous, IsDense, OnDevice, Rule, apply


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

    @property
    def num_reqs(self) -> int:
        return self.req_pool_indices.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]


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


def addresses(packed: torch.Tensor, layout: RaggedLayout, device_tokens: torch.Tensor | None) -> Starts:
    """Where each part starts in the device's memory, in bytes: what a kernel launch takes instead of tensors."""
    base, at = packed.data_ptr(), starts_of(layout)
    tokens = base + 8 * at.token_ids if device_tokens is None else device_tokens.data_ptr()
    return Starts(base, base + 8 * at[1], base + 8 * at[2], base + 8 * at[3], tokens)


def static_tokens(packed: torch.Tensor, layout: RaggedLayout) -> torch.Tensor:
    """All token memory behind a header, whatever a batch uses of it: int64, at most the capacity's ``max_tokens``."""
    first, capacity = len(layout.header), layout.bounds.capacity
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
    _check_buffer("packed", packed, len(layout.header) + in_packed, "length of its layout")
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
