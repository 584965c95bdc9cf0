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

CHAIN, POSITION_BIT, TOKEN_BIT, KV_BIT, WRITE_INPUT, SLOT, REQUEST_BIT = 1, 2, 4, 8, 16, 32, 64
"""Why a stamp is a violation; one entry may have several. SLOT: a slot outside the stamps; REQUEST_BIT: a row or a
sequence length that leads outside the table."""
REASONS = {CHAIN: "chain", POSITION_BIT: "position", TOKEN_BIT: "token", KV_BIT: "kv", WRITE_INPUT: "write-input"}
REASONS |= {SLOT: "slot", REQUEST_BIT: "request"}
"""Names by bit."""

STAMP_TOKEN, STAMP_POSITION, STAMP_CHAIN, STAMP_KV = 0, 1, 2, 3
STAMP_FIELDS = 4
"""A stamp is int64 ``[STAMP_FIELDS]``."""
NO_SLOT = -1
"""A slot that is skipped; PADDING_SLOT is written to by nobody and never verified."""
PADDING_SLOT = 0

STAMP_ROW, STAMP_SLOT, STAMP_AT, STAMP_STEP = 4, 5, 6, 7
STORED_TOKEN, EXPECTED_TOKEN, STORED_HASH, EXPECTED_HASH, STORED_POSITION = 8, 9, 10, 11, 12
STAMP_COLUMNS = 16
"""A log of stamp violations: ENTRY_KIND (reason bits) to ENTRY_REQUEST, then these."""

COMPARED_CHAIN, COMPARED_POSITION, COMPARED_TOKEN, COMPARED_KV, WRITTEN, SKIPPED = 0, 1, 2, 3, 4, 5
COUNTER_NAMES = ("chain", "position", "token", "kv", "written", "skipped")
COUNTER_LINES, COUNTERS = 64, 8
"""Counters are int64 ``[COUNTER_LINES, COUNTERS]``, summed over lines by who reads: programs take turns among lines,
for thousands of atomics on one address would queue up."""

STATE_STEP, STATE_CALLS = 0, 1
PHASES = 4096
"""Under a budget a call looks at every period-th position; the period divides PHASES. Canary state is int64
``[2 + PHASES]``: the step, the calls so far, and for each position modulo PHASES the step that last looked at it."""

GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""splitmix64's numbers; see ``kv_canary.mixing``."""
ANCHOR = 0x6B765F63616E6172
"""The chain hash at position 0: "kv_canar"."""
