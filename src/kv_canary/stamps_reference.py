"""Stamps, slot by slot, in plain Python: the oracle of the tests. See ``stamps_torch`` for the contracts."""

from __future__ import annotations

import torch

from kv_canary import kinds
from kv_canary.mixing import mix, mix_word, signed
from kv_canary.stamping import Checks, Memory, Pooled, Turn
from ragged import RaggedBatch


def write(
    batch: RaggedBatch,
    slots: torch.Tensor,
    seeds: torch.Tensor | None,
    kv: torch.Tensor | None,
    expected: torch.Tensor | None,
    memory: Memory,
    launch: int,
) -> None:
    """The serial walk: each request's chain, token by token."""
    stamps, token_ids, bounds = memory.stamps, batch.token_ids.tolist(), batch.offsets.tolist()
    num_slots = len(stamps)
    for request, (row, prefix) in enumerate(
        zip(batch.req_pool_indices.tolist(), batch.prefix_lens.tolist(), strict=True)
    ):
        chain, seed = kinds.ANCHOR, kinds.NO_SLOT if seeds is None else int(seeds[request])
        if kinds.PADDING_SLOT < seed < num_slots:
            chain = _behind(stamps, seed)
        elif not kinds.NO_SLOT <= seed < num_slots and bounds[request] < bounds[request + 1]:
            _tell(memory, launch, kinds.SLOT, request, row, seed, prefix - 1)
        for index in range(bounds[request], bounds[request + 1]):
            token, slot, position = token_ids[index], int(slots[index]), prefix + index - bounds[request]
            bits = 0
            if kinds.PADDING_SLOT < slot < num_slots:
                fresh = 0 if kv is None else int(kv[index])
                stamps[slot] = torch.tensor([token, position, signed(chain), fresh], dtype=torch.int64)
                memory.counters[0, kinds.WRITTEN] += 1
            elif not kinds.NO_SLOT <= slot < num_slots:
                bits |= kinds.SLOT
            wanted = -1 if expected is None else int(expected[index])
            if expected is not None and kinds.PLACEHOLDER not in (wanted, token) and wanted != token:
                bits |= kinds.WRITE_INPUT
            if bits:
                _tell(memory, launch, bits, request, row, slot, position, token, wanted, 0, 0, position)
            chain += mix(token, position)


def hash_kv(slots: torch.Tensor, num_slots: int, turns: tuple[Turn, ...]) -> torch.Tensor:
    """int64 ``[n]``: each slot's KV bytes, word by word."""
    hashes = []
    for slot in slots.tolist():
        total = 0
        for source, number, _, _ in (turn for turn in turns if turn.takes(slot)):
            if not kinds.PADDING_SLOT < slot < num_slots:
                continue
            begin = slot // source.page_size * source.page_stride + slot % source.page_size * source.token_stride
            words = source.words()[begin // 8 : (begin + source.leading_bytes) // 8].tolist()
            total += mix_word(sum(mix_word(word, place) for place, word in enumerate(words, 1)), number + 1)
        hashes.append(signed(total))
    return torch.tensor(hashes, dtype=torch.int64)


def check(checks: Checks, pool: Pooled | None, turns: tuple[Turn, ...], memory: Memory, launch: int) -> None:
    """Every planned check, one by one."""
    table, state = checks.table.tolist(), memory.state
    step, phase = int(state[kinds.STATE_STEP]), int(state[kinds.STATE_CALLS]) % checks.period
    for request, (row, length) in enumerate(zip(checks.rows.tolist(), checks.lens.tolist(), strict=True)):
        if not 0 <= row < len(table) or not 0 <= length <= checks.table.shape[1]:
            _tell(memory, launch, kinds.REQUEST_BIT, request, row, -1, length)
            continue
        for position in range(max(length - checks.window, 0), length):
            if position % checks.period != phase:
                continue
            follows = position == 0 or position > length - checks.window
            wanted = -1
            if pool is not None and row < len(pool.tokens) and position < int(pool.valid_lens[row]):
                wanted = int(pool.tokens[row, position]) if position < pool.tokens.shape[1] else -1
            before = table[row][position - 1] if position else -1
            _check(memory, launch, request, row, table[row][position], before, position, follows, wanted, turns)
    state[2:][torch.arange(kinds.PHASES) % checks.period == phase] = step
    state[kinds.STATE_CALLS] += 1


def sweep(triples: torch.Tensor, turns: tuple[Turn, ...], memory: Memory, launch: int) -> None:
    """Explicit (slot, predecessor, position)."""
    for slot, before, position in triples.tolist():
        _check(memory, launch, -1, -1, slot, before, position, True, -1, turns)


def _check(
    memory: Memory, launch: int, request: int, row: int, slot: int, before: int, position: int, follows: bool,
    wanted: int, turns: tuple[Turn, ...],
) -> None:  # fmt: skip
    stamps, counters, num_slots = memory.stamps, memory.counters, len(memory.stamps)
    if not kinds.PADDING_SLOT < slot < num_slots:
        counters[0, kinds.SKIPPED] += 1
        if not kinds.NO_SLOT <= slot < num_slots:
            _tell(memory, launch, kinds.SLOT, request, row, slot, position)
        return
    token, stored, chain, kv = stamps[slot].tolist()
    counters[0, kinds.COMPARED_POSITION] += 1
    bits = kinds.POSITION_BIT if stored != position else 0
    expected, found = 0, chain
    if follows and (position == 0 or kinds.PADDING_SLOT < before < num_slots):
        counters[0, kinds.COMPARED_CHAIN] += 1
        expected = kinds.ANCHOR if position == 0 else signed(_behind(stamps, before))
        bits |= kinds.CHAIN if chain != expected else 0
    told = wanted != kinds.PLACEHOLDER and token != kinds.PLACEHOLDER
    if told:
        counters[0, kinds.COMPARED_TOKEN] += 1
        bits |= kinds.TOKEN_BIT if token != wanted else 0
    if turns:
        counters[0, kinds.COMPARED_KV] += 1
        fresh = int(hash_kv(torch.tensor([slot]), num_slots, turns)[0])
        bits |= kinds.KV_BIT if kv != fresh else 0
        if not bits & kinds.CHAIN:
            expected, found = fresh, kv
    if bits:
        seen = wanted if told else -1
        _tell(memory, launch, bits, request, row, slot, position, token, seen, found, expected, stored)


def _behind(stamps: torch.Tensor, slot: int) -> int:
    token, position, chain, _ = stamps[slot].tolist()
    return int(chain) + mix(token, position)


def _tell(
    memory: Memory, launch: int, bits: int, request: int, row: int, slot: int, position: int, token: int = -1,
    wanted: int = -1, found: int = 0, expected: int = 0, stored: int = -1,
) -> None:  # fmt: skip
    log, capacity = memory.log, memory.log.shape[0] - 1
    index = int(log[0, kinds.FOUND_COUNT])
    log[0, kinds.FOUND_COUNT] += 1
    if 0 <= index < int(log[0, kinds.FREED]) + capacity:
        line = [bits, index + 1, launch, request, row, slot, position, int(memory.state[kinds.STATE_STEP])]
        line += [token, wanted, found, expected, stored]
        log[1 + index % capacity, : len(line)] = torch.tensor(line, dtype=torch.int64)
