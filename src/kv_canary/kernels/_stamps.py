"""What the kernels on stamps share: reading a stamp, noting a violation, counting what was really compared."""

import triton
import triton.language as tl

from kv_canary import kinds
from kv_canary.kernels._mix import mix
from kv_canary.kernels._ring import claim

WIDTH = tl.constexpr(kinds.STAMP_COLUMNS)
FIELDS = tl.constexpr(kinds.STAMP_FIELDS)
COUNTER_LINES = tl.constexpr(kinds.COUNTER_LINES)
COUNTERS = tl.constexpr(kinds.COUNTERS)
COMPARED_CHAIN = tl.constexpr(kinds.COMPARED_CHAIN)
COMPARED_POSITION = tl.constexpr(kinds.COMPARED_POSITION)
COMPARED_TOKEN = tl.constexpr(kinds.COMPARED_TOKEN)
COMPARED_KV = tl.constexpr(kinds.COMPARED_KV)
WRITTEN = tl.constexpr(kinds.WRITTEN)
SKIPPED = tl.constexpr(kinds.SKIPPED)
CHAIN_BIT = tl.constexpr(kinds.CHAIN)
POSITION_BIT = tl.constexpr(kinds.POSITION_BIT)
TOKEN_BIT = tl.constexpr(kinds.TOKEN_BIT)
KV_BIT = tl.constexpr(kinds.KV_BIT)
SLOT_BIT = tl.constexpr(kinds.SLOT)
ANCHOR = tl.constexpr(kinds.ANCHOR)
STEP = tl.constexpr(kinds.STATE_STEP)
PLACEHOLDER = tl.constexpr(kinds.PLACEHOLDER)


@triton.jit
def slot_ok(slots, num_slots):
    """A slot that has a stamp: inside, and not the padding. As uint64 a negative number is a huge one."""
    return (slots - 1).to(tl.uint64, bitcast=True) < (num_slots - 1).to(tl.uint64)


@triton.jit
def slot_bad(slots, num_slots):
    """A slot that leads outside; -1 and the padding are skipped, and no fault."""
    return (slots + 1).to(tl.uint64, bitcast=True) > num_slots.to(tl.uint64)


@triton.jit
def load_stamps(stamps_ptr, slots, mask):
    """Token, position, chain hash and KV hash of each slot's stamp; slots are [BLOCK] int64.

    A stamp is one sector of 32 bytes; neighbouring lanes load it together, once. Field by field, of 2.1 million slots
    at random, check_requests took 83 us on an H200: L1 looks a line up for every lane of every load.
    """
    lines = tl.where(mask, slots, 0)[:, None] * FIELDS + tl.arange(0, FIELDS)[None, :]  # [BLOCK, FIELDS] int64
    stamps = tl.load(stamps_ptr + lines, mask=mask[:, None], other=0)  # [BLOCK, FIELDS] int64
    even, odd = tl.split(tl.reshape(stamps, (slots.shape[0], 2, 2)))
    token_ids, chains = tl.split(even)
    positions, kv_hashes = tl.split(odd)
    return token_ids, positions, chains, kv_hashes


@triton.jit
def store_stamps(stamps_ptr, slots, mask, token_ids, positions, chains, kv_hashes):
    """Stamps of slots, all [REQUESTS, COLUMNS] int64, a sector of 32 bytes at a time.

    Field by field, 256 x 8192 took 284 us on an H200, an index_copy_ of as many 75.
    """
    shape: tl.constexpr = (slots.shape[0], slots.shape[1], FIELDS)
    stamps = tl.reshape(tl.join(tl.join(token_ids, chains), tl.join(positions, kv_hashes)), shape)
    lines = tl.where(mask, slots, 0)[:, :, None] * FIELDS + tl.arange(0, FIELDS)[None, None, :]
    tl.store(stamps_ptr + lines, stamps, mask=mask[:, :, None])


@triton.jit
def chain_behind(stamps_ptr, slots, mask):
    """The chain hash that follows each slot's own."""
    token_ids, positions, chains, _ = load_stamps(stamps_ptr, slots, mask)
    return chains + mix(token_ids, positions)


