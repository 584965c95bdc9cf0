"""Stamps on KV slots, vectorised in torch: for the CPU, and wherever triton is absent. On CUDA this backend syncs."""

from __future__ import annotations

import torch

from kv_canary import kinds
from kv_canary.mixing import mix_all, mix_words
from kv_canary.ring import claim
from kv_canary.stamping import Checks, Memory, Pooled, Turn
from ragged import RaggedBatch


@torch.inference_mode()
def write(
    batch: RaggedBatch,
    slots: torch.Tensor,
    seeds: torch.Tensor | None,
    kv: torch.Tensor | None,
    expected: torch.Tensor | None,
    memory: Memory,
    launch: int,
) -> None:
    """Stamp every token of a batch.

    Args:
        slots: int64 ``[num_tokens]``, or as many as a capacity has. -1 and the padding slot are skipped, the chain goes
            on.
        seeds: int64 ``[num_reqs]``, the last stamped slot of a request that continues, by an earlier call; -1 for one
            that does not. An empty request's is not looked at.
        kv: int64 ``[num_tokens]``, hashes of the KV bytes, or None.
        expected: int64 ``[num_tokens]``, what the tokens ought to be, or None; -1 is not compared.
    """
    slots = slots[: batch.num_tokens]
    kv, expected = (None if each is None else each[: batch.num_tokens] for each in (kv, expected))
    token_ids, owners, positions = batch.token_ids, batch.req_ids, batch.positions
    rows, num_slots = batch.req_pool_indices, memory.stamps.shape[0]
    base = torch.full((batch.num_reqs,), kinds.ANCHOR, dtype=torch.int64, device=token_ids.device)
    if seeds is not None:
        good = _inside(seeds, num_slots)
        base[good] = _behind(memory.stamps, seeds[good])
        lost = _outside(seeds, num_slots) & (batch.offsets.diff() > 0)
        requests = torch.arange(batch.num_reqs, dtype=torch.int64, device=token_ids.device)
        _tell(memory, launch, lost * kinds.SLOT, requests, rows, seeds, batch.prefix_lens - 1)
    terms = mix_all(token_ids, positions)
    sums = torch.cumsum(terms, 0) - terms
    chains = base[owners] + sums - sums[batch.offsets[:-1].clamp(max=max(batch.num_tokens - 1, 0))][owners]

    stamped = _inside(slots, num_slots)
    fresh = torch.zeros_like(token_ids) if kv is None else kv
    memory.stamps[slots[stamped]] = torch.stack([token_ids, positions, chains, fresh], 1)[stamped]
    memory.counters[0, kinds.WRITTEN] += stamped.sum()
    bits = _outside(slots, num_slots) * kinds.SLOT
    wanted = torch.full_like(token_ids, -1) if expected is None else expected
    known = (wanted != kinds.PLACEHOLDER) & (token_ids != kinds.PLACEHOLDER)
    bits = bits + (known & (wanted != token_ids)) * kinds.WRITE_INPUT
    none = torch.zeros_like(token_ids)
    _tell(memory, launch, bits, owners, rows[owners], slots, positions, token_ids, wanted, none, none, positions)


