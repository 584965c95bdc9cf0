"""Scatter of flat token ids into pool rows, guarded on the device.

The grid is the flat token stream in blocks, so that skewed lengths cost nothing, then a few programs that check the
requests. Token programs contain (skip what is wrong) and report tokens; request programs report requests.
"""

import triton
import triton.language as tl

from kv_canary import kinds
from kv_canary.kernels._search import bisect_ends, locate

OFFSETS = tl.constexpr(kinds.OFFSETS)
ROW = tl.constexpr(kinds.ROW)
PREFIX = tl.constexpr(kinds.PREFIX)
TOKEN = tl.constexpr(kinds.TOKEN)
DROPPED = tl.constexpr(kinds.DROPPED)
COUNT = tl.constexpr(kinds.COUNT)
LAUNCH = tl.constexpr(kinds.LAUNCH)
REQUEST = tl.constexpr(kinds.REQUEST)
POSITION = tl.constexpr(kinds.POSITION)
VALUE = tl.constexpr(kinds.VALUE)
COLUMNS = tl.constexpr(kinds.REPORT_COLUMNS)
PLACEHOLDER = tl.constexpr(kinds.PLACEHOLDER)

SIZES = ["num_tokens", "num_reqs", "max_reqs", "max_context_len", "row_stride", "launch"]
"""Sizes are int64 in every variant and never specialised, so that no batch size compiles anew."""


@triton.jit
def offsets_ok(request, start, end, num_tokens):
    """Offsets of a request that can be followed."""
    return (start >= 0) & (end >= start) & (end <= num_tokens) & ((request > 0) | (start == 0))


@triton.jit
def row_ok(row, max_reqs):
    """A row inside the pool."""
    return (row >= 0) & (row < max_reqs)


@triton.jit
def prefix_ok(prefix, max_context_len):
    """A prefix inside the row; one that equals the row's length leaves no room, and is sound."""
    return (prefix >= 0) & (prefix <= max_context_len)


@triton.jit
def add_report(report_ptr, KIND: tl.constexpr, launch, wrong, amount, request, position, value):
    """Count every wrong lane; whoever counts first leaves its particulars. Costs nothing where no lane is wrong."""
    line = report_ptr + KIND * COLUMNS + tl.zeros_like(request)
    before = tl.atomic_add(line + COUNT, amount, mask=wrong)
    first = wrong & (before == 0)
    tl.store(line + LAUNCH, tl.zeros_like(request) + launch, mask=first)
    tl.store(line + REQUEST, request, mask=first)
    tl.store(line + POSITION, position, mask=first)
    tl.store(line + VALUE, value, mask=first)


@triton.jit
def load_prefix(prefix_lens_ptr, requests, mask, HAS_PREFIX: tl.constexpr):
    """Prefixes of requests, a vector or a scalar; 0 where none are given."""
    if HAS_PREFIX:
        return tl.load(prefix_lens_ptr + requests, mask=mask, other=0)
    else:
        return tl.zeros_like(requests)


