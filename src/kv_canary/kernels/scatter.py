"""Scatter of flat token ids into pool rows, guarded on the device.

The grid is the flat token stream in blocks, so that skewed lengths cost nothing, then a few programs that check the
requests. Token programs contain (skip what is wrong) and report tokens; request programs report requests.
"""

import triton
import triton.language as tl

from kv_canary.kernels._guards import (
    load_prefix,
    narrow,
    offsets_ok,
    prefix_ok,
    report_requests,
    report_tokens,
    row_ok,
    tile_ok,
)
from kv_canary.kernels._search import bisect_ends, count_ends

SIZES = ["num_tokens", "num_reqs", "max_reqs", "max_context_len", "row_stride", "launch"]
"""Sizes are int64 in every variant and never specialised, so that no batch size compiles anew."""
POINTERS = ["offsets_ptr", "rows_ptr", "prefix_lens_ptr", "pool_ptr", "report_ptr", "tiles_ptr", "valid_lens_ptr"]
"""Pointers whose alignment selects no variant: what is read or written through them is not vectorised anyway."""


@triton.jit
def write_request(
    flat_ptr, offsets_ptr, rows_ptr, prefix_lens_ptr, pool_ptr, request,
    num_tokens, max_reqs, max_context_len, row_stride,
    HAS_PREFIX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All tokens of one request, by one program."""
    start = tl.load(offsets_ptr + request)
    end = tl.load(offsets_ptr + request + 1)
    row = tl.load(rows_ptr + request)
    prefix = load_prefix(prefix_lens_ptr, request, request >= 0, HAS_PREFIX)
    ok = offsets_ok(request, start, end, num_tokens) & row_ok(row, max_reqs) & prefix_ok(prefix, max_context_len)
    if ok:
        left = tl.minimum(end - start, max_context_len - prefix)
        done = tl.zeros([], dtype=tl.int64)
        while done < left:
            index = done + tl.arange(0, BLOCK)  # [BLOCK] int64
            token_ids = tl.load(flat_ptr + start + index, mask=index < left, other=0)  # [BLOCK] int64
            short, _ = narrow(token_ids)
            tl.store(pool_ptr + row * row_stride + prefix + index, short, mask=index < left)
            done += BLOCK


@triton.jit
def decreases(offsets_ptr, first, num_reqs, BLOCK: tl.constexpr):
    """Whether any of BLOCK requests from ``first`` ends before it starts."""
    requests = first + tl.arange(0, BLOCK)  # [BLOCK] int64
    inside = requests < num_reqs
    starts = tl.load(offsets_ptr + requests, mask=inside, other=0)  # [BLOCK] int64
    ends = tl.load(offsets_ptr + requests + 1, mask=inside, other=0)  # [BLOCK] int64
    return tl.max((ends < starts).to(tl.int32), axis=0) > 0


@triton.jit
def mend_decreasing(
    first, flat_ptr, offsets_ptr, rows_ptr, prefix_lens_ptr, pool_ptr,
    num_tokens, num_reqs, max_reqs, max_context_len, row_stride,
    HAS_PREFIX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Where offsets decrease, a token may belong to several requests or to none that a search finds.

    The program that holds the first decrease then writes every sound request in full, one after the other: slow, and
    exact. Cells that the token programs wrote get the same values again.
    """
    if decreases(offsets_ptr, first, num_reqs, BLOCK):
        earlier = tl.zeros([], dtype=tl.int32)
        block = tl.zeros([], dtype=tl.int64)
        while block < first:
            earlier += decreases(offsets_ptr, block, num_reqs, BLOCK).to(tl.int32)
            block += BLOCK
        if earlier == 0:
            request = tl.zeros([], dtype=tl.int64)
            while request < num_reqs:
                write_request(
                    flat_ptr, offsets_ptr, rows_ptr, prefix_lens_ptr, pool_ptr, request,
                    num_tokens, max_reqs, max_context_len, row_stride, HAS_PREFIX, BLOCK,
                )  # fmt: skip
                request += 1


@triton.jit
def check_requests(
    first, offsets_ptr, rows_ptr, prefix_lens_ptr, report_ptr,
    num_tokens, num_reqs, max_reqs, max_context_len, launch,
    HAS_PREFIX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Check BLOCK requests from ``first``."""
    requests = first + tl.arange(0, BLOCK)  # [BLOCK] int64
    inside = requests < num_reqs
    starts = tl.load(offsets_ptr + requests, mask=inside, other=0)  # [BLOCK] int64
    ends = tl.load(offsets_ptr + requests + 1, mask=inside, other=0)  # [BLOCK] int64
    rows = tl.load(rows_ptr + requests, mask=inside, other=0)  # [BLOCK] int64
    prefixes = load_prefix(prefix_lens_ptr, requests, inside, HAS_PREFIX)  # [BLOCK] int64
    good_offsets = offsets_ok(requests, starts, ends, num_tokens)
    good_row = row_ok(rows, max_reqs)
    good_prefix = prefix_ok(prefixes, max_context_len)
    written = tl.minimum(ends - starts, max_context_len - prefixes)
    report_requests(
        requests, inside, starts, ends, rows, prefixes, good_offsets, good_row, good_prefix,
        written, report_ptr, launch,
    )  # fmt: skip


@triton.jit
def find_request(
    offsets_ptr, rows_ptr, prefix_lens_ptr, num_reqs, first, last, HAS_PREFIX: tl.constexpr, WINDOW: tl.constexpr
):  # fmt: skip
    """The requests that own tokens ``first`` and ``last``, and the row and prefix of the former.

    Up to WINDOW requests all of it comes from loads that do not wait for one another.
    """
    if num_reqs <= WINDOW:
        lanes = tl.arange(0, WINDOW)
        inside = lanes < num_reqs
        ends = tl.load(offsets_ptr + 1 + lanes, mask=inside, other=last + 1)  # [WINDOW] int64
        rows = tl.load(rows_ptr + lanes, mask=inside, other=0)  # [WINDOW] int64
        prefixes = load_prefix(prefix_lens_ptr, lanes.to(tl.int64), inside, HAS_PREFIX)  # [WINDOW] int64
        request = tl.minimum(tl.sum((ends <= first).to(tl.int32), axis=0).to(tl.int64), num_reqs - 1)
        last_request = tl.sum((ends <= last).to(tl.int32), axis=0).to(tl.int64)
        row = tl.sum(tl.where(lanes == request, rows, 0), axis=0)
        prefix = tl.sum(tl.where(lanes == request, prefixes, 0), axis=0)
    else:
        request = tl.minimum(count_ends(offsets_ptr, num_reqs, first, WINDOW), num_reqs - 1)
        row = tl.load(rows_ptr + request)
        prefix = load_prefix(prefix_lens_ptr, request, request >= 0, HAS_PREFIX)
        last_request = num_reqs  # not known: the search goes to the end
        if tl.load(offsets_ptr + request + 1) <= last:
            last_request = count_ends(offsets_ptr, num_reqs, last, WINDOW)
    return request, tl.maximum(tl.minimum(last_request, num_reqs - 1), request), row, prefix


@triton.jit
def write_tokens(
    first, flat_ptr, offsets_ptr, rows_ptr, prefix_lens_ptr, pool_ptr, report_ptr,
    num_tokens, num_reqs, max_reqs, max_context_len, row_stride, launch,
    HAS_PREFIX: tl.constexpr, REPORT: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """BLOCK tokens of the flat stream from ``first``."""
    last = tl.minimum(first + BLOCK, num_tokens) - 1
    tokens = first + tl.arange(0, BLOCK)  # [BLOCK] int64
    token_ids = tl.load(flat_ptr + tokens, mask=tokens <= last, other=0)  # [BLOCK] int64
    short, fits = narrow(token_ids)
    request, last_request, row, prefix = find_request(
        offsets_ptr, rows_ptr, prefix_lens_ptr, num_reqs, first, last, HAS_PREFIX, WINDOW
    )
    start = tl.load(offsets_ptr + request)
    end = tl.load(offsets_ptr + request + 1)

    # check and store: straight where one request owns the block, by a search between its ends otherwise
    if end > last:
        sound = offsets_ok(request, start, end, num_tokens)
        sound = sound & row_ok(row, max_reqs) & prefix_ok(prefix, max_context_len)
        columns = prefix + tokens - start  # [BLOCK] int64
        # Scalar conditions enter as bounds: the interpreter cannot splat a scalar bool into a mask.
        inside = (tokens >= start) & (tokens <= tl.where(sound, last, -1)) & (columns < max_context_len)
        tl.store(pool_ptr + row * row_stride + columns, short, mask=inside)
    else:
        requests = bisect_ends(offsets_ptr, request, last_request, tokens)  # [BLOCK] int64
        starts = tl.load(offsets_ptr + requests)  # [BLOCK] int64
        ends = tl.load(offsets_ptr + requests + 1)  # [BLOCK] int64
        rows = tl.load(rows_ptr + requests)  # [BLOCK] int64
        prefixes = load_prefix(prefix_lens_ptr, requests, requests >= 0, HAS_PREFIX)  # [BLOCK] int64
        ok = offsets_ok(requests, starts, ends, num_tokens) & row_ok(rows, max_reqs)
        ok = ok & prefix_ok(prefixes, max_context_len)
        columns = prefixes + tokens - starts  # [BLOCK] int64
        inside = ok & (tokens >= starts) & (tokens < ends) & (tokens <= last) & (columns < max_context_len)
        tl.store(pool_ptr + rows * row_stride + columns, short, mask=inside)
    if REPORT:
        if tl.min(fits.to(tl.int32), axis=0) == 0:
            report_tokens(first, last, flat_ptr, offsets_ptr, report_ptr, num_tokens, num_reqs, launch)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=POINTERS)
def scatter_flat(
    flat_ptr, offsets_ptr, rows_ptr, prefix_lens_ptr, pool_ptr, report_ptr,
    num_tokens: tl.int64, num_reqs: tl.int64, max_reqs: tl.int64, max_context_len: tl.int64, row_stride: tl.int64,
    launch: tl.int64, HAS_PREFIX: tl.constexpr, REPORT: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Grid: ``cdiv(num_tokens, BLOCK)`` token programs, then ``cdiv(num_reqs, WINDOW)`` request programs."""
    program = tl.program_id(0).to(tl.int64)  # the one widening: every address below derives from int64
    token_programs = (num_tokens + BLOCK - 1) // BLOCK
    if program < token_programs:
        write_tokens(
            program * BLOCK, flat_ptr, offsets_ptr, rows_ptr, prefix_lens_ptr, pool_ptr, report_ptr,
            num_tokens, num_reqs, max_reqs, max_context_len, row_stride, launch, HAS_PREFIX, REPORT, BLOCK, WINDOW,
        )  # fmt: skip
    else:
        first = (program - token_programs) * WINDOW
        if REPORT:
            check_requests(
                first, offsets_ptr, rows_ptr, prefix_lens_ptr, report_ptr,
                num_tokens, num_reqs, max_reqs, max_context_len, launch, HAS_PREFIX, WINDOW,
            )  # fmt: skip
        mend_decreasing(
            first, flat_ptr, offsets_ptr, rows_ptr, prefix_lens_ptr, pool_ptr,
            num_tokens, num_reqs, max_reqs, max_context_len, row_stride, HAS_PREFIX, WINDOW,
        )  # fmt: skip


@triton.jit(do_not_specialize=[*SIZES, "column_tiles"], do_not_specialize_on_alignment=["flat_ptr", *POINTERS])
def scatter_tiles(
    flat_ptr, offsets_ptr, rows_ptr, prefix_lens_ptr, pool_ptr, report_ptr, tiles_ptr, valid_lens_ptr,
    num_tokens: tl.int64, num_reqs: tl.int64, max_reqs: tl.int64, max_context_len: tl.int64, row_stride: tl.int64,
    launch: tl.int64, column_tiles: tl.int64,
    LISTED: tl.constexpr, REPORT: tl.constexpr, VALID: tl.constexpr, REQUESTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Each program a tile of REQUESTS x COLUMNS; no search. For batches, whose lengths the host knows.

    Grid: ``cdiv(num_reqs, REQUESTS) * column_tiles`` where no request is much longer than the others; otherwise,
    LISTED, a program a line of ``tiles`` int64 ``[num_tiles, 2]``: request, column tile. VALID: each row's new valid
    length is noted too; not with LISTED, where an empty request has no tile.
    """
    program = tl.program_id(0).to(tl.int64)  # the one widening: every address below derives from int64
    if LISTED:
        request = tl.load(tiles_ptr + 2 * program)
        column_tile = tl.load(tiles_ptr + 2 * program + 1)
        ok = tile_ok(request, column_tile, num_tokens)
        requests = tl.where(ok, request, num_reqs) + tl.arange(0, REQUESTS)  # [REQUESTS] int64
        column_tile = tl.where(ok, column_tile, 0)
    else:
        column_tile = program % column_tiles
        requests = program // column_tiles * REQUESTS + tl.arange(0, REQUESTS)  # [REQUESTS] int64
    inside = requests < num_reqs
    starts = tl.load(offsets_ptr + requests, mask=inside, other=0)  # [REQUESTS] int64
    ends = tl.load(offsets_ptr + requests + 1, mask=inside, other=0)  # [REQUESTS] int64
    rows = tl.load(rows_ptr + requests, mask=inside, other=0)  # [REQUESTS] int64
    prefixes = tl.load(prefix_lens_ptr + requests, mask=inside, other=0)  # [REQUESTS] int64
    good_offsets = offsets_ok(requests, starts, ends, num_tokens)
    good_row = row_ok(rows, max_reqs)
    good_prefix = prefix_ok(prefixes, max_context_len)
    good = good_offsets & good_row & good_prefix
    lengths = tl.where(good, ends - starts, 0)
    written = tl.minimum(lengths, max_context_len - prefixes)

    index = column_tile * COLUMNS + tl.arange(0, COLUMNS)[None, :]  # [1, COLUMNS] int64
    owned = index < lengths[:, None]
    token_ids = tl.load(flat_ptr + starts[:, None] + index, mask=owned, other=0)  # [REQUESTS, COLUMNS] int64
    short, fits = narrow(token_ids)
    tl.store(pool_ptr + (rows * row_stride + prefixes)[:, None] + index, short, mask=index < written[:, None])

    if VALID:
        ends_at = prefixes + written
        tl.store(valid_lens_ptr + rows, ends_at, mask=inside & good & (column_tile + tl.zeros_like(rows) == 0))
    if REPORT:
        if tl.min(tl.min(fits.to(tl.int32), axis=1), axis=0) == 0:
            begins = tl.where(lengths > column_tile * COLUMNS, starts + column_tile * COLUMNS, num_tokens)
            first = tl.min(begins, axis=0)  # a tile's tokens are one piece: it has one request, or all their columns
            last = tl.max(tl.minimum(starts + lengths, starts + (column_tile + 1) * COLUMNS), axis=0) - 1
            report_tokens(first, last, flat_ptr, offsets_ptr, report_ptr, num_tokens, num_reqs, launch)
        if column_tile == 0:
            report_requests(
                requests, inside, starts, ends, rows, prefixes, good_offsets, good_row, good_prefix,
                written, report_ptr, launch,
            )  # fmt: skip
