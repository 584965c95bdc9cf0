"""Stamps on KV slots, verified: each against its request's position, predecessor, token and KV bytes."""

import triton
import triton.language as tl

from kv_canary import kinds
from kv_canary.kernels._guards import row_ok
from kv_canary.kernels._mix import mix
from kv_canary.kernels._search import bisect_ends, count_ends
from kv_canary.kernels._stamps import add_counts, chain_behind, check_stamps, load_stamps, note, slot_ok

REQUEST_BIT = tl.constexpr(kinds.REQUEST_BIT)
PLACEHOLDER = tl.constexpr(kinds.PLACEHOLDER)
STEP = tl.constexpr(kinds.STATE_STEP)
CALLS = tl.constexpr(kinds.STATE_CALLS)
PHASES = tl.constexpr(kinds.PHASES)
SIZES = [
    "num_reqs", "max_reqs", "max_context_len", "table_stride", "window", "shift", "num_slots", "capacity", "launch",
    "pool_stride", "pool_reqs", "pool_len", "num_items",
]  # fmt: skip
POINTERS = [
    "table_ptr", "rows_ptr", "lens_ptr", "plan_ptr", "pool_ptr", "valid_lens_ptr", "kv_ptr", "log_ptr",
    "state_ptr", "counters_ptr", "slots_ptr", "triples_ptr",
]  # fmt: skip
"""Nothing specialises: no batch size and no alignment compiles anew. Stamps are always aligned to 16 bytes."""


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=POINTERS)
def plan_checks(
    rows_ptr, lens_ptr, plan_ptr, state_ptr, log_ptr,
    num_reqs: tl.int64, max_reqs: tl.int64, max_context_len: tl.int64, window: tl.int64, shift: tl.int64,
    capacity: tl.int64, launch: tl.int64, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: where each request's checks begin, and how many come before; the phase goes on by one.

    ``plan`` is int64 ``[2, num_reqs + 1]``: offsets of the checks, CSR; the first position that is looked at.
    The period is ``1 << shift``: by divisions of int64 this took 15 us on an H200.
    """
    period = tl.full([], 1, dtype=tl.int64) << shift
    calls = tl.load(state_ptr + CALLS)
    step = tl.load(state_ptr + STEP)
    phase = calls & (period - 1)
    done = tl.zeros([], dtype=tl.int64)
    first = tl.zeros([], dtype=tl.int64)
    tl.store(plan_ptr, done)
    while first < num_reqs:
        requests = first + tl.arange(0, BLOCK)  # [BLOCK] int64
        inside = requests < num_reqs
        rows = tl.load(rows_ptr + requests, mask=inside, other=0)  # [BLOCK] int64
        lens = tl.load(lens_ptr + requests, mask=inside, other=0)  # [BLOCK] int64
        good = inside & row_ok(rows, max_reqs) & (lens >= 0) & (lens <= max_context_len)
        begins = tl.maximum(lens - window, 0)
        begins += (phase - begins) & (period - 1)
        counts = tl.where(good, tl.maximum(lens - begins + period - 1, 0) >> shift, 0)
        tl.store(plan_ptr + 1 + requests, done + tl.cumsum(counts, axis=0), mask=inside)
        tl.store(plan_ptr + num_reqs + 1 + requests, begins, mask=inside)
        bad = inside & ~good
        if tl.max(bad.to(tl.int32), axis=0) > 0:
            none = tl.zeros_like(rows)
            note(
                log_ptr, state_ptr, capacity, launch, bad, none + REQUEST_BIT, requests, rows, none - 1, lens,
                none - 1, none - 1, none, none, none - 1,
            )  # fmt: skip
        done += tl.sum(counts, axis=0)
        first += BLOCK
    lanes = tl.arange(0, PHASES)  # [PHASES] int32
    tl.store(state_ptr + 2 + lanes, tl.zeros([PHASES], dtype=tl.int64) + step, mask=(lanes & (period - 1)) == phase)
    tl.store(state_ptr + CALLS, calls + 1)


@triton.jit
def search_plan(plan_ptr, num_reqs, first, count, WINDOW: tl.constexpr):
    """How many checks are planned in all; the first and last request of those from ``first`` on."""
    total = tl.load(plan_ptr + num_reqs)
    low = count_ends(plan_ptr, num_reqs, first, WINDOW)
    high = count_ends(plan_ptr, num_reqs, tl.minimum(first + count, total) - 1, WINDOW)
    return total, low, high


@triton.jit
def locate_checks(plan_ptr, rows_ptr, num_reqs, shift, items, total, low, high):
    """Each check's request, row, position and the first one planned, [BLOCK] int64, of requests ``low`` to ``high``."""
    inside = items.to(tl.uint64, bitcast=True) < total.to(tl.uint64, bitcast=True)  # and not below 0
    requests = tl.minimum(bisect_ends(plan_ptr, low, high, items), num_reqs - 1)  # [BLOCK] int64
    before = tl.load(plan_ptr + requests, mask=inside, other=0)  # [BLOCK] int64
    begins = tl.load(plan_ptr + num_reqs + 1 + requests, mask=inside, other=0)  # [BLOCK] int64
    rows = tl.load(rows_ptr + requests, mask=inside, other=0)  # [BLOCK] int64
    return inside, requests, rows, begins + ((items - before) << shift), begins


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=POINTERS)
def gather_slots(
    table_ptr, rows_ptr, plan_ptr, slots_ptr, num_reqs: tl.int64, table_stride: tl.int64, shift: tl.int64,
    num_items: tl.int64, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The slots that are about to be checked, int64 ``[num_items]``, -1 beyond the plan: what KV is hashed of."""
    first = tl.program_id(0).to(tl.int64) * BLOCK  # the one widening: every address below derives from int64
    total, low, high = search_plan(plan_ptr, num_reqs, first, BLOCK, WINDOW)
    if first < total:
        items = first + tl.arange(0, BLOCK)  # [BLOCK] int64
        inside, _, rows, positions, _ = locate_checks(plan_ptr, rows_ptr, num_reqs, shift, items, total, low, high)
        slots = tl.load(table_ptr + rows * table_stride + positions, mask=inside, other=-1).to(tl.int64)  # [BLOCK]
        tl.store(slots_ptr + items, slots, mask=inside & (items < num_items))


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=POINTERS)
def check_requests(
    table_ptr, rows_ptr, lens_ptr, plan_ptr, pool_ptr, valid_lens_ptr, kv_ptr, stamps_ptr, log_ptr, state_ptr,
    counters_ptr,
    num_reqs: tl.int64, table_stride: tl.int64, window: tl.int64, shift: tl.int64, num_slots: tl.int64,
    capacity: tl.int64, launch: tl.int64, pool_stride: tl.int64, pool_reqs: tl.int64, pool_len: tl.int64,
    num_items: tl.int64,
    HAS_POOL: tl.constexpr, HAS_KV: tl.constexpr, EVERY: tl.constexpr, BLOCK: tl.constexpr, TURNS: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Each program TURNS blocks of the planned checks. Slots come from ``table`` [max_reqs, max_context_len].

    EVERY: the period is 1, so that the check before is the predecessor's. Lane 0 of a block then only gives its stamp
    to lane 1, and BLOCK - 1 are checked: 2.1 million in 57 us where each loads its predecessor's again (H200).
    """
    tl.static_assert(BLOCK * TURNS < 4096, "add_counts adds up fields of 12 bits")
    program = tl.program_id(0).to(tl.int64)  # the one widening: every address below derives from int64
    lanes = tl.arange(0, BLOCK)  # [BLOCK] int32
    halo: tl.constexpr = 1 if EVERY else 0
    first = program * (BLOCK - halo) * TURNS - halo
    total, low, high = search_plan(plan_ptr, num_reqs, first, (BLOCK - halo) * TURNS + halo, WINDOW)
    if first + halo < total:
        counts = tl.zeros([BLOCK], dtype=tl.int32)
        for _ in range(TURNS):
            items = first + lanes  # [BLOCK] int64
            first += BLOCK - halo
            inside, requests, rows, positions, begins = locate_checks(
                plan_ptr, rows_ptr, num_reqs, shift, items, total, low, high
            )
            cell = table_ptr + rows * table_stride + positions
            slots = tl.load(cell, mask=inside, other=-1).to(tl.int64)  # [BLOCK]
            stamps = load_stamps(stamps_ptr, slots, inside & slot_ok(slots, num_slots))
            checked = inside & (lanes >= halo)
            # The one before the window may be somebody else's by now.
            if EVERY:
                follows = checked & (positions > begins)
                lanes_before = tl.maximum(lanes - 1, 0)
                before = tl.gather(slots, lanes_before, axis=0)  # [BLOCK] int64
                behind = tl.gather(stamps[2] + mix(stamps[0], stamps[1]), lanes_before, axis=0)  # [BLOCK] int64
                known = follows & slot_ok(before, num_slots)
            else:
                lens = tl.load(lens_ptr + requests, mask=inside, other=0)  # [BLOCK] int64
                follows = checked & (positions > tl.maximum(lens - window, 0))
                before = tl.load(cell - 1, mask=follows, other=-1).to(tl.int64)  # [BLOCK]
                known = follows & slot_ok(before, num_slots)
                behind = chain_behind(stamps_ptr, before, known)
            wanted = tl.zeros_like(slots) + PLACEHOLDER
            if HAS_POOL:
                pooled = checked & (rows < pool_reqs)
                valid = tl.load(valid_lens_ptr + rows, mask=pooled, other=0)  # [BLOCK] int64
                pooled = pooled & (positions < tl.minimum(valid, pool_len))
                pool_cell = pool_ptr + rows * pool_stride + positions
                wanted = tl.load(pool_cell, mask=pooled, other=PLACEHOLDER).to(tl.int64)  # [BLOCK]
            kv_hashes = tl.zeros_like(slots)
            if HAS_KV:
                kv_hashes = tl.load(kv_ptr + items, mask=checked & (items < num_items), other=0)  # [BLOCK] int64
            counts += check_stamps(
                stamps, log_ptr, state_ptr, num_slots, capacity, launch, checked, requests, rows, slots, positions,
                known, behind, positions == 0, wanted, kv_hashes, HAS_KV,
            )  # fmt: skip
        add_counts(counters_ptr, program, counts)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=POINTERS)
