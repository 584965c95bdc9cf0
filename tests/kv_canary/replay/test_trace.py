"""Traces: what is read, what is refused and how it is said, and which tokens a trace stands for."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_canary.replay.trace import (
    BLOCK_TOKENS,
    VOCAB_SIZE,
    Trace,
    TraceError,
    read_trace,
    synthetic_trace,
)

Write = Callable[..., Path]
AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def azure(*rows: str) -> str:
    return "\n".join([AZURE_HEADER, *rows])


def mooncake(**changes: object) -> str:
    entry = {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [7, 8]}
    return json.dumps(entry | changes)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(content: str | bytes, name: str = "trace.csv") -> Path:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


# ---- reading ----------------------------------------------------------------------------


def test_azure_rows_become_requests_in_their_order(write: Write) -> None:
    trace = read_trace(write(azure("2023-11-16 18:17:03.9799600,4808,10", "2023-11-16 18:17:04.0319600,0,0")))
    assert trace.context_lens.tolist() == [4808, 0]
    assert trace.generated_lens.tolist() == [10, 0]


def test_mooncake_lines_become_requests_with_their_blocks(write: Write) -> None:
    path = write("\n".join([mooncake(), mooncake(timestamp=1500, input_length=0, hash_ids=[])]))
    trace = read_trace(path)
    assert trace.context_lens.tolist() == [600, 0]
    assert trace.generated_lens.tolist() == [3, 3]
    assert trace.block_ids.tolist() == [7, 8]
    assert trace.block_offsets.tolist() == [0, 2, 2]


def test_the_format_is_told_by_content_and_not_by_the_name(write: Write) -> None:
    assert len(read_trace(write(mooncake(), "wrong.csv"))) == 1
    assert len(read_trace(write(azure("2023-11-16,1,1"), "wrong.jsonl"))) == 1


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(azure("2023-11-16,1,2").replace("\n", "\r\n"), id="windows_line_ends"),
        pytest.param(b"\xef\xbb\xbf" + azure("2023-11-16,1,2").encode(), id="byte_order_mark"),
        pytest.param("\n\n" + azure("", "2023-11-16,1,2", "", ""), id="blank_lines"),
        pytest.param("GeneratedTokens,ContextTokens,TIMESTAMP\n2,1,2023-11-16", id="other_order"),
        pytest.param(AZURE_HEADER + ",Model\n2023-11-16,1,2,x", id="one_more_column"),
        pytest.param(azure("2024-05-10 00:00:00.009930+00:00, 1, 2"), id="time_zone_and_spaces"),
    ],
)
def test_harmless_variations_of_a_csv_are_read(write: Write, content: str | bytes) -> None:
    trace = read_trace(write(content))
    assert (trace.context_lens.tolist(), trace.generated_lens.tolist()) == ([1], [2])


def test_requests_are_put_in_order_of_arrival_and_ties_keep_theirs(write: Write) -> None:
    lines = [
        mooncake(timestamp=t, output_length=n, input_length=length, hash_ids=ids)
        for t, n, length, ids in [(5, 1, 1, [10]), (0, 2, 513, [20, 21]), (5, 3, 1, [30])]
    ]
    trace = read_trace(write("\n".join(lines)))
    assert trace.generated_lens.tolist() == [2, 1, 3]
    assert trace.block_ids.tolist() == [20, 21, 10, 30]
    assert trace.block_offsets.tolist() == [0, 2, 3, 4]


def test_a_limit_reads_that_many_requests_and_no_further(write: Write) -> None:
    path = write(azure("2023-11-16,1,1", "2023-11-16,2,2", "this is not a request"))
    assert read_trace(path, limit=2).context_lens.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("file", "num_requests", "num_tokens"),
    [
        ("azure_llm_2023_code.csv", 8_819, 18_059_974 + 245_896),
        ("azure_llm_2023_conv.csv", 19_366, 22_361_870 + 4_088_665),
        ("mooncake_conversation.jsonl", 12_031, 144_793_823 + 4_122_048),
    ],
)
def test_the_real_traces_are_read_whole(traces: Path, file: str, num_requests: int, num_tokens: int) -> None:
    trace = read_trace(traces / file)
    assert (len(trace), trace.num_tokens) == (num_requests, num_tokens)


# ---- refusing ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "line", "problem"),
    [
        pytest.param("", 1, "neither a CSV header TIMESTAMP,", id="empty_file"),
        pytest.param("a,b\n1,2", 1, "nor a JSON object: 'a,b'", id="another_csv"),
        pytest.param("[1, 2]", 1, "nor a JSON object: '[1, 2]'", id="json_but_no_object"),
        pytest.param(AZURE_HEADER, 1, "the trace ends without a request", id="header_only"),
        pytest.param(b"TIMESTAMP\xff", 1, "not UTF-8 text", id="not_text"),
        pytest.param(azure("2023-11-16,1").encode() + b"\n\xff", 2, "2 fields, the header has 3", id="short"),
        pytest.param(azure("2023-11-16,1,1,1"), 2, "4 fields, the header has 3", id="long_row"),
        pytest.param(azure("today,1,1"), 2, "TIMESTAMP must be a date and time", id="no_date"),
        pytest.param(azure("2023-11-16,-1,1"), 2, "ContextTokens must be an integer", id="minus"),
        pytest.param(azure("2023-11-16,1,"), 2, "GeneratedTokens must be an integer", id="missing"),
        pytest.param(azure("2023-11-16,1,1.5"), 2, "got '1.5'", id="fraction"),
        pytest.param(azure("2023-11-16,1_0,1"), 2, "got '1_0'", id="underscore"),
        pytest.param(azure("2023-11-16,²,1"), 2, "got '²'", id="superscript"),
        pytest.param(azure("2023-11-16,2147483648,1"), 2, "from 0 to 2147483647", id="too_large"),
        pytest.param(azure("", "2023-11-16,1,1", "x"), 4, "1 fields", id="after_a_blank_line"),
        pytest.param("{", 1, "not JSON", id="broken_json"),
        pytest.param(mooncake() + "\n[3]", 2, "not a JSON object: '[3]'", id="a_list"),
        pytest.param("{}", 1, "timestamp is missing", id="missing_key"),
        pytest.param(mooncake(timestamp=None), 1, "timestamp must be a number", id="null_time"),
        pytest.param(mooncake(timestamp=float("nan")), 1, "timestamp must be", id="nan_time"),
        pytest.param(mooncake(input_length=True), 1, "input_length must be", id="bool"),
        pytest.param(mooncake(input_length="600"), 1, "got '600'", id="number_as_text"),
        pytest.param(mooncake(output_length=2.0), 1, "output_length must be", id="float"),
        pytest.param(mooncake(output_length=10**40), 1, "output_length must be", id="giant"),
        pytest.param(mooncake(hash_ids="7"), 1, "hash_ids must be a list", id="hash_text"),
        pytest.param(mooncake(hash_ids=[7, 2**63]), 1, "hash_ids must be a list", id="wide_hash"),
        pytest.param(mooncake(hash_ids=[7]), 1, "hash_ids has 1, input_length 600 needs 2", id="few"),
    ],
)
def test_a_bad_line_is_refused_by_file_line_and_reason_in_one_line(
    write: Write, content: str | bytes, line: int, problem: str
) -> None:
    path = write(content)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert problem in caught.value.problem
    assert (caught.value.path, caught.value.line) == (path, line)
    assert "\n" not in str(caught.value)
    assert len(caught.value.problem) < 200


def test_a_file_that_cannot_be_opened_is_refused_by_name(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.csv", tmp_path):
        with pytest.raises(TraceError, match="cannot be read: ") as caught:
            read_trace(path)
        assert caught.value.line is None


@given(st.binary(max_size=200), st.sampled_from(["", "{", azure("2023-11-16,1,1\n"), mooncake()]))
def test_any_bytes_are_a_trace_or_a_trace_error(
    tmp_path_factory: pytest.TempPathFactory, tail: bytes, head: str
) -> None:
    path = tmp_path_factory.mktemp("any") / "trace"
    path.write_bytes(head.encode() + tail)
    try:
        assert len(read_trace(path)) > 0
    except TraceError as error:
        assert str(path) in str(error)


# ---- tokens -----------------------------------------------------------------------------


def plain_trace(context_lens: list[int], generated_lens: list[int]) -> Trace:
    return Trace(
        name="plain",
        context_lens=context_lens,
        generated_lens=generated_lens,
    )


def test_tokens_depend_on_request_and_position_and_on_nothing_else() -> None:
    trace = plain_trace([10, 10], [5, 5])
    everything = trace.token_ids(np.array([[0], [1]]), np.arange(15))
    assert everything.shape == (2, 15)
    assert everything.dtype == np.int64
    assert len(np.unique(everything)) == 30
    assert trace.token_ids(1, np.arange(4, 12)).tolist() == everything[1, 4:12].tolist()
    assert plain_trace([3, 4], [0, 0]).token_ids(1, np.arange(15)).tolist() == everything[1].tolist()


def test_tokens_are_pinned_so_that_a_replay_can_be_compared_with_an_old_one() -> None:
    tokens = plain_trace([4], [0]).token_ids(0, np.arange(4))
    assert tokens.tolist() == [65148, 54177, 48375, 61091]


def test_tokens_spread_evenly_over_the_vocabulary() -> None:
    trace = plain_trace([1000] * 1000, [0] * 1000)
    tokens = trace.token_ids(np.arange(1000)[:, None], np.arange(1000))
    assert (tokens.min(), tokens.max()) == (0, VOCAB_SIZE - 1)
    counts = np.bincount(tokens.ravel(), minlength=VOCAB_SIZE)
    expected = tokens.size / VOCAB_SIZE
    chi2 = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi2 - VOCAB_SIZE) < 5 * np.sqrt(2 * VOCAB_SIZE)


def test_equal_blocks_hold_equal_tokens_and_the_rest_is_the_requests_own(write: Write) -> None:
    lines = [
        mooncake(input_length=700, hash_ids=[5, 6]),
        mooncake(input_length=700, hash_ids=[5, 9]),
        mooncake(input_length=1024, hash_ids=[6, 5]),
    ]
    trace = read_trace(write("\n".join(lines)))
    a, b, c = (trace.token_ids(r, np.arange(1100)) for r in range(3))
    first, second = slice(0, BLOCK_TOKENS), slice(BLOCK_TOKENS, 2 * BLOCK_TOKENS)
    assert (a[first] == b[first]).all()
    assert (a[first] == c[second]).all()
    assert (a[BLOCK_TOKENS:700] == c[: 700 - BLOCK_TOKENS]).all()
    assert (a[BLOCK_TOKENS:700] != b[BLOCK_TOKENS:700]).any()
    assert (a[700:] != b[700:]).any(), "generated tokens are each request's own"


# ---- the synthetic trace ----------------------------------------------------------------


def test_a_synthetic_trace_repeats_with_its_seed_and_only_with_it() -> None:
    one, same, other = synthetic_trace(seed=1), synthetic_trace(seed=1), synthetic_trace(seed=2)
    assert one.context_lens.tolist() == same.context_lens.tolist()
    assert one.generated_lens.tolist() == same.generated_lens.tolist()
    assert one.context_lens.tolist() != other.context_lens.tolist()


def test_a_shorter_synthetic_trace_is_the_start_of_a_longer_one() -> None:
    short, long = synthetic_trace(10), synthetic_trace(100)
    assert short.context_lens.tolist() == long.context_lens[:10].tolist()
    assert short.generated_lens.tolist() == long.generated_lens[:10].tolist()


def test_a_synthetic_trace_is_shaped_like_the_azure_conversations(traces: Path) -> None:
    real = read_trace(traces / "azure_llm_2023_conv.csv")
    made = synthetic_trace(len(real))
    for field in ("context_lens", "generated_lens"):
        for percentile in (50, 90):
            ratio = np.percentile(getattr(made, field), percentile) / np.percentile(getattr(real, field), percentile)
            assert 0.9 < ratio < 1.1, (field, percentile)


def test_the_arrays_of_a_trace_cannot_be_written() -> None:
    trace = synthetic_trace(3)
    with pytest.raises(ValueError, match="read-only"):
        trace.context_lens[0] = 1


def test_a_trace_whose_arrays_differ_in_length_is_refused() -> None:
    with pytest.raises(ValueError, match="2 context_lens, 1 generated_lens"):
        plain_trace([1, 2], [1])