@triton.jit
def note(
    log_ptr, state_ptr, capacity, launch, wrong, bits, request, row, slot, position,
    stored_token, expected_token, stored_hash, expected_hash, stored_position,
):  # fmt: skip
    """Count every wrong lane, and store it while the ring has room. All are int64 of one shape."""
    line, stored = claim(log_ptr, capacity, launch, wrong, bits, request, WIDTH)
    tl.store(line + 4, row, mask=stored)  # kinds.STAMP_ROW and the following, in their order
    tl.store(line + 5, slot, mask=stored)
    tl.store(line + 6, position, mask=stored)
    tl.store(line + 7, tl.zeros_like(slot) + tl.load(state_ptr + STEP), mask=stored)
    tl.store(line + 8, stored_token, mask=stored)
    tl.store(line + 9, expected_token, mask=stored)
    tl.store(line + 10, stored_hash, mask=stored)
    tl.store(line + 11, expected_hash, mask=stored)
    tl.store(line + 12, stored_position, mask=stored)


@triton.jit
def pack_counts(position, chain, token, kv, skipped):
    """Five masks [BLOCK] as one int32, 6 bits for each, so that a lane can add up a few."""
    packed = position.to(tl.int32) | (chain.to(tl.int32) << 6) | (token.to(tl.int32) << 12)
    return packed | (kv.to(tl.int32) << 18) | (skipped.to(tl.int32) << 24)


@triton.jit
def add_counts(counters_ptr, program, counts):
    """Add what ``pack_counts`` gave, [BLOCK] int32, each below 4096 over all lanes, to the counters."""
    wide = counts.to(tl.int64)
    packed = (wide & 0x3F) + ((wide >> 6 & 0x3F) << 12) + ((wide >> 12 & 0x3F) << 24)
    # One reduction of five fields of 12 bits: five reductions are ten barriers.
    packed = tl.sum(packed + ((wide >> 18 & 0x3F) << 36) + ((wide >> 24 & 0x3F) << 48), axis=0)
    line = counters_ptr + program % COUNTER_LINES * COUNTERS
    add_counter(line + COMPARED_POSITION, packed)
    add_counter(line + COMPARED_CHAIN, packed >> 12)
    add_counter(line + COMPARED_TOKEN, packed >> 24)
    add_counter(line + COMPARED_KV, packed >> 36)
    add_counter(line + SKIPPED, packed >> 48)


@triton.jit
def add_counter(counter_ptr, packed):
    """Add the lowest field."""
    amount = packed & 0xFFF
    if amount > 0:
        tl.atomic_add(counter_ptr, amount, sem="relaxed")


@triton.jit
def check_stamps(
    stamps, log_ptr, state_ptr, num_slots, capacity, launch, inside, request, row, slots, positions, known, behind,
    starts, expected_tokens, kv_hashes, HAS_KV: tl.constexpr,
):  # fmt: skip
    """Hold ``stamps``, the fields of those of ``slots``, against what they must be. Returns counts.

    All are [BLOCK], int64 or masks. The chain hash is ``behind`` where that is ``known``, the anchor where the request
    ``starts``; elsewhere it is not compared.
    """
    token_ids, stored, chains, hashes = stamps
    here = inside & slot_ok(slots, num_slots)
    outside = inside & slot_bad(slots, num_slots)
    expected = tl.where(starts, ANCHOR, behind)
    chained = here & (known | starts)
    told = here & (expected_tokens != PLACEHOLDER) & (token_ids != PLACEHOLDER)

    bits = tl.where(chained & (chains != expected), CHAIN_BIT, 0) + tl.where(stored != positions, POSITION_BIT, 0)
    bits += tl.where(told & (token_ids != expected_tokens), TOKEN_BIT, 0)
    if HAS_KV:
        bits += tl.where(hashes != kv_hashes, KV_BIT, 0)
    bits = tl.where(here, bits, tl.where(outside, SLOT_BIT, 0)).to(tl.int64)
    if tl.max(bits, axis=0) > 0:
        found, wanted = chains, tl.where(chained, expected, 0)
        if HAS_KV:
            of_kv = (bits & CHAIN_BIT) == 0
            found, wanted = tl.where(of_kv, hashes, chains), tl.where(of_kv, kv_hashes, wanted)
        note(
            log_ptr, state_ptr, capacity, launch, bits > 0, bits, request, row, slots, positions,
            tl.where(here, token_ids, -1), tl.where(told, expected_tokens, -1), tl.where(here, found, 0),
            tl.where(here, wanted, 0), tl.where(here, stored, -1),
        )  # fmt: skip
    return pack_counts(here, chained, told, here & HAS_KV, inside & ~here)
