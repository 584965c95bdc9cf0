"""Stamps on KV slots, written: the prefix sums of a request's mixed tokens, tile by tile, in parallel.

A request of one tile takes one launch. Longer ones take two: the sum of each tile, then the stamps, each tile adding up
the sums before it.
"""

import triton
import triton.language as tl

from kv_canary import kinds
from kv_canary.kernels._guards import offsets_ok, tile_ok
from kv_canary.kernels._mix import mix, mix_words
from kv_canary.kernels._stamps import (
    ANCHOR,
    COUNTER_LINES,
    COUNTERS,
    SLOT_BIT,
    WRITTEN,
    chain_behind,
    note,
    slot_bad,
    slot_ok,
    store_stamps,
)

WRITE_INPUT = tl.constexpr(kinds.WRITE_INPUT)
PLACEHOLDER = tl.constexpr(kinds.PLACEHOLDER)
SIZES = ["num_tokens", "num_reqs", "column_tiles", "num_slots", "capacity", "launch"]
POINTERS = [
    "flat_ptr", "offsets_ptr", "prefix_lens_ptr", "rows_ptr", "tiles_ptr", "slots_ptr", "seeds_ptr", "kv_ptr",
    "expected_ptr", "sums_ptr", "log_ptr", "state_ptr", "counters_ptr",
]  # fmt: skip
"""Nothing specialises: no batch size and no alignment compiles anew. Stamps are always aligned to 16 bytes."""
KV_SIZES = ["num_items", "num_slots", "page_stride", "token_stride", "num_words", "source", "among", "share"]
LANES = tl.constexpr(32)
"""Lanes of a warp."""
SUMS = tl.constexpr(256)
"""Tile sums that one load adds up."""


@triton.jit
def locate(program, tiles_ptr, num_tokens, num_reqs, column_tiles, LISTED: tl.constexpr, REQUESTS: tl.constexpr):
    """The requests and the column tile of a program; requests beyond the batch where a line cannot be followed."""
    if LISTED:
        request = tl.load(tiles_ptr + 2 * program)
        column_tile = tl.load(tiles_ptr + 2 * program + 1)
    else:
        request = program // column_tiles * REQUESTS
        column_tile = program % column_tiles
    listed = tile_ok(request, column_tile, num_tokens) & (column_tile <= program)
    requests = tl.where(listed, request, num_reqs) + tl.arange(0, REQUESTS)  # [REQUESTS] int64
    return requests, tl.where(listed, column_tile, 0)


