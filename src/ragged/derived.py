"""Metadata derived from a batch's tensors, on its device. Pure functions; none of them syncs."""

from __future__ import annotations

import torch

from ragged.errors import RaggedOverflowError
from ragged.rules import INT32_MAX


def cu_seqlens(offsets: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """int32 ``[num_reqs + 1]``: flash-attn's ``cu_seqlens``, FlashInfer's ``indptr``, vLLM's ``query_start_loc``.

    Raises: RaggedOverflowError where ``num_tokens`` exceeds 2^31-1.
    """
    check_int32(num_tokens)
    return offsets.to(torch.int32)


def check_int32(num_tokens: int) -> None:
    """Cumulative lengths that a kernel reads as int32 must fit it."""
    if num_tokens > INT32_MAX:
        raise RaggedOverflowError(
            f"cu_seqlens must fit int32, got num_tokens {num_tokens}",
            argument="cu_seqlens",
            got=num_tokens,
            bound=INT32_MAX,
            hint="use offsets, which are int64, or split the batch",
        )


def req_ids(offsets: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """int64 ``[num_tokens]``: the request that owns each token; empty requests own none."""
    requests = torch.arange(offsets.shape[0] - 1, dtype=torch.int64, device=offsets.device)
    # Without output_size this would be a hidden sync.
    return torch.repeat_interleave(requests, offsets.diff(), output_size=num_tokens)


def positions(offsets: torch.Tensor, prefix_lens: torch.Tensor, token_req_ids: torch.Tensor) -> torch.Tensor:
    """int64 ``[num_tokens]``: each token's column, ``prefix_lens[r]`` plus its index in request r."""
    flat = torch.arange(token_req_ids.shape[0], dtype=torch.int64, device=offsets.device)
    return flat + (prefix_lens - offsets[:-1])[token_req_ids]


def last_token_indices(offsets: torch.Tensor) -> torch.Tensor:
    """int64 ``[num_reqs]``: index of each request's last token in ``token_ids``; -1 for an empty request."""
    return torch.where(offsets[1:] > offsets[:-1], offsets[1:] - 1, -1)
