"""Stamps on KV slots by Triton kernels: sizes the grids, launches. Same functions and arguments as ``stamps_torch``."""

from __future__ import annotations

import torch

from kv_canary import launching
from kv_canary.kernels import check_stamps as checking
from kv_canary.kernels import stamps as writing
from kv_canary.stamping import Checks, Memory, Pooled, Turn
from ragged import RaggedBatch
from ragged.packing import addresses, static_tokens
from ragged.tiles import TILE

SHAPES = ((1, 128, 1), (16, 32, 16), (128, 4, 128))
LONG = 512
"""Tiles for batches of even lengths: up to so many tokens, requests x columns; longer ones take 1 x LONG."""
BLOCK, WINDOW = 256, 256
"""Checks that a program does at once; ends that one load of its search counts."""
TURNS, MANY = 4, 1 << 19
"""How often a program does so where there are MANY checks: with fewer there would be too few programs."""
PLAN_BLOCK = 1024
KV_TOKENS, KV_TURNS = 8, 4
"""Tokens of a program, words that a lane hashes at a time. 131,072 tokens of 1 KiB on an H200, a copy 100 us: by
(8, 4) 58 us, (16, 4) 77, (4, 4) 59, (32, 4) 116; by 16 tokens of 128 lanes 267."""


def write(
    batch: RaggedBatch,
    slots: torch.Tensor,
    seeds: torch.Tensor | None,
    kv: torch.Tensor | None,
    expected: torch.Tensor | None,
    memory: Memory,
    launch: int,
) -> None:
    """See ``stamps_torch.write``. A batch of requests of one tile each is one launch, of longer ones two."""
    layout = batch.layout
    # In buffers of fixed sizes a request may be as long as all of them by the time that a graph is replayed.
    fixed = layout.bounds.capacity is not None
    num_tokens = slots.shape[0] if fixed else layout.num_tokens
    max_len = num_tokens if fixed else layout.max_len
    listed = len(layout.tiles) > 0
    shapes = ((r, c) for longest, r, c in SHAPES if max_len <= longest)
    requests, columns = (1, TILE) if listed else next(shapes, (1, LONG))
    column_tiles = max(-(-max_len // columns), 1)
    parts = max_len > columns
    programs = len(layout.tiles) or -(-layout.num_reqs // requests) * column_tiles
    at = addresses(batch.packed, layout, batch.device_tokens)
    device = batch.device

    def token_ids() -> torch.Tensor:
        return static_tokens(batch.packed, layout) if fixed else batch.token_ids

    sums = slots
    if parts:
        sums = torch.empty(programs, dtype=torch.int64, device=device)
        launching.launch(
            writing.sum_tiles,
            device,
            programs,
            lambda: (token_ids(), batch.offsets, batch.prefix_lens, batch.tiles, sums),
            (at.token_ids, at.offsets, at.prefix_lens, at.tiles, sums.data_ptr()),
            (num_tokens, layout.num_reqs, column_tiles),
            (listed, requests, columns),
        )
    more = [slots if tensor is None else tensor for tensor in (seeds, kv, expected, sums)]
    launching.launch(
        writing.write_stamps,
        device,
        programs,
        lambda: (
            token_ids(),
            batch.offsets,
            batch.prefix_lens,
            batch.req_pool_indices,
            batch.tiles,
            slots,
            *more,
            *memory,
        ),
        (
            at.token_ids,
            at.offsets,
            at.prefix_lens,
            at.req_pool_indices,
            at.tiles,
            slots.data_ptr(),
            *(tensor.data_ptr() for tensor in more),
            *(tensor.data_ptr() for tensor in memory),
        ),
        (num_tokens, layout.num_reqs, column_tiles, memory.stamps.shape[0], memory.log.shape[0] - 1, launch),
        (listed, parts, seeds is not None, kv is not None, expected is not None, requests, columns),
    )


def hash_kv(slots: torch.Tensor, num_slots: int, turns: tuple[Turn, ...]) -> torch.Tensor:
    """See ``stamps_torch.hash_kv``. A launch a source."""
    out = torch.zeros_like(slots)
    for source, number, among, share in turns:
        words = source.words()
        tensors = (slots, words, out)
        sizes = (source.page_stride // 8, source.token_stride // 8, source.leading_bytes // 8)
        launching.launch(
            writing.hash_kv,
            slots.device,
            -(-slots.shape[0] // KV_TOKENS),
            lambda tensors=tensors: tensors,  # type: ignore[misc]
            tuple(tensor.data_ptr() for tensor in tensors),
            (slots.shape[0], num_slots, *sizes, number, among, share),
            (source.page_size, share < among, KV_TOKENS, KV_TURNS),
        )
    return out


def check(checks: Checks, pool: Pooled | None, turns: tuple[Turn, ...], memory: Memory, launch: int) -> None:
    """See ``stamps_torch.check``. Two launches, and two more, with one a source, for KV bytes."""
    table, rows, lens, num_reqs = checks.table, checks.rows, checks.lens, checks.rows.shape[0]
    capacity, num_slots, shift = memory.log.shape[0] - 1, memory.stamps.shape[0], checks.period.bit_length() - 1
    plan = rows.new_empty(2 * (num_reqs + 1))
    planned = (rows, lens, plan, memory.state, memory.log)
    _launch(
        checking.plan_checks,
        1,
        planned,
        (num_reqs, *table.shape, checks.window, shift, capacity, launch),
        (PLAN_BLOCK,),
    )
    if not checks.most:
        return
    programs, kv = -(-checks.most // BLOCK), plan
    turns_each, every = TURNS if checks.most >= MANY else 1, checks.period == 1
    if turns:
        slots = torch.full((checks.most,), -1, dtype=torch.int64, device=table.device)
        sizes = (num_reqs, table.stride(0), shift, checks.most)
        _launch(checking.gather_slots, programs, (table, rows, plan, slots), sizes, (BLOCK, WINDOW), table.dtype)
        kv = hash_kv(slots, num_slots, turns)
    tokens, valid_lens = (table, lens) if pool is None else pool
    pooled = (0, 0, 0) if pool is None else (tokens.stride(0), *tokens.shape)
    _launch(
        checking.check_requests,
        -(-checks.most // ((BLOCK - every) * turns_each)),
        (table, rows, lens, plan, tokens, valid_lens, kv, memory.stamps, memory.log, memory.state, memory.counters),
        (num_reqs, table.stride(0), checks.window, shift, num_slots, capacity, launch, *pooled, checks.most),
        (pool is not None, bool(turns), every, BLOCK, turns_each, WINDOW),
        (table.dtype, tokens.dtype),
    )


def sweep(triples: torch.Tensor, turns: tuple[Turn, ...], memory: Memory, launch: int) -> None:
    """See ``stamps_torch.sweep``."""
    num_slots, count = memory.stamps.shape[0], triples.shape[0]
    kv = hash_kv(triples[:, 0].contiguous(), num_slots, turns) if turns else triples
    tensors = (triples, kv, memory.stamps, memory.log, memory.state, memory.counters)
    sizes = (count, num_slots, memory.log.shape[0] - 1, launch)
    _launch(checking.check_triples, -(-count // BLOCK), tensors, sizes, (bool(turns), BLOCK))


def _launch(
    kernel: object,
    programs: int,
    tensors: tuple[torch.Tensor, ...],
    sizes: tuple[int, ...],
    constants: tuple[object, ...],
    variant: object = None,
) -> None:
    """``variant``: dtypes that differ between callers."""
    pointers = tuple(tensor.data_ptr() for tensor in tensors)
    launching.launch(kernel, tensors[0].device, programs, lambda: tensors, pointers, sizes, constants, variant)
