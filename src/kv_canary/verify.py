"""Comparing pool rows with the scheduler's tokens, or with another table, on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kv_canary import backends
from kv_canary.guards import LOG, POOL, table
from kv_canary.scatter import keep_until_read
from kv_canary.snapshot import lasting_ids
from kv_canary.violations import Violation, ViolationLog
from ragged import RaggedBatch, RaggedLayout, RaggedTypeError
from ragged.errors import refuses
from ragged.rules import OnDevice, apply


def verify_batch(
    batch: RaggedBatch,
    tokens: torch.Tensor,
    valid_lens: torch.Tensor,
    *,
    exact: bool,
    report: ViolationLog[Violation] | None,
    backend: str,
) -> ViolationLog[Violation]:
    """Compare a checked pool's cells with a batch's tokens; ``exact``: rows must end where the requests do.

    Returns: ``report``, or a new log where it is None.
    """
    if report is None:
        report = ViolationLog.allocate(tokens.device)
    elif not isinstance(report, ViolationLog):
        got = type(report).__name__
        raise RaggedTypeError(f"{POOL}report must be a ViolationLog, got {got}", argument="report", got=got)
    arrays = {"log": report.table, "report": report.table, "batch": batch.packed}
    apply([OnDevice(name, "the pool", lambda _: tokens.device) for name in ("batch", "report")], arrays, where=POOL)
    apply(LOG, arrays, where=POOL)
    batch.layout.check_pool(tokens.shape)
    if batch.num_reqs:
        run = backends.resolve(backend, tokens.device)
        launch = report.begin(lasting_ids(batch.layout.req_ids, tokens.device), batch.num_tokens)
        run.verify_batch(batch, tokens, valid_lens, report.table, launch, exact)
        if tokens.is_cuda:
            keep_until_read(batch)
    return report


@refuses
def verify_tokens(
    pool_a: torch.Tensor,
    pool_b: torch.Tensor,
    rows: Any,
    lens: Any,
    *,
    report: ViolationLog[Violation] | None = None,
    backend: str = "auto",
) -> ViolationLog[Violation]:
    """Compare the first ``lens[i]`` cells of row ``rows[i]`` of two tables: another rank's copy, a checkpoint.

    >>> ours = torch.tensor([[5, 6, 7], [8, 9, -1]], dtype=torch.int32)
    >>> theirs = torch.tensor([[5, 6, 7], [8, 1, 2]], dtype=torch.int32)
    >>> for violation in verify_tokens(ours, theirs, [0, 1], [3, 3]).drain():
    ...     print(violation)
    token at request 1, row 1, column 1: expected 1, found 9

    Args:
        pool_a, pool_b: int32 ``[max_reqs, max_context_len]`` on one device, last stride 1, any row stride; the shapes
            may differ. ``found`` is a cell of ``pool_a``, ``expected`` one of ``pool_b``; -1 in either is skipped.
        rows: int64 ``[n]`` on the host, each once; a violation's ``request`` is the position here.
        lens: int64 ``[n]`` on the host.
        report: a log to add to.
        backend: ``"auto"``, ``"triton"`` or ``"torch"``.

    Takes 8 bytes of device memory a cell for the while. Does not sync on the ``triton`` backend.

    Raises: RaggedTypeError, RaggedValueError: what is no such table, or rows and lens that lead outside of either.
    """
    for name, pool in (("pool_a", pool_a), ("pool_b", pool_b)):
        if not isinstance(pool, torch.Tensor):
            got = type(pool).__name__
            raise RaggedTypeError(f"{POOL}{name} must be a tensor, got {got}", argument=name, got=got)
        apply(table(name), {name: pool}, where=POOL)
    apply([OnDevice("pool_b", "pool_a", lambda _: pool_a.device)], {"pool_b": pool_b}, where=POOL)
    layout = RaggedLayout(lengths=lens, req_pool_indices=rows)
    layout.check_pool((min(pool_a.shape[0], pool_b.shape[0]), min(pool_a.shape[1], pool_b.shape[1])))
    device = pool_a.device
    where = RaggedBatch.from_lengths(
        np.repeat(layout.req_pool_indices, layout.lengths), layout.lengths, req_pool_indices=rows, device=device
    )
    with torch.inference_mode():
        expected = pool_b[where.token_ids, where.positions].to(torch.int64)
    # Whatever a table holds is compared: its cells are no tokens that somebody hands in, and are not checked as such.
    batch = RaggedBatch(where.layout, where.packed[: len(where.layout.header)], expected)
    everything = torch.full((pool_a.shape[0],), pool_a.shape[1], dtype=torch.int64, device=device)
    return verify_batch(batch, pool_a, everything, exact=False, report=report, backend=backend)
