"""The keywords that every way of making a batch shares."""

from __future__ import annotations

from typing import Any, TypedDict

import torch

from ragged.bounds import Capacity, Overflow
from ragged.convert import Mode
from ragged.errors import RaggedTypeError
from ragged.tokens import WideTokens


class BatchOptions(TypedDict, total=False):
    """The keywords that every way of making a batch shares.

    device: where the batch lives, ``"cpu"`` by default; its index is fixed at construction.
    mode: ``"strict"`` (default) or ``"coerce"``.
    vocab_size: token ids must be below it.
    pool_shape: ``(max_reqs, max_context_len)`` that rows and columns are held against.
    overflow: ``"raise"`` (default) or ``"truncate"`` where a segment ends beyond ``max_context_len``.
    allow_placeholders: take token id -1.
    wide_tokens: ``"refuse"`` (default) or ``"opaque"`` for ids above 2^31-1.
    padding_row: a row that only empty requests may use.
    capacity: sizes of buffers that keep their addresses from batch to batch; unused requests are empty ones on the
        padding row, row 0 where none is set.
    """

    device: torch.device | str
    mode: Mode | str
    vocab_size: int | None
    pool_shape: tuple[int, int] | None
    overflow: Overflow | str
    allow_placeholders: bool
    wide_tokens: WideTokens | str
    padding_row: int | None
    capacity: Capacity | None


def as_ids(req_ids: Any) -> tuple[object, ...] | None:
    """The caller's ids as a tuple of their own."""
    if req_ids is None or isinstance(req_ids, tuple):
        return req_ids
    try:
        return tuple(req_ids)
    except TypeError:
        name = type(req_ids).__name__
        raise RaggedTypeError(f"req_ids must be a sequence of ids, got {name}", argument="req_ids", got=name) from None