@triton.jit
def narrow(token_ids):
    """int32, and whether it is the same number; a token that does not fit becomes the placeholder."""
    short = token_ids.to(tl.int32)
    fits = short.to(tl.int64) == token_ids
    return tl.where(fits, short, PLACEHOLDER), fits


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
def report_requests(
    requests, inside, starts, ends, rows, prefixes, good_offsets, good_row, good_prefix, written, report_ptr, launch,
):  # fmt: skip
    """Report each fault of these requests once; empty requests are checked like any other."""
    one = tl.zeros_like(requests) + 1
    none = tl.zeros_like(requests)
    add_report(report_ptr, OFFSETS, launch, inside & ~good_offsets, one, requests, starts, ends)
    add_report(report_ptr, ROW, launch, inside & ~good_row, one, requests, none, rows)
    add_report(report_ptr, PREFIX, launch, inside & ~good_prefix, one, requests, none, prefixes)
    sound = inside & good_offsets & good_row & good_prefix
    dropped = tl.where(sound, ends - starts - written, 0)
    add_report(report_ptr, DROPPED, launch, dropped > 0, dropped, requests, written, dropped)


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
def write_tokens(
    first, flat_ptr, offsets_ptr, rows_ptr, prefix_lens_ptr, pool_ptr, report_ptr,
    num_tokens, num_reqs, max_reqs, max_context_len, row_stride, launch,
    HAS_PREFIX: tl.constexpr, REPORT: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """BLOCK tokens of the flat stream from ``first``."""
    tokens = first + tl.arange(0, BLOCK)  # [BLOCK] int64
    token_ids = tl.load(flat_ptr + tokens, mask=tokens < num_tokens, other=0)  # [BLOCK] int64
    short, fits = narrow(token_ids)
    last = tl.minimum(first + BLOCK, num_tokens) - 1

    # locate: the requests of the block's first and last token, and all of the first one's metadata at once
    request, last_request = locate(offsets_ptr, num_reqs, first, last, WINDOW)
    request = tl.minimum(request, num_reqs - 1)
    start = tl.load(offsets_ptr + request)
    end = tl.load(offsets_ptr + request + 1)
    row = tl.load(rows_ptr + request)
    prefix = load_prefix(prefix_lens_ptr, request, request >= 0, HAS_PREFIX)
    owned_end = tl.load(offsets_ptr + num_reqs)

    # check and store: straight where one request owns the block, by a search between its ends otherwise
    if end > last:
        ok = offsets_ok(request, start, end, num_tokens) & row_ok(row, max_reqs) & prefix_ok(prefix, max_context_len)
        requests = tl.zeros_like(tokens) + request
        index = tokens - start  # [BLOCK] int64
        columns = prefix + index  # [BLOCK] int64
        # Scalar conditions enter as bounds: the interpreter cannot splat a scalar bool into a mask.
        owned = (tokens >= tl.where(start >= 0, start, num_tokens)) & (tokens <= last)
        inside = owned & (columns < max_context_len) & (tokens <= tl.where(ok, last, -1))
        tl.store(pool_ptr + row * row_stride + columns, short, mask=inside)
    else:
        last_request = tl.maximum(tl.minimum(last_request, num_reqs - 1), request)
        requests = bisect_ends(offsets_ptr, request, last_request, tokens)  # [BLOCK] int64
        starts = tl.load(offsets_ptr + requests)  # [BLOCK] int64
        ends = tl.load(offsets_ptr + requests + 1)  # [BLOCK] int64
        rows = tl.load(rows_ptr + requests)  # [BLOCK] int64
        prefixes = load_prefix(prefix_lens_ptr, requests, requests >= 0, HAS_PREFIX)  # [BLOCK] int64
        good = offsets_ok(requests, starts, ends, num_tokens) & row_ok(rows, max_reqs)
        good = good & prefix_ok(prefixes, max_context_len)
        index = tokens - starts  # [BLOCK] int64
        columns = prefixes + index  # [BLOCK] int64
        owned = (starts >= 0) & (tokens >= starts) & (tokens < ends)
        inside = owned & (tokens <= last) & (columns < max_context_len) & good
        tl.store(pool_ptr + rows * row_stride + columns, short, mask=inside)
    if REPORT:
        wrong = ~fits & (tokens <= last) & (tokens < owned_end)
        one = tl.full([BLOCK], 1, dtype=tl.int64)
        owner = tl.where(owned, requests, -1)
        add_report(report_ptr, TOKEN, launch, wrong, one, owner, tl.where(owned, index, tokens), token_ids)


@triton.jit(do_not_specialize=SIZES)
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


@triton.jit(do_not_specialize=[*SIZES, "column_tiles"])
def scatter_tiles(
    flat_ptr, offsets_ptr, rows_ptr, prefix_lens_ptr, pool_ptr, report_ptr,
    num_tokens: tl.int64, num_reqs: tl.int64, max_reqs: tl.int64, max_context_len: tl.int64, row_stride: tl.int64,
    launch: tl.int64, column_tiles: tl.int64, REPORT: tl.constexpr, REQUESTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid: ``cdiv(num_reqs, REQUESTS) * column_tiles`` programs, each a tile of requests x columns; no search.

    For batches whose longest request the host knows to be not much longer than the others.
    """
    program = tl.program_id(0).to(tl.int64)  # the one widening: every address below derives from int64
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

    if REPORT:
        one = tl.zeros_like(token_ids) + 1
        owner = tl.zeros_like(token_ids) + requests[:, None]
        add_report(report_ptr, TOKEN, launch, owned & ~fits, one, owner, tl.zeros_like(token_ids) + index, token_ids)
        if column_tile == 0:
            report_requests(
                requests, inside, starts, ends, rows, prefixes, good_offsets, good_row, good_prefix,
                written, report_ptr, launch,
            )  # fmt: skip
