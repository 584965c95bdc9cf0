"""Slow, obvious versions by another idea, plain loops over Python integers: the oracle of the tests."""

from __future__ import annotations

import torch

from kv_canary import kinds
from ragged import RaggedBatch


def scatter_req_token_ids_torch_reference(
    *,
    flat_in: torch.Tensor,
    offsets: torch.Tensor,
    req_pool_indices: torch.Tensor,
    pool_out: torch.Tensor,
) -> None:
    """The scatter as a loop over requests, for well-formed input: what the launcher must equal.

    ``flat_in`` int64 ``[num_tokens]``, ``offsets`` int64 ``[bs + 1]``, ``req_pool_indices`` int64 ``[bs]``,
    ``pool_out`` int32 ``[max_reqs, max_context_len]``.
    """
    bounds = offsets.tolist()
    for request, row in enumerate(req_pool_indices.tolist()):
        token_ids = flat_in[bounds[request] : bounds[request + 1]][: pool_out.shape[1]]
        pool_out[row, : len(token_ids)] = token_ids.to(torch.int32)


def scatter(
    flat_in: torch.Tensor,
    offsets: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor | None,
    pool_out: torch.Tensor,
    report: torch.Tensor | None,
    launch: int,
) -> None:
    """The guarded scatter, cell by cell, for any input however wrong; arguments as in the backends."""
    token_ids, bounds, rows = flat_in.tolist(), offsets.tolist(), req_pool_indices.tolist()
    prefixes = [0] * len(rows) if prefix_lens is None else prefix_lens.tolist()
    max_reqs, max_context_len = pool_out.shape

    def tell(kind: int, request: int, position: int, value: int, amount: int = 1) -> None:
        if report is None:
            return
        if report[kind, kinds.COUNT] == 0:
            report[kind, kinds.LAUNCH] = launch
            report[kind, kinds.REQUEST] = request
            report[kind, kinds.POSITION] = position
            report[kind, kinds.VALUE] = value
        report[kind, kinds.COUNT] += amount

    for request, (row, prefix) in enumerate(zip(rows, prefixes, strict=True)):
        start, end = bounds[request], bounds[request + 1]
        sound = True
        if not 0 <= start <= end <= len(token_ids) or (request == 0 and start != 0):
            tell(kinds.OFFSETS, request, start, end)
            sound = False
        if not 0 <= row < max_reqs:
            tell(kinds.ROW, request, 0, row)
            sound = False
        if not 0 <= prefix <= max_context_len:
            tell(kinds.PREFIX, request, 0, prefix)
            sound = False
        if not sound:
            continue
        dropped = 0
        for position, token_id in enumerate(token_ids[start:end]):
            if prefix + position >= max_context_len:
                dropped += 1
            else:
                fits = kinds.INT32_MIN <= token_id <= kinds.INT32_MAX
                pool_out[row, prefix + position] = token_id if fits else kinds.PLACEHOLDER
        if dropped:
            tell(kinds.DROPPED, request, end - start - dropped, dropped, dropped)

    for index, token_id in enumerate(token_ids[: max(bounds[-1], 0)]):
        if not kinds.INT32_MIN <= token_id <= kinds.INT32_MAX:
            owners = [request for request in range(len(rows)) if 0 <= bounds[request] <= index < bounds[request + 1]]
            owner, position = (owners[0], index - bounds[owners[0]]) if owners else (-1, index)
            tell(kinds.TOKEN, owner, position, token_id)


def scatter_batch(
    batch: RaggedBatch,
    pool_out: torch.Tensor,
    report: torch.Tensor | None,
    launch: int,
    valid_lens: torch.Tensor | None = None,
) -> None:
    """The guarded scatter of a batch, and what its rows validly hold afterwards."""
    columns = (batch.offsets, batch.req_pool_indices, batch.prefix_lens)
    scatter(batch.token_ids, *columns, pool_out, report, launch)
    if valid_lens is None:
        return
    bounds, num_tokens, (max_reqs, max_context_len) = batch.offsets.tolist(), batch.num_tokens, pool_out.shape
    for request, row in enumerate(batch.req_pool_indices.tolist()):
        start, end, prefix = bounds[request], bounds[request + 1], int(batch.prefix_lens[request])
        sound = 0 <= start <= end <= num_tokens and (request > 0 or start == 0)
        if sound and 0 <= row < max_reqs and 0 <= prefix <= max_context_len:
            valid_lens[row] = min(prefix + end - start, max_context_len)


def verify_batch(
    batch: RaggedBatch, pool: torch.Tensor, valid_lens: torch.Tensor, log: torch.Tensor, launch: int, exact: bool
) -> None:
    """The verification, cell by cell; arguments as in the backends."""
    token_ids, bounds, lens = batch.token_ids.tolist(), batch.offsets.tolist(), valid_lens.tolist()
    cells, capacity = pool.tolist(), log.shape[0] - 1

    def tell(kind: int, *entry: int) -> None:
        index, freed = int(log[0, kinds.FOUND_COUNT]), int(log[0, kinds.FREED])
        if 0 <= index < freed + capacity:
            log[1 + index % capacity] = torch.tensor([kind, index + 1, launch, *entry])
        log[0, kinds.FOUND_COUNT] += 1

    for request, row in enumerate(batch.req_pool_indices.tolist()):
        start, end, prefix = bounds[request], bounds[request + 1], int(batch.prefix_lens[request])
        sound = 0 <= start <= end <= len(token_ids) and (request > 0 or start == 0)
        inside = 0 <= row < pool.shape[0] and 0 <= prefix <= prefix + end - start <= pool.shape[1]
        if not sound or not inside:
            tell(kinds.UNREADABLE, request, row, prefix, start, end)
            log[0, kinds.NOT_COMPARED] += end - start if sound else 0
            continue
        valid = min(max(lens[row], 0), pool.shape[1])
        for column, token_id in enumerate(token_ids[start:end], prefix):
            found = cells[row][column]
            known = kinds.INT32_MIN <= token_id <= kinds.INT32_MAX and kinds.PLACEHOLDER not in (token_id, found)
            if column >= valid:
                tell(kinds.STALE, request, row, column, token_id, found)
            elif known and token_id != found:
                tell(kinds.MISMATCH, request, row, column, token_id, found)
            if column >= valid or not known:
                log[0, kinds.NOT_COMPARED] += 1
        last = prefix + end - start
        if exact and valid > last:
            tell(kinds.LENGTH, request, row, last, last, valid)
