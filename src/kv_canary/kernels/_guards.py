"""Device guards: what is sound, and how what is not gets into the report. Shared by the kernels."""

import triton
import triton.language as tl

from kv_canary import kinds
from kv_canary.kernels._search import bisect_ends

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
def tile_ok(request, column_tile, num_tokens):
    """A line of a work list that can be followed; a request beyond the batch is masked like any other lane's."""
    return (request >= 0) & (column_tile >= 0) & (column_tile <= num_tokens)


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
def add_report(report_ptr, KIND: tl.constexpr, launch, wrong, amount, request, position, value):
    """Count every wrong lane; whoever counts first leaves its particulars.

    Called only where some lane is wrong: masked atomics alone cost 0.6 us a launch (H200, 1 x 8192), a branch over them
    costs one reduction.
    """
    line = report_ptr + KIND * COLUMNS + tl.zeros_like(request)
    before = tl.atomic_add(line + COUNT, amount, mask=wrong)
    first = wrong & (before == 0)
    tl.store(line + LAUNCH, tl.zeros_like(request) + launch, mask=first)
    tl.store(line + REQUEST, request, mask=first)
    tl.store(line + POSITION, position, mask=first)
    tl.store(line + VALUE, value, mask=first)


@triton.jit
def report_requests(
    requests, inside, starts, ends, rows, prefixes, good_offsets, good_row, good_prefix, written, report_ptr, launch,
):  # fmt: skip
    """Report each fault of these requests once; empty requests are checked like any other."""
    sound = good_offsets & good_row & good_prefix
    dropped = tl.where(inside & sound, ends - starts - written, 0)
    if tl.max(((inside & ~sound) | (dropped > 0)).to(tl.int32), axis=0) > 0:
        one = tl.zeros_like(requests) + 1
        none = tl.zeros_like(requests)
        add_report(report_ptr, OFFSETS, launch, inside & ~good_offsets, one, requests, starts, ends)
        add_report(report_ptr, ROW, launch, inside & ~good_row, one, requests, none, rows)
        add_report(report_ptr, PREFIX, launch, inside & ~good_prefix, one, requests, none, prefixes)
        add_report(report_ptr, DROPPED, launch, dropped > 0, dropped, requests, written, dropped)


@triton.jit
def report_tokens(
    first, last, flat_ptr, offsets_ptr, report_ptr, num_tokens, num_reqs, launch, LANES: tl.constexpr = 128
):  # fmt: skip
    """Report the tokens in [first, last] that do not fit. Rare, so it loads again and keeps few registers."""
    owned_end = tl.minimum(tl.load(offsets_ptr + num_reqs), num_tokens)
    while first <= last:
        tokens = first + tl.arange(0, LANES)  # [LANES] int64
        inside = (tokens <= last) & (tokens < owned_end)
        token_ids = tl.load(flat_ptr + tokens, mask=inside, other=0)  # [LANES] int64
        _, fits = narrow(token_ids)
        requests = bisect_ends(offsets_ptr, 0, num_reqs - 1, tokens)  # [LANES] int64
        starts = tl.load(offsets_ptr + requests)  # [LANES] int64
        ends = tl.load(offsets_ptr + requests + 1)  # [LANES] int64
        owned = (starts >= 0) & (tokens >= starts) & (tokens < ends)
        owner = tl.where(owned, requests, -1)
        position = tl.where(owned, tokens - starts, tokens)
        one = tl.full([LANES], 1, dtype=tl.int64)
        add_report(report_ptr, TOKEN, launch, inside & ~fits, one, owner, position, token_ids)
        first += LANES
