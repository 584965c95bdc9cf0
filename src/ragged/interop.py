"""To and from the other shapes of the same thing: padded, torch.nested."""

from __future__ import annotations

from typing import Any

import torch

from ragged.convert import Int64Array
from ragged.errors import RaggedTypeError, RaggedValueError
from ragged.integers import as_int


def to_padded(
    token_ids: torch.Tensor, offsets: torch.Tensor, token_req_ids: torch.Tensor, max_len: int, value: int
) -> torch.Tensor:
    """int64 ``[num_reqs, max_len]``, each row a request's tokens, then ``value``."""
    shape = (offsets.shape[0] - 1, max_len)
    padded = torch.full(shape, as_int(value, "value"), dtype=torch.int64, device=token_ids.device)
    flat = torch.arange(token_ids.shape[0], dtype=torch.int64, device=token_ids.device)
    padded[token_req_ids, flat - offsets[token_req_ids]] = token_ids
    return padded


def to_nested(token_ids: torch.Tensor, offsets: torch.Tensor, lengths: Int64Array) -> torch.Tensor:
    """A jagged ``torch.nested`` tensor over the same memory.

    Raises: RaggedValueError for zero requests, which torch cannot represent.
    """
    if len(lengths) == 0:
        raise RaggedValueError("torch.nested cannot hold a batch of zero requests", argument="num_reqs", got=0, bound=1)
    shortest, longest = int(lengths.min()), int(lengths.max())
    # Left out, torch syncs to find them, and its to_padded_tensor (2.13) makes num_tokens columns.
    return torch.nested.nested_tensor_from_jagged(token_ids, offsets, min_seqlen=shortest, max_seqlen=longest)


def from_nested(nested: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """``token_ids`` and ``offsets`` of a jagged ``torch.nested`` tensor."""
    if not isinstance(nested, torch.Tensor) or not nested.is_nested or nested.layout != torch.jagged:
        raise RaggedTypeError(
            f"nested must be a jagged torch.nested tensor, got {type(nested).__name__}",
            argument="nested",
            got=type(nested).__name__,
        )
    jagged: Any = nested  # torch's stubs do not know the jagged methods
    if jagged.lengths() is not None:
        raise RaggedValueError(
            "nested must have no holes: it was made by narrow and has lengths of its own",
            argument="nested",
            hint="call .contiguous() on it",
        )
    return jagged.values(), jagged.offsets()
