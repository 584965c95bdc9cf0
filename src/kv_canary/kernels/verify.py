"""Pool cells against the scheduler's tokens, and the valid lengths that say which cells may be read.

A batch's lengths are known to the host, so the grid is the scatter's: tiles of requests x columns, or a list of them;
then a few programs that look at whole requests. Violations go to a ring; what is sound costs no atomic.
"""

import triton
import triton.language as tl

from kv_canary import kinds
from kv_canary.kernels._guards import narrow, offsets_ok, prefix_ok, row_ok, tile_ok
from kv_canary.kernels._ring import claim

MISMATCH = tl.constexpr(kinds.MISMATCH)
STALE = tl.constexpr(kinds.STALE)
LENGTH = tl.constexpr(kinds.LENGTH)
UNREADABLE = tl.constexpr(kinds.UNREADABLE)
WIDTH = tl.constexpr(kinds.VIOLATION_COLUMNS)
NOT_COMPARED = tl.constexpr(kinds.NOT_COMPARED)
ENTRY_ROW = tl.constexpr(kinds.ENTRY_ROW)
ENTRY_COLUMN = tl.constexpr(kinds.ENTRY_COLUMN)
ENTRY_EXPECTED = tl.constexpr(kinds.ENTRY_EXPECTED)
ENTRY_FOUND = tl.constexpr(kinds.ENTRY_FOUND)
PLACEHOLDER = tl.constexpr(kinds.PLACEHOLDER)

SIZES = [
    "num_tokens", "num_reqs", "max_reqs", "max_context_len", "row_stride", "launch", "column_tiles", "tile_programs",
    "capacity",
]  # fmt: skip
POINTERS = [
    "flat_ptr", "offsets_ptr", "rows_ptr", "prefix_lens_ptr", "pool_ptr", "valid_lens_ptr", "log_ptr", "tiles_ptr",
]  # fmt: skip
"""Nothing specialises: no batch size and no alignment compiles anew."""


@triton.jit
def add_violations(log_ptr, capacity, launch, KIND: tl.constexpr, wrong, request, row, column, expected, found):
    """Count every wrong lane, and store it while the ring has room. All are int64 of one shape."""
    line, stored = claim(log_ptr, capacity, launch, wrong, tl.zeros_like(request) + KIND, request, WIDTH)
    tl.store(line + ENTRY_ROW, row, mask=stored)
    tl.store(line + ENTRY_COLUMN, column, mask=stored)
    tl.store(line + ENTRY_EXPECTED, expected, mask=stored)
    tl.store(line + ENTRY_FOUND, found, mask=stored)


@triton.jit
def followed(good_offsets, starts, ends, rows, prefixes, max_reqs, max_context_len):
    """Requests that lie inside of the pool, to their ends."""
    inside = row_ok(rows, max_reqs) & prefix_ok(prefixes, max_context_len)
    return good_offsets & inside & (ends - starts <= max_context_len - prefixes)


@triton.jit
def readable_columns(valid_lens_ptr, rows, mask, max_context_len):
    """How many cells of each row may be read; what the device holds is never trusted beyond the row."""
    valid = tl.load(valid_lens_ptr + rows, mask=mask, other=0)  # int64
    return tl.maximum(tl.minimum(valid, max_context_len), 0)


