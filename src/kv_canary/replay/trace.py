"""Serving traces: the request lengths of a real day, and token ids that nobody has to store.

A trace says how long each request was, never what was in it. The tokens are therefore computed: any
range of any request can be asked for again at any time, which is what makes verification of a
long run possible without keeping its millions of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import numpy as np
import numpy.typing as npt

__all__ = ["BLOCK_TOKENS", "VOCAB_SIZE", "Trace", "TraceError", "read_trace", "synthetic_trace"]

Int64Array = npt.NDArray[np.int64]

BLOCK_TOKENS = 512  # of a Mooncake trace; the unit of its `hash_ids`
VOCAB_SIZE = 128_256  # Llama 3's; token ids are in [0, VOCAB_SIZE)
MAX_TOKENS = 2**31 - 1  # the longest context or output; beyond it the file is taken for damaged
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TraceError(ValueError):
    """A trace that cannot be read: one line with the file, the line number and what is wrong.

    Its parts are `path`, `line` (from 1; None where no line is to blame) and `problem`.
    """

    def __init__(self, path: Path, line: int | None, problem: str) -> None:
        super().__init__(f"{path}: {problem}" if line is None else f"{path}:{line}: {problem}")
        self.path = path
        self.line = line
        self.problem = problem


def _int64(values: npt.ArrayLike) -> Int64Array:
    """Its own read-only copy."""
    array = np.array(values, np.int64)
    array.setflags(write=False)
    return array


@attrs.frozen(eq=False)
class Trace:
    """Requests in the order in which they arrived, one array a field.

    `context_lens` and `generated_lens` are int64 `[num_requests]`; either may be 0. The context of
    request r of a Mooncake trace is `block_ids[block_offsets[r]:block_offsets[r + 1]]`, one id for
    every 512 tokens; elsewhere there are no blocks. When the requests arrived is not kept: their
    order is all that a replay as fast as possible has a use for.

    >>> trace = Trace(name="two", context_lens=[3, 0], generated_lens=[1, 2])
    >>> len(trace), trace.num_tokens
    (2, 6)
    """

    name: str
    context_lens: Int64Array = attrs.field(converter=_int64, repr=False)
    generated_lens: Int64Array = attrs.field(converter=_int64, repr=False)
    block_ids: Int64Array = attrs.field(default=(), converter=_int64, repr=False)
    block_offsets: Int64Array = attrs.field(default=(), converter=_int64, repr=False)

    def __attrs_post_init__(self) -> None:
        if len(self.context_lens) != len(self.generated_lens):
            raise ValueError(
                f"trace {self.name}: {len(self.context_lens)} context_lens, {len(self.generated_lens)} generated_lens"
            )

    def __len__(self) -> int:
        return len(self.context_lens)

    @property
    def num_tokens(self) -> int:
        """Tokens of all requests together, contexts and outputs."""
        return int(self.context_lens.sum() + self.generated_lens.sum())

    def token_ids(self, requests: Int64Array | int, positions: Int64Array) -> Int64Array:
        """The token ids at `positions` of `requests`, which broadcast together.

        A position below the request's context length is a context token, one above it a generated
        one. int64, the broadcast shape, every id in `[0, VOCAB_SIZE)`. The same question always
        has the same answer, in every process. Context tokens of a Mooncake trace depend on the
        block's hash id and the offset in the block alone, so equal blocks hold equal tokens.
        """
        requests, positions = np.broadcast_arrays(np.asarray(requests, np.int64), positions)
        if not len(self.block_ids):
            return _mix_to_vocabulary(requests, positions)
        in_block = positions < self.context_lens[requests]
        blocks = self.block_offsets[requests] + positions // BLOCK_TOKENS
        keys = np.where(in_block, self.block_ids.take(blocks, mode="clip"), requests)
        # Offsets go in negative, so that no block token comes of a pair that a request uses too.
        return _mix_to_vocabulary(keys, np.where(in_block, -1 - positions % BLOCK_TOKENS, positions))


def _mix_to_vocabulary(a: Int64Array, b: Int64Array) -> Int64Array:
    """Every pair (a, b) to a token id: splitmix64's finaliser over both words, then folded.

    The finaliser is that of Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators.
    """
    x = a.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x += (b.astype(np.uint64) + np.uint64(1)) * np.uint64(0xD1B54A32D192ED03)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    x >>= np.uint64(32)
    x *= np.uint64(VOCAB_SIZE)
    x >>= np.uint64(32)
    return x.astype(np.int64)


# ---- reading a file ------------------------------------------------------------------


class _Record(NamedTuple):
    """One request as a line of a file says it; `arrival` in seconds."""

    arrival: float
    context: int
    generated: int
    block_ids: list[int]


class _LineError(ValueError):
    """What is wrong with one line; the reader adds the file and the line number."""


def read_trace(path: str | Path, *, limit: int | None = None) -> Trace:
    """Read the first `limit` requests (all when None) of an Azure CSV or a Mooncake JSONL.

    The two are told apart by content: a first line that is a JSON object is Mooncake's, one that
    names the columns `TIMESTAMP,ContextTokens,GeneratedTokens` is Azure's. Blank lines are skipped.
    Nothing past the last wanted request is read. Requests are then put in order of arrival.

    Raises:
        TraceError: the file cannot be read, is neither of the two, holds no request, or has a line
            that is not a request.
    """
    path = Path(path)
    lines = _numbered_lines(path)
    number, first = next(lines, (1, ""))
    records: list[_Record] = []
    parse: Callable[[str], _Record]
    try:
        if first.startswith("{"):
            parse = _parse_mooncake
            records.append(parse(first))
        else:
            parse = _azure_parser(first)
        while limit is None or len(records) < limit:
            number, line = next(lines, (number, ""))
            if not line:
                break
            records.append(parse(line))
    except _LineError as error:
        raise TraceError(path, number, str(error)) from None
    if not records:
        raise TraceError(path, number, "the trace ends without a request")
    return _trace_from_records(path.name, records)


def _numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Every line that is not blank, stripped, with its number from 1."""
    number = 0
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if line:
                    yield number, line
    except UnicodeDecodeError:
        raise TraceError(path, number, "not UTF-8 text") from None
    except OSError as error:
        raise TraceError(path, None, f"cannot be read: {error.strerror or error}") from None