@triton.jit
def load_tile(
    flat_ptr, offsets_ptr, prefix_lens_ptr, requests, column_tile, num_tokens, num_reqs, COLUMNS: tl.constexpr
):
    """A tile's tokens, their places and their mixed sums' terms, and which lanes hold any."""
    inside = requests < num_reqs
    starts = tl.load(offsets_ptr + requests, mask=inside, other=0)  # [REQUESTS] int64
    ends = tl.load(offsets_ptr + requests + 1, mask=inside, other=0)  # [REQUESTS] int64
    prefixes = tl.load(prefix_lens_ptr + requests, mask=inside, other=0)  # [REQUESTS] int64
    good = inside & offsets_ok(requests, starts, ends, num_tokens) & (prefixes >= 0)
    index = column_tile * COLUMNS + tl.arange(0, COLUMNS)[None, :]  # [1, COLUMNS] int64
    owned = index < tl.where(good, ends - starts, 0)[:, None]
    at = starts[:, None] + index  # [REQUESTS, COLUMNS] int64
    token_ids = tl.load(flat_ptr + at, mask=owned, other=0)  # [REQUESTS, COLUMNS] int64
    positions = prefixes[:, None] + index  # [REQUESTS, COLUMNS] int64
    return token_ids, positions, tl.where(owned, mix(token_ids, positions), 0), at, owned, prefixes, good


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=POINTERS)
def sum_tiles(
    flat_ptr, offsets_ptr, prefix_lens_ptr, tiles_ptr, sums_ptr,
    num_tokens: tl.int64, num_reqs: tl.int64, column_tiles: tl.int64,
    LISTED: tl.constexpr, REQUESTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The sum of each tile's mixed tokens, int64 ``[programs]``. REQUESTS is 1."""
    program = tl.program_id(0).to(tl.int64)  # the one widening: every address below derives from int64
    requests, column_tile = locate(program, tiles_ptr, num_tokens, num_reqs, column_tiles, LISTED, REQUESTS)
    _, _, terms, _, _, _, _ = load_tile(
        flat_ptr, offsets_ptr, prefix_lens_ptr, requests, column_tile, num_tokens, num_reqs, COLUMNS
    )
    tl.store(sums_ptr + program, tl.sum(tl.sum(terms, axis=1), axis=0))


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=POINTERS)
def write_stamps(
    flat_ptr, offsets_ptr, prefix_lens_ptr, rows_ptr, tiles_ptr, slots_ptr, seeds_ptr, kv_ptr, expected_ptr, sums_ptr,
    stamps_ptr, log_ptr, state_ptr, counters_ptr,
    num_tokens: tl.int64, num_reqs: tl.int64, column_tiles: tl.int64, num_slots: tl.int64, capacity: tl.int64,
    launch: tl.int64, LISTED: tl.constexpr, PARTS: tl.constexpr, SEEDED: tl.constexpr, HAS_KV: tl.constexpr,
    EXPECTED: tl.constexpr, REQUESTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Each program the stamps of a tile of REQUESTS x COLUMNS tokens. PARTS: of several tiles a request, REQUESTS 1."""
    program = tl.program_id(0).to(tl.int64)  # the one widening: every address below derives from int64

    # locate and load
    requests, column_tile = locate(program, tiles_ptr, num_tokens, num_reqs, column_tiles, LISTED, REQUESTS)
    token_ids, positions, terms, at, owned, prefixes, good = load_tile(
        flat_ptr, offsets_ptr, prefix_lens_ptr, requests, column_tile, num_tokens, num_reqs, COLUMNS
    )
    slots = tl.load(slots_ptr + at, mask=owned, other=-1)  # [REQUESTS, COLUMNS] int64

    # chain
    base = tl.zeros_like(requests) + ANCHOR  # [REQUESTS] int64
    if SEEDED:
        seeds = tl.load(seeds_ptr + requests, mask=good, other=-1)  # [REQUESTS] int64
        seeded = good & slot_ok(seeds, num_slots)
        base = tl.where(seeded, chain_behind(stamps_ptr, seeds, seeded), base)
    if PARTS:
        added = tl.zeros([], dtype=tl.int64)
        while added < column_tile:
            lanes = added + tl.arange(0, SUMS)  # [SUMS] int64
            sums = tl.load(sums_ptr + program - column_tile + lanes, mask=lanes < column_tile, other=0)  # [SUMS] int64
            base += tl.sum(sums, axis=0)
            added += SUMS
    chains = base[:, None] + tl.cumsum(terms, axis=1) - terms  # [REQUESTS, COLUMNS] int64

    # store
    stamped = owned & slot_ok(slots, num_slots)
    hashes = tl.zeros_like(slots)
    if HAS_KV:
        hashes = tl.load(kv_ptr + at, mask=stamped, other=0)  # [REQUESTS, COLUMNS] int64
    store_stamps(stamps_ptr, slots, stamped, token_ids, tl.broadcast_to(positions, slots.shape), chains, hashes)
    written = tl.sum(tl.sum(stamped.to(tl.int64), axis=1), axis=0)
    tl.atomic_add(counters_ptr + program % COUNTER_LINES * COUNTERS + WRITTEN, written, sem="relaxed")

    # report
    wanted = tl.zeros_like(token_ids) - 1
    differs = owned & (slots != slots)
    if EXPECTED:
        wanted = tl.load(expected_ptr + at, mask=owned, other=-1)  # [REQUESTS, COLUMNS] int64
        differs = owned & (wanted != PLACEHOLDER) & (token_ids != PLACEHOLDER) & (wanted != token_ids)
    outside = owned & slot_bad(slots, num_slots)
    zero = tl.zeros_like(slots)
    if tl.max(tl.max((differs | outside).to(tl.int32), axis=1), axis=0) > 0:
        bits = zero + tl.where(differs, WRITE_INPUT, 0) + tl.where(outside, SLOT_BIT, 0)
        rows = zero + tl.load(rows_ptr + requests, mask=good, other=-1)[:, None]
        note(
            log_ptr, state_ptr, capacity, launch, differs | outside, bits, zero + requests[:, None], rows, slots,
            positions, token_ids, wanted, zero, zero, positions,
        )  # fmt: skip
    if SEEDED:
        begins = (tl.max(owned.to(tl.int32), axis=1) > 0) & (column_tile + tl.zeros_like(requests) == 0)
        lost = begins & slot_bad(seeds, num_slots)
        if tl.max(lost.to(tl.int32), axis=0) > 0:
            none = tl.zeros_like(requests)
            rows_of = tl.load(rows_ptr + requests, mask=good, other=-1)  # [REQUESTS] int64
            note(
                log_ptr, state_ptr, capacity, launch, lost, none + SLOT_BIT, requests, rows_of, seeds, prefixes - 1,
                none - 1, none - 1, none, none, none - 1,
            )  # fmt: skip


@triton.jit(do_not_specialize=KV_SIZES, do_not_specialize_on_alignment=["slots_ptr", "kv_ptr", "out_ptr"])
def hash_kv(
    slots_ptr, kv_ptr, out_ptr,
    num_items: tl.int64, num_slots: tl.int64, page_stride: tl.int64, token_stride: tl.int64,
    num_words: tl.int64, source: tl.int64, among: tl.int64, share: tl.int64,
    PAGE_SIZE: tl.constexpr, ROTATES: tl.constexpr, TOKENS: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """``out[i] += `` the hash of the first ``num_words`` words of slot i's KV; strides in words of 8 bytes.

    PAGE_SIZE is a constant: dividing int64 by a number that is not costs as much as hashing a quarter of a KiB.
    """
    items = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)  # [TOKENS] int64
    inside = items < num_items
    slots = tl.load(slots_ptr + items, mask=inside, other=-1)  # [TOKENS] int64
    here = inside & slot_ok(slots, num_slots)
    slots = tl.where(here, slots, 0)
    if ROTATES:  # only the slots whose turn it is, as in stamping.Turn
        here = here & (((source - slots) % among + among) % among < share)
    line = slots // PAGE_SIZE * page_stride + slots % PAGE_SIZE * token_stride  # [TOKENS] int64
    # A warp takes whole tokens, its lanes neighbouring words, each lane TURNS of them at a time: one sum over lanes.
    totals = tl.zeros([TOKENS, LANES], dtype=tl.int64)
    lanes = tl.arange(0, TURNS)[None, :, None] * LANES + tl.arange(0, LANES)[None, None, :]  # [1, TURNS, LANES] int32
    first = tl.zeros([], dtype=tl.int64)
    while first < num_words:
        places = first + lanes  # [1, TURNS, LANES] int64
        mask = here[:, None, None] & (places < num_words)
        words = tl.load(kv_ptr + line[:, None, None] + places, mask=mask, other=0)  # [TOKENS, TURNS, LANES] int64
        totals += tl.sum(tl.where(mask, mix_words(words, places + 1), 0), axis=1)
        first += TURNS * LANES
    total = tl.sum(totals, axis=1)  # [TOKENS] int64
    before = tl.load(out_ptr + items, mask=inside, other=0)  # [TOKENS] int64
    folded = mix_words(total, tl.zeros_like(total) + source + 1)
    tl.store(out_ptr + items, before + tl.where(here, folded, 0), mask=inside)