@triton.jit
def verify_requests(
    first, offsets_ptr, rows_ptr, prefix_lens_ptr, valid_lens_ptr, log_ptr,
    num_tokens, num_reqs, max_reqs, max_context_len, launch, capacity, EXACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK requests from ``first``: can they be followed, and, EXACT, does the row end where the request ends?"""
    requests = first + tl.arange(0, BLOCK)  # [BLOCK] int64
    inside = requests < num_reqs
    starts = tl.load(offsets_ptr + requests, mask=inside, other=0)  # [BLOCK] int64
    ends = tl.load(offsets_ptr + requests + 1, mask=inside, other=0)  # [BLOCK] int64
    rows = tl.load(rows_ptr + requests, mask=inside, other=0)  # [BLOCK] int64
    prefixes = tl.load(prefix_lens_ptr + requests, mask=inside, other=0)  # [BLOCK] int64
    good_offsets = offsets_ok(requests, starts, ends, num_tokens)
    good = followed(good_offsets, starts, ends, rows, prefixes, max_reqs, max_context_len)
    bad = inside & ~good
    valid = readable_columns(valid_lens_ptr, rows, inside & good, max_context_len)  # [BLOCK] int64
    last = prefixes + ends - starts  # [BLOCK] int64
    longer = inside & good & (valid > last)
    if tl.max(bad.to(tl.int32), axis=0) > 0:
        lost = tl.sum(tl.where(bad & good_offsets, ends - starts, 0), axis=0)
        tl.atomic_add(log_ptr + NOT_COMPARED, lost)
        add_violations(log_ptr, capacity, launch, UNREADABLE, bad, requests, rows, prefixes, starts, ends)
    if EXACT:
        if tl.max(longer.to(tl.int32), axis=0) > 0:
            add_violations(log_ptr, capacity, launch, LENGTH, longer, requests, rows, last, last, valid)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=POINTERS)
def verify_tiles(
    flat_ptr, offsets_ptr, rows_ptr, prefix_lens_ptr, pool_ptr, valid_lens_ptr, log_ptr, tiles_ptr,
    num_tokens: tl.int64, num_reqs: tl.int64, max_reqs: tl.int64, max_context_len: tl.int64, row_stride: tl.int64,
    launch: tl.int64, column_tiles: tl.int64, tile_programs: tl.int64, capacity: tl.int64,
    LISTED: tl.constexpr, EXACT: tl.constexpr, REQUESTS: tl.constexpr, COLUMNS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Grid: ``tile_programs`` tiles of REQUESTS x COLUMNS, then ``cdiv(num_reqs, WINDOW)`` request programs.

    LISTED: a program a line of ``tiles`` int64 ``[num_tiles, 2]``: request, column tile.
    """
    program = tl.program_id(0).to(tl.int64)  # the one widening: every address below derives from int64
    if program >= tile_programs:
        verify_requests(
            (program - tile_programs) * WINDOW, offsets_ptr, rows_ptr, prefix_lens_ptr, valid_lens_ptr, log_ptr,
            num_tokens, num_reqs, max_reqs, max_context_len, launch, capacity, EXACT, WINDOW,
        )  # fmt: skip
    else:
        # locate
        if LISTED:
            request = tl.load(tiles_ptr + 2 * program)
            column_tile = tl.load(tiles_ptr + 2 * program + 1)
        else:
            request = program // column_tiles * REQUESTS
            column_tile = program % column_tiles
        listed = tile_ok(request, column_tile, num_tokens)
        requests = tl.where(listed, request, num_reqs) + tl.arange(0, REQUESTS)  # [REQUESTS] int64
        column_tile = tl.where(listed, column_tile, 0)

        # load
        inside = requests < num_reqs
        starts = tl.load(offsets_ptr + requests, mask=inside, other=0)  # [REQUESTS] int64
        ends = tl.load(offsets_ptr + requests + 1, mask=inside, other=0)  # [REQUESTS] int64
        rows = tl.load(rows_ptr + requests, mask=inside, other=0)  # [REQUESTS] int64
        prefixes = tl.load(prefix_lens_ptr + requests, mask=inside, other=0)  # [REQUESTS] int64
        good_offsets = offsets_ok(requests, starts, ends, num_tokens)
        good = followed(good_offsets, starts, ends, rows, prefixes, max_reqs, max_context_len)
        valid = readable_columns(valid_lens_ptr, rows, inside & good, max_context_len)  # [REQUESTS] int64
        lengths = tl.where(inside & good, ends - starts, 0)
        index = column_tile * COLUMNS + tl.arange(0, COLUMNS)[None, :]  # [1, COLUMNS] int64
        owned = index < lengths[:, None]
        columns = prefixes[:, None] + index  # [REQUESTS, COLUMNS] int64
        token_ids = tl.load(flat_ptr + starts[:, None] + index, mask=owned, other=0)  # [REQUESTS, COLUMNS] int64
        cells = tl.load(
            pool_ptr + (rows * row_stride + prefixes)[:, None] + index, mask=owned, other=PLACEHOLDER
        )  # [REQUESTS, COLUMNS] int32

        # check
        short, _ = narrow(token_ids)
        readable = columns < valid[:, None]
        stale = owned & ~readable
        skipped = owned & readable & ((short == PLACEHOLDER) | (cells == PLACEHOLDER))
        wrong = owned & readable & ~skipped & (short != cells)

        # report
        if tl.max(tl.max((stale | skipped | wrong).to(tl.int32), axis=1), axis=0) > 0:
            lost = tl.sum(tl.sum((stale | skipped).to(tl.int64), axis=1), axis=0)
            tl.atomic_add(log_ptr + NOT_COMPARED, lost)
            zero = tl.zeros_like(token_ids)
            whose, where = zero + requests[:, None], zero + rows[:, None]
            found = cells.to(tl.int64)
            add_violations(log_ptr, capacity, launch, MISMATCH, wrong, whose, where, columns, token_ids, found)
            add_violations(log_ptr, capacity, launch, STALE, stale, whose, where, columns, token_ids, found)


@triton.jit(
    do_not_specialize=["num_tokens", "num_reqs", "max_reqs", "max_context_len"],
    do_not_specialize_on_alignment=["offsets_ptr", "rows_ptr", "prefix_lens_ptr", "valid_lens_ptr"],
)
def set_valid_lens(
    offsets_ptr, rows_ptr, prefix_lens_ptr, valid_lens_ptr,
    num_tokens: tl.int64, num_reqs: tl.int64, max_reqs: tl.int64, max_context_len: tl.int64, BLOCK: tl.constexpr,
):  # fmt: skip
    """``valid_lens[row] = prefix_len + length`` of every sound request. Grid: ``cdiv(num_reqs, BLOCK)``."""
    requests = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK] int64
    inside = requests < num_reqs
    starts = tl.load(offsets_ptr + requests, mask=inside, other=0)  # [BLOCK] int64
    ends = tl.load(offsets_ptr + requests + 1, mask=inside, other=0)  # [BLOCK] int64
    rows = tl.load(rows_ptr + requests, mask=inside, other=0)  # [BLOCK] int64
    prefixes = tl.load(prefix_lens_ptr + requests, mask=inside, other=0)  # [BLOCK] int64
    good = offsets_ok(requests, starts, ends, num_tokens) & row_ok(rows, max_reqs)
    good = good & prefix_ok(prefixes, max_context_len)
    valid = prefixes + tl.minimum(ends - starts, max_context_len - prefixes)
    tl.store(valid_lens_ptr + rows, valid, mask=inside & good)