@torch.inference_mode()
def hash_kv(slots: torch.Tensor, num_slots: int, turns: tuple[Turn, ...]) -> torch.Tensor:
    """int64 ``[n]``: a hash of each slot's KV bytes, its sources folded together; 0 for a slot that is skipped."""
    here = _inside(slots, num_slots)
    at = torch.where(here, slots, 0)
    total = torch.zeros_like(slots)
    for turn in turns:
        source, taken = turn.source, turn.takes(at)
        begins = at // source.page_size * (source.page_stride // 8) + at % source.page_size * (source.token_stride // 8)
        places = torch.arange(source.leading_bytes // 8, dtype=torch.int64, device=slots.device)
        words = source.words()[begins[:, None] + places]
        summed = mix_words(words, places + 1).sum(1)
        total += torch.where(taken, mix_words(summed, torch.full_like(summed, turn.number + 1)), 0)
    return torch.where(here, total, 0)


@torch.inference_mode()
def check(checks: Checks, pool: Pooled | None, turns: tuple[Turn, ...], memory: Memory, launch: int) -> None:
    """Hold the planned stamps against position, predecessor, pool token and KV bytes; the phase goes on by one."""
    table, rows, lens = checks.table, checks.rows, checks.lens
    device, num_slots = table.device, memory.stamps.shape[0]
    requests = torch.arange(len(rows), dtype=torch.int64, device=device)
    phase, period = int(memory.state[kinds.STATE_CALLS]) % checks.period, checks.period
    good = (rows >= 0) & (rows < table.shape[0]) & (lens >= 0) & (lens <= table.shape[1])
    none = torch.full_like(rows, -1)
    _tell(memory, launch, ~good * kinds.REQUEST_BIT, requests, rows, none, lens)
    begins = (lens - checks.window).clamp(min=0)
    begins = begins + (phase - begins) % period
    counts = torch.where(good, (lens - begins + period - 1).clamp(min=0) // period, 0)
    total = int(counts.sum())
    owners = torch.repeat_interleave(requests, counts, output_size=total)
    index = torch.arange(total, dtype=torch.int64, device=device) - (counts.cumsum(0) - counts)[owners]
    positions, whose = begins[owners] + index * period, rows[owners]

    slots = table[whose, positions].to(torch.int64)
    follows = (positions == 0) | (positions > lens[owners] - checks.window)
    before = torch.where(positions > 0, table[whose, (positions - 1).clamp(min=0)].to(torch.int64), -1)
    wanted = torch.full_like(slots, -1)
    if pool is not None and pool.tokens.numel():
        max_reqs, max_context_len = pool.tokens.shape
        known = (whose < max_reqs) & (positions < max_context_len)
        at_row, at_column = torch.where(known, whose, 0), torch.where(known, positions, 0)
        known &= positions < pool.valid_lens[at_row]
        wanted = torch.where(known, pool.tokens[at_row, at_column].to(torch.int64), -1)
    fresh = hash_kv(slots, num_slots, turns) if turns else None
    _check(memory, launch, owners, whose, slots, positions, before, follows, wanted, fresh)
    seen = torch.arange(kinds.PHASES, dtype=torch.int64, device=device) % period == phase
    memory.state[2:][seen] = memory.state[kinds.STATE_STEP]
    memory.state[kinds.STATE_CALLS] += 1


@torch.inference_mode()
def sweep(triples: torch.Tensor, turns: tuple[Turn, ...], memory: Memory, launch: int) -> None:
    """Hold the stamps of int64 ``[n, 3]`` (slot, predecessor's slot, position) against what they must be."""
    slots, before, positions = triples.unbind(1)
    fresh = hash_kv(slots, memory.stamps.shape[0], turns) if turns else None
    none = torch.full_like(slots, -1)
    _check(memory, launch, none, none, slots, positions, before, torch.ones_like(slots, dtype=torch.bool), none, fresh)


def _check(
    memory: Memory, launch: int, request: torch.Tensor, row: torch.Tensor, slots: torch.Tensor,
    positions: torch.Tensor, before: torch.Tensor, follows: torch.Tensor, wanted: torch.Tensor,
    fresh: torch.Tensor | None,
) -> None:  # fmt: skip
    stamps, counters, num_slots = memory.stamps, memory.counters, memory.stamps.shape[0]
    here = _inside(slots, num_slots)
    token_ids, stored, chains, hashes = stamps[torch.where(here, slots, 0)].unbind(1)
    known = here & follows & (positions > 0) & _inside(before, num_slots)
    expected = torch.where(positions > 0, _behind(stamps, torch.where(known, before, 0)), kinds.ANCHOR)
    chained = known | (here & follows & (positions == 0))
    told = here & (wanted != kinds.PLACEHOLDER) & (token_ids != kinds.PLACEHOLDER)
    bits = (chained & (chains != expected)) * kinds.CHAIN + (stored != positions) * kinds.POSITION_BIT
    bits = bits + (told & (token_ids != wanted)) * kinds.TOKEN_BIT
    found, compared = chains, torch.where(chained, expected, 0)
    if fresh is not None:
        bits = bits + (hashes != fresh) * kinds.KV_BIT
        of_kv = (bits & kinds.CHAIN) == 0
        found, compared = torch.where(of_kv, hashes, found), torch.where(of_kv, fresh, compared)
        counters[0, kinds.COMPARED_KV] += here.sum()
    bits = torch.where(here, bits, _outside(slots, num_slots) * kinds.SLOT)
    counters[0, kinds.COMPARED_POSITION] += here.sum()
    counters[0, kinds.COMPARED_CHAIN] += chained.sum()
    counters[0, kinds.COMPARED_TOKEN] += told.sum()
    counters[0, kinds.SKIPPED] += (~here).sum()
    none, nothing = torch.full_like(slots, -1), torch.zeros_like(slots)
    columns = (
        torch.where(here, token_ids, none),
        torch.where(told, wanted, none),
        torch.where(here, found, nothing),
        torch.where(here, compared, nothing),
        torch.where(here, stored, none),
    )
    _tell(memory, launch, bits, request, row, slots, positions, *columns)


def _inside(slots: torch.Tensor, num_slots: int) -> torch.Tensor:
    return (slots > kinds.PADDING_SLOT) & (slots < num_slots)


def _outside(slots: torch.Tensor, num_slots: int) -> torch.Tensor:
    return (slots < kinds.NO_SLOT) | (slots >= num_slots)


def _behind(stamps: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    token_ids, positions, chains, _ = stamps[slots].unbind(1)
    return chains + mix_all(token_ids, positions)


def _tell(memory: Memory, launch: int, bits: torch.Tensor, *columns: torch.Tensor) -> None:
    """Count what is wrong, and store it while the ring has room; columns from the request on, without the step."""
    log = memory.log
    lines, stored = claim(log, launch, bits > 0, bits)
    if not len(stored):
        return
    log[lines, kinds.STAMP_STEP] = memory.state[kinds.STATE_STEP]
    none = torch.full_like(bits, -1, dtype=torch.int64)
    nothing = torch.zeros_like(none)
    all_columns = (*columns, *(none, none, nothing, nothing, none)[len(columns) - 4 :])
    fields = range(kinds.STORED_TOKEN, kinds.STORED_POSITION + 1)
    at = (kinds.ENTRY_REQUEST, kinds.STAMP_ROW, kinds.STAMP_SLOT, kinds.STAMP_AT, *fields)
    for column, values in zip(at, all_columns, strict=True):
        log[lines, column] = values[stored]