def check_triples(
    triples_ptr, kv_ptr, stamps_ptr, log_ptr, state_ptr, counters_ptr,
    num_items: tl.int64, num_slots: tl.int64, capacity: tl.int64, launch: tl.int64,
    HAS_KV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program BLOCK lines of ``triples`` int64 ``[num_items, 3]``: slot, predecessor's slot, position."""
    program = tl.program_id(0).to(tl.int64)  # the one widening: every address below derives from int64
    items = program * BLOCK + tl.arange(0, BLOCK)  # [BLOCK] int64
    inside = items < num_items
    slots = tl.load(triples_ptr + 3 * items, mask=inside, other=-1)  # [BLOCK] int64
    before = tl.load(triples_ptr + 3 * items + 1, mask=inside, other=-1)  # [BLOCK] int64
    positions = tl.load(triples_ptr + 3 * items + 2, mask=inside, other=0)  # [BLOCK] int64
    none = tl.zeros_like(slots) - 1
    kv_hashes = tl.zeros_like(slots)
    if HAS_KV:
        kv_hashes = tl.load(kv_ptr + items, mask=inside, other=0)  # [BLOCK] int64
    stamps = load_stamps(stamps_ptr, slots, inside & slot_ok(slots, num_slots))
    known = inside & (positions > 0) & slot_ok(before, num_slots)
    counts = check_stamps(
        stamps, log_ptr, state_ptr, num_slots, capacity, launch, inside, none, none, slots, positions, known,
        chain_behind(stamps_ptr, before, known), positions == 0, none, kv_hashes, HAS_KV,
    )  # fmt: skip
    add_counts(counters_ptr, program, counts)
