"""The scatter as an operator of torch's dispatcher, for compiled code: ``torch.compile(fullgraph=True)`` takes it.

Eager code calls ``scatter`` or the launcher, which do not go through the dispatcher: it costs about 40 us a call.
"""

from __future__ import annotations

import torch

from kv_canary.report import GuardReport
from kv_canary.scatter import launch_scatter_req_token_ids_kernel


def scatter_req_token_ids(
    *,
    flat_in: torch.Tensor,
    offsets: torch.Tensor,
    req_pool_indices: torch.Tensor,
    pool_out: torch.Tensor,
    prefix_lens: torch.Tensor | None = None,
    report: GuardReport | None = None,
) -> None:
    """``launch_scatter_req_token_ids_kernel`` for code under ``torch.compile``: same arguments, checks and guards.

    Host guards run when the compiled code runs. ``report`` counts as always; it cannot tell launches apart, for the
    host does not see each one.
    """
    table = None if report is None else report.table
    torch.ops.kv_canary.scatter_req_token_ids(flat_in, offsets, req_pool_indices, prefix_lens, pool_out, table)


@torch.library.custom_op("kv_canary::scatter_req_token_ids", mutates_args=("pool_out", "report"))
def _scatter(
    flat_in: torch.Tensor,
    offsets: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor | None,
    pool_out: torch.Tensor,
    report: torch.Tensor | None,
) -> None:
    """On every device; ``report`` is a GuardReport's table."""
    launch_scatter_req_token_ids_kernel(
        flat_in=flat_in,
        offsets=offsets,
        req_pool_indices=req_pool_indices,
        pool_out=pool_out,
        prefix_lens=prefix_lens,
        report=None if report is None else GuardReport(report),
    )


@_scatter.register_fake
def _(
    flat_in: torch.Tensor,
    offsets: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor | None,
    pool_out: torch.Tensor,
    report: torch.Tensor | None,
) -> None:
    """Nothing comes back: the pool and the report are written to."""
