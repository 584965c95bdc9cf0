"""The torch backend: the same operations, vectorised; for the CPU and wherever triton is absent."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kv_canary import kinds
from kv_canary.ring import claim
from ragged import RaggedBatch
from ragged.packing import Views


@torch.inference_mode()  # so that a pool made in inference mode and one made outside are written alike
def scatter(
    flat_in: torch.Tensor,
    offsets: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor | None,
    pool_out: torch.Tensor,
    report: torch.Tensor | None,
    launch: int,
) -> None:
    """See the launcher; ``report`` is int64 ``[len(GUARDS), REPORT_COLUMNS]``. On CUDA this backend syncs."""
    num_tokens, num_reqs = flat_in.shape[0], req_pool_indices.shape[0]
    max_reqs, max_context_len = pool_out.shape
    device = pool_out.device
    starts, ends, rows = offsets[:-1], offsets[1:], req_pool_indices
    prefixes = torch.zeros_like(rows) if prefix_lens is None else prefix_lens
    requests = torch.arange(num_reqs, dtype=torch.int64, device=device)

    good_offsets = (starts >= 0) & (ends >= starts) & (ends <= num_tokens) & ((requests > 0) | (starts == 0))
    good_row = (rows >= 0) & (rows < max_reqs)
    good_prefix = (prefixes >= 0) & (prefixes <= max_context_len)
    good = good_offsets & good_row & good_prefix
    lengths = torch.where(good, ends - starts, 0)
    written = torch.where(good, torch.minimum(lengths, max_context_len - prefixes), 0)

    total = int(written.sum())
    owners = torch.repeat_interleave(requests, written, output_size=total)
    index = torch.arange(total, dtype=torch.int64, device=device) - (written.cumsum(0) - written)[owners]
    token_ids = flat_in[starts[owners] + index]
    cells = rows[owners] * pool_out.stride(0) + prefixes[owners] + index
    if total:
        max_cells = (max_reqs - 1) * pool_out.stride(0) + max_context_len
        pool_out.as_strided((max_cells,), (1,)).index_put_((cells,), _narrow(token_ids))

    if report is not None:
        none = torch.zeros_like(rows)
        _add_report(report, kinds.OFFSETS, launch, ~good_offsets, requests, starts, ends)
        _add_report(report, kinds.ROW, launch, ~good_row, requests, none, rows)
        _add_report(report, kinds.PREFIX, launch, ~good_prefix, requests, none, prefixes)
        _add_report_tokens(report, launch, flat_in[: max(int(offsets[-1]), 0)], offsets)
        dropped = lengths - written
        _add_report(report, kinds.DROPPED, launch, dropped > 0, requests, written, dropped, dropped)


@torch.inference_mode()
def scatter_batch(
    batch: RaggedBatch,
    pool_out: torch.Tensor,
    report: torch.Tensor | None,
    launch: int,
    valid_lens: torch.Tensor | None = None,
) -> None:
    """See ``kv_canary.scatter``; ``valid_lens`` int64 ``[max_reqs]`` gets each row's new valid length."""
    # Prefixes are read from the device even where the host knows that all are 0: what is there is what is guarded.
    columns = (batch.offsets, batch.req_pool_indices, batch.prefix_lens)
    scatter(batch.token_ids, *columns, pool_out, report, launch)
    if valid_lens is not None:
        set_valid_lens(batch, pool_out.shape[1], valid_lens)


@torch.inference_mode()
def set_valid_lens(batch: RaggedBatch, max_context_len: int, valid_lens: torch.Tensor) -> None:
    """``valid_lens[row] = prefix_len + length``, at most ``max_context_len``, of every request that can be followed."""
    good, rows = _followed(batch, (len(valid_lens), max_context_len)), batch.req_pool_indices
    ends = (batch.prefix_lens + batch.offsets.diff()).clamp(max=max_context_len)
    valid_lens.index_put_((rows[good],), ends[good])


