"""Codes of guards, report columns and sentinels: written once, here; kernels take them as constexpr."""

OFFSETS = 0
"""Offsets that decrease, do not start at 0, or exceed ``flat_in``; position and value are the request's start, end."""
ROW = 1
"""A pool row outside the pool; value is the row."""
PREFIX = 2
"""A prefix that is negative or beyond ``max_context_len``; value is the prefix."""
TOKEN = 3
"""A token id that does not fit int32; position is its index in the request, value the id. Where offsets are so wrong
that no request owns the token, request is -1 and position its index in ``flat_in``."""
DROPPED = 4
"""Tokens cut off at ``max_context_len``: counted, no fault."""

GUARDS = ("offsets", "row", "prefix", "token", "dropped")
"""Names by code."""
ARGUMENTS = ("offsets", "req_pool_indices", "prefix_lens", "flat_in", "flat_in")
"""The argument at fault, by code."""
FAULTS = (OFFSETS, ROW, PREFIX, TOKEN)
"""The kinds that ``raise_if_any`` raises for."""

COUNT = 0
LAUNCH = 1
REQUEST = 2
POSITION = 3
VALUE = 4
REPORT_COLUMNS = 5
"""A report is int64 ``[len(GUARDS), REPORT_COLUMNS]``: how many, then the first offender of that kind."""

PLACEHOLDER = -1
"""What the pool holds where a token id is not known or does not fit int32; never compared."""
UNWRITTEN = -2
"""What fills a pool that is allocated here: no token and no placeholder, so that a cell never written is seen."""
PADDING_ROW = 0
"""Where CUDA-graph padding points."""
INT32_MIN = -(2**31)
INT32_MAX = 2**31 - 1

MISMATCH = 0
"""A cell that holds another token than the scheduler's."""
STALE = 1
"""A cell that the scheduler counts on, beyond the row's valid length: whatever it holds, nobody wrote it for this."""
LENGTH = 2
"""A row that holds more tokens than the scheduler thinks; expected and found are lengths, column the first too many."""
UNREADABLE = 3
"""A request whose row, prefix or offsets lead outside; column is the prefix, expected and found are its start, end."""
VIOLATIONS = ("token", "stale", "length", "request")
"""Names by code."""

FOUND_COUNT = 0
FREED = 1
NOT_COMPARED = 2
"""Header of a log: violations found; how many of them had been read when it was last freed; cells not compared."""
ENTRY_KIND = 0
ENTRY_INDEX = 1
ENTRY_LAUNCH = 2
ENTRY_REQUEST = 3
"""Of every log's entries; the index counts from 1, so that 0 is a line never written."""
ENTRY_ROW = 4
ENTRY_COLUMN = 5
ENTRY_EXPECTED = 6
ENTRY_FOUND = 7
VIOLATION_COLUMNS = 8
"""A log of token violations is int64 ``[1 + capacity, VIOLATION_COLUMNS]``: a header line, then the ring of entries."""
