"""Joining parts: several threads do what one does."""

import array
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ragged.join
from ragged import RaggedBatch, RaggedBatchBuilder
from ragged.join import join


@pytest.fixture(scope="module")
def threaded() -> Iterator[None]:
    """Three threads, also for few tokens and on a machine of few cores."""
    ragged.join._threads.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragged.join, "THREADS", 3)
        patch.setattr(ragged.join, "LARGE", 3)
        patch.setattr(ragged.join, "PIECE", 4)
        yield
    ragged.join._threads().shutdown()
    ragged.join._threads.cache_clear()


@given(st.lists(st.integers(0, 6) | st.integers(0, 40), max_size=12))
def test_threads_join_every_part_at_its_place(threaded: None, lengths: list[int]) -> None:
    total = sum(lengths)
    flat = np.arange(total, dtype=np.int64)
    parts = [flat[sum(lengths[:i]) : sum(lengths[: i + 1])] for i in range(len(lengths))]
    framed = np.full(total + 2, -7, dtype=np.int64)
    if parts:
        assert join(parts, framed[1:-1]) == max(total - 1, 0)
        assert framed.tolist() == [-7, *range(total), -7]


@given(st.lists(st.sampled_from([0, 1, 2**31, 2**63 - 1, -1, -(2**63)]), max_size=15), st.integers(1, 6))
def test_the_largest_is_found_and_a_negative_number_is_larger_than_any(
    threaded: None, tokens: list[int], length: int
) -> None:
    parts = [np.array(tokens[at : at + length], dtype=np.int64) for at in range(0, len(tokens), length)]
    largest = max((token % 2**64 for token in tokens), default=0)
    if parts:
        assert join(parts, np.empty(len(tokens), dtype=np.int64)) == largest


def test_threads_work_in_inference_mode_too(threaded: None) -> None:
    # Case 65: the mode belongs to a thread, and only the caller's has it.
    parts = [np.arange(number, dtype=np.int64) for number in (5, 6, 7, 8)]
    with torch.inference_mode():
        batch = RaggedBatch.from_sequences(parts, req_pool_indices=[1, 2, 3, 4])
    assert [part.tolist() for part in batch.unbind()] == [part.tolist() for part in parts]


def test_threads_take_read_only_parts_and_let_go_of_the_callers(threaded: None) -> None:
    # Case 54 and 33.
    read_only = np.arange(5, dtype=np.int64)
    read_only.setflags(write=False)
    growing = [array.array("q", range(20_000)) for _ in range(4)]
    builder = RaggedBatchBuilder()
    builder.extend([1, 2, 3, 4], growing)
    builder.add(5, read_only, [6], read_only)
    for part in growing:
        part.append(7)
    assert builder.build().token_ids.tolist() == 4 * [*range(20_000)] + [*range(5), 6, *range(5)]


def test_a_join_that_fails_is_over_when_it_raises(threaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    failed, write = threading.Event(), ragged.join._write

    def slow_or_failing(parts: list[Any], out: Any) -> int:
        if out[0] == -1:  # the first piece
            failed.set()
            raise MemoryError
        failed.wait()
        return write(parts, out)

    monkeypatch.setattr(ragged.join, "_write", slow_or_failing)
    out = np.arange(-1, 11, dtype=np.int64)
    with pytest.raises(MemoryError):
        join([np.full(4, 50 + number, dtype=np.int64) for number in range(3)], out)
    assert out[4:].tolist() == [51] * 4 + [52] * 4
