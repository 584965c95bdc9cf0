"""Scatter and verify as operators of torch's dispatcher: ``torch.compile(fullgraph=True)`` takes them.

Eager code calls ``scatter`` or the launcher, and ``TokenPool.verify``: they do not go through the dispatcher, which
costs about 40 us a call.
"""

from __future__ import annotations

from typing import Any

import torch

from kv_canary import backends
from kv_canary.guards import POOL, VERIFY
from kv_canary.pool import TokenPool
from kv_canary.report import GuardReport
from kv_canary.scatter import launch_scatter_req_token_ids_kernel
from kv_canary.violations import ViolationLog
from ragged.packing import Views
from ragged.rules import apply


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


def verify_req_token_ids(
    *,
    flat_in: torch.Tensor,
    offsets: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    pool: TokenPool,
    log: ViolationLog[Any],
    exact: bool = True,
) -> None:
    """``TokenPool.verify`` for code under ``torch.compile``, of tensors instead of a batch.

    Args:
        flat_in: int64 ``[num_tokens]``, what the scheduler thinks that the pool holds.
        offsets: int64 ``[bs + 1]``, CSR.
        req_pool_indices, prefix_lens: int64 ``[bs]``, each request's row, and the column at which it starts.
        pool: what is compared.
        log: takes what differs; it cannot tell launches apart, for the host does not see each one.
        exact: rows must end where the requests do.

    Values are the device guards' to check: a request that leads outside is a violation, and is not followed.
    """
    columns = (flat_in, offsets, req_pool_indices, prefix_lens)
    torch.ops.kv_canary.verify_req_token_ids(*columns, pool.tokens, pool.valid_lens, log.table, exact)


@torch.library.custom_op("kv_canary::verify_req_token_ids", mutates_args=("log",))
def _verify(
    flat_in: torch.Tensor,
    offsets: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    pool_out: torch.Tensor,
    valid_lens: torch.Tensor,
    log: torch.Tensor,
    exact: bool,
) -> None:
    """On every device; ``log`` is a ViolationLog's table."""
    given = {"flat_in": flat_in, "offsets": offsets, "req_pool_indices": req_pool_indices, "pool_out": pool_out}
    given |= {"prefix_lens": prefix_lens, "valid_lens": valid_lens, "log": log}
    apply(VERIFY, given, where=POOL)
    if req_pool_indices.shape[0]:
        views = Views(offsets, req_pool_indices, prefix_lens, offsets.new_empty(0, 2), flat_in)
        run = backends.resolve("auto", pool_out.device)
        run.verify_views(views, pool_out, valid_lens, log, 0, exact)


@_verify.register_fake
def _(
    flat_in: torch.Tensor,
    offsets: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    pool_out: torch.Tensor,
    valid_lens: torch.Tensor,
    log: torch.Tensor,
    exact: bool,
) -> None:
    """Nothing comes back: the log is written to."""