@torch.inference_mode()
def verify_batch(
    batch: RaggedBatch | Views,
    pool: torch.Tensor,
    valid_lens: torch.Tensor,
    log: torch.Tensor,
    launch: int,
    exact: bool,
) -> None:
    """See ``TokenPool.verify``; ``log`` is int64 ``[1 + capacity, VIOLATION_COLUMNS]``. On CUDA this backend syncs."""
    max_context_len = pool.shape[1]
    starts, ends, rows, prefixes = batch.offsets[:-1], batch.offsets[1:], batch.req_pool_indices, batch.prefix_lens
    requests = torch.arange(batch.num_reqs, dtype=torch.int64, device=pool.device)
    good = _followed(batch, pool.shape) & (ends - starts <= max_context_len - prefixes)
    lost = torch.where(_good_offsets(batch), ends - starts, 0)
    lengths = torch.where(good, ends - starts, 0)
    valid = torch.where(good, valid_lens[torch.where(good, rows, 0)].clamp(0, max_context_len), 0)

    total = int(lengths.sum())
    owners = torch.repeat_interleave(requests, lengths, output_size=total)
    index = torch.arange(total, dtype=torch.int64, device=pool.device) - (lengths.cumsum(0) - lengths)[owners]
    token_ids, columns, whose = batch.token_ids[starts[owners] + index], prefixes[owners] + index, rows[owners]
    short = _narrow(token_ids)
    cells = pool[whose, columns]
    stale = columns >= valid[owners]
    unknown = (short == kinds.PLACEHOLDER) | (cells == kinds.PLACEHOLDER)
    wrong = ~stale & ~unknown & (short != cells)

    log[0, kinds.NOT_COMPARED] += (stale | unknown).sum() + (lost - lengths).sum()
    found = cells.to(torch.int64)
    _add_violations(log, launch, kinds.MISMATCH, wrong, owners, whose, columns, token_ids, found)
    _add_violations(log, launch, kinds.STALE, stale, owners, whose, columns, token_ids, found)
    _add_violations(log, launch, kinds.UNREADABLE, ~good, requests, rows, prefixes, starts, ends)
    if exact:
        last = prefixes + ends - starts
        _add_violations(log, launch, kinds.LENGTH, good & (valid > last), requests, rows, last, last, valid)


verify_views = verify_batch
"""The same of tensors whose lengths the host does not know."""


def _good_offsets(batch: RaggedBatch | Views) -> torch.Tensor:
    """bool ``[num_reqs]``: offsets that can be followed."""
    starts, ends = batch.offsets[:-1], batch.offsets[1:]
    first = torch.arange(batch.num_reqs, dtype=torch.int64, device=starts.device) == 0
    return (starts >= 0) & (ends >= starts) & (ends <= batch.num_tokens) & (~first | (starts == 0))


def _followed(batch: RaggedBatch | Views, pool_shape: Sequence[int]) -> torch.Tensor:
    """bool ``[num_reqs]``: requests whose offsets, row and prefix all lead inside."""
    rows, prefixes = batch.req_pool_indices, batch.prefix_lens
    inside = (rows >= 0) & (rows < pool_shape[0]) & (prefixes >= 0) & (prefixes <= pool_shape[1])
    return _good_offsets(batch) & inside


def _add_violations(log: torch.Tensor, launch: int, kind: int, wrong: torch.Tensor, *columns: torch.Tensor) -> None:
    """Count what is wrong, and store it while the ring has room; ``columns`` are request, row, column, and so on."""
    lines, stored = claim(log, launch, wrong, kind)
    if not len(stored):
        return
    for column, values in enumerate(columns, kinds.ENTRY_REQUEST):
        log[lines, column] = values[stored]


def _fits(token_ids: torch.Tensor) -> torch.Tensor:
    return (token_ids >= kinds.INT32_MIN) & (token_ids <= kinds.INT32_MAX)


def _narrow(token_ids: torch.Tensor) -> torch.Tensor:
    """int32; a token that does not fit becomes the placeholder."""
    return torch.where(_fits(token_ids), token_ids, kinds.PLACEHOLDER).to(torch.int32)


def _add_report_tokens(report: torch.Tensor, launch: int, token_ids: torch.Tensor, offsets: torch.Tensor) -> None:
    wrong = (~_fits(token_ids)).nonzero().flatten()
    if wrong.numel():
        requests = torch.searchsorted(offsets[1:].contiguous(), wrong, right=True).clamp(max=offsets.shape[0] - 2)
        starts = offsets[requests]
        owned = (starts >= 0) & (wrong >= starts) & (wrong < offsets[requests + 1])
        positions = torch.where(owned, wrong - starts, wrong)
        every = torch.ones_like(owned)
        _add_report(report, kinds.TOKEN, launch, every, torch.where(owned, requests, -1), positions, token_ids[wrong])


def _add_report(
    report: torch.Tensor,
    kind: int,
    launch: int,
    wrong: torch.Tensor,
    requests: torch.Tensor,
    positions: torch.Tensor,
    values: torch.Tensor,
    amounts: torch.Tensor | None = None,
) -> None:
    """Count what is wrong; the first of its kind leaves its particulars."""
    if not bool(wrong.any()):
        return
    line, first = report[kind], wrong.to(torch.int8).argmax()
    if int(line[kinds.COUNT]) == 0:
        line[kinds.LAUNCH] = launch
        line[kinds.REQUEST] = requests[first]
        line[kinds.POSITION] = positions[first]
        line[kinds.VALUE] = values[first]
    line[kinds.COUNT] += wrong.sum() if amounts is None else amounts[wrong].sum()