def _azure_parser(header: str) -> Callable[[str], _Record]:
    """The parser of the lines below this header, whatever the order of its columns."""
    names = [name.strip() for name in header.split(",")]
    if not set(AZURE_COLUMNS) <= set(names):
        wanted = ",".join(AZURE_COLUMNS)
        raise _LineError(f"neither a CSV header {wanted} nor a JSON object: {_short(header)}")
    timestamp, context, generated = (names.index(name) for name in AZURE_COLUMNS)

    def parse(line: str) -> _Record:
        fields = line.split(",")
        if len(fields) != len(names):
            raise _LineError(f"{len(fields)} fields, the header has {len(names)}: {_short(line)}")
        return _Record(
            arrival=_seconds(fields[timestamp].strip()),
            context=_count("ContextTokens", _digits(fields[context])),
            generated=_count("GeneratedTokens", _digits(fields[generated])),
            block_ids=[],
        )

    return parse


def _parse_mooncake(line: str) -> _Record:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _LineError(f"not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise _LineError(f"not a JSON object: {_short(line)}")
    for key in ("timestamp", "input_length", "output_length", "hash_ids"):
        if key not in entry:
            raise _LineError(f"{key} is missing")
    milliseconds = entry["timestamp"]
    if type(milliseconds) not in (int, float) or not abs(milliseconds) < 2**63:  # NaN is not
        raise _LineError(f"timestamp must be a number, got {_short(milliseconds)}")
    context = _count("input_length", entry["input_length"])
    block_ids = entry["hash_ids"]
    if not isinstance(block_ids, list) or not all(_is_int64(block_id) for block_id in block_ids):
        raise _LineError(f"hash_ids must be a list of integers, got {_short(block_ids)}")
    blocks = -(-context // BLOCK_TOKENS)
    if len(block_ids) != blocks:
        raise _LineError(f"hash_ids has {len(block_ids)}, input_length {context} needs {blocks}")
    generated = _count("output_length", entry["output_length"])
    return _Record(milliseconds / 1000, context, generated, block_ids)


def _count(name: str, value: Any) -> int:
    if not _is_int64(value) or not 0 <= value <= MAX_TOKENS:
        raise _LineError(f"{name} must be an integer from 0 to {MAX_TOKENS}, got {_short(value)}")
    return int(value)


def _digits(text: str) -> int | str:
    """The number where the field is digits, else the field; int() would also read `1_0` and `²`."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else text


def _seconds(text: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise _LineError(f"TIMESTAMP must be a date and time, got {_short(text)}") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _is_int64(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


def _short(value: Any) -> str:
    """A value as it is shown in a message of one line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _trace_from_records(name: str, records: list[_Record]) -> Trace:
    records = sorted(records, key=lambda record: record.arrival)  # stable
    return Trace(
        name=name,
        context_lens=[record.context for record in records],
        generated_lens=[record.generated for record in records],
        block_ids=[block_id for record in records for block_id in record.block_ids],
        block_offsets=np.cumsum([0, *(len(record.block_ids) for record in records)]),
    )


# ---- making one up -------------------------------------------------------------------

# The Azure conversation trace of 2023. Lengths as median, sigma of a log-normal with the trace's
# p50 and p90, and longest.
CONTEXT = (1020, 0.77, 14_050)
GENERATED = (129, 0.93, 1_000)


def synthetic_trace(num_requests: int = 1000, *, seed: int = 0) -> Trace:
    """A trace with the shape of the Azure conversation trace: log-normal lengths.

    The same seed gives the same trace, and one of fewer requests is the start of one of more.
    """
    normal = np.random.default_rng(seed).standard_normal((num_requests, 2))

    def lengths(column: int, median: float, sigma: float, longest: int) -> Int64Array:
        return (median * np.exp(sigma * normal[:, column])).clip(1, longest).astype(np.int64)

    return Trace(
        name=f"synthetic (seed {seed})",
        context_lens=lengths(0, *CONTEXT),
        generated_lens=lengths(1, *GENERATED),
    )
