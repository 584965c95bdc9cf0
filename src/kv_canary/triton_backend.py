"""The Triton backend: sizes the grid and launches. Kernel files are imported with this module, at first use."""

from __future__ import annotations

import torch
import triton

from kv_canary.kernels import scatter as kernels

BLOCK = 1024
"""Tokens a program."""
WINDOW = 512
"""Ends that one load of the search counts, and requests that a request program checks."""


def scatter(
    flat_in: torch.Tensor,
    offsets: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor | None,
    pool_out: torch.Tensor,
    report: torch.Tensor | None,
    launch: int,
) -> None:
    """See ``kv_canary.scatter``; ``report`` is int64 ``[len(GUARDS), REPORT_COLUMNS]``."""
    num_tokens, num_reqs = flat_in.shape[0], req_pool_indices.shape[0]
    max_reqs, max_context_len = pool_out.shape
    grid = (triton.cdiv(num_tokens, BLOCK) + triton.cdiv(num_reqs, WINDOW),)
    with torch.cuda.device(pool_out.device if pool_out.is_cuda else -1):
        kernels.scatter_flat[grid](
            flat_in,
            offsets,
            req_pool_indices,
            offsets if prefix_lens is None else prefix_lens,
            pool_out,
            offsets if report is None else report,
            num_tokens,
            num_reqs,
            max_reqs,
            max_context_len,
            pool_out.stride(0),
            launch,
            HAS_PREFIX=prefix_lens is not None,
            REPORT=report is not None,
            BLOCK=BLOCK,
            WINDOW=WINDOW,
        )
