"""The scheduler: what it plans step by step, and that nothing is left out or planned twice."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_canary.kinds import PADDING_ROW
from kv_canary.replay.scheduler import Scheduler, Segments, count_steps
from kv_canary.replay.trace import Trace, read_trace, synthetic_trace


def scheduler_of(
    *requests: tuple[int, int],
    max_running: int = 8,
    max_context_len: int = 64,
    prefill_budget: int = 64,
) -> Scheduler:
    """A scheduler of (context, generated) pairs."""
    return Scheduler(
        Trace(
            name="test",
            context_lens=[context for context, _ in requests],
            generated_lens=[generated for _, generated in requests],
        ),
        max_running=max_running,
        max_context_len=max_context_len,
        prefill_budget=prefill_budget,
    )


def segments_of(*pieces: tuple[int, int, int, int]) -> Segments:
    """The opposite of `pieces`."""
    return Segments(*np.array(pieces, np.int64).T)


def run(scheduler: Scheduler) -> Iterator[Segments]:
    while (step := scheduler.plan()) is not None:
        yield step
        scheduler.advance(step)
        scheduler.retire()


def pieces(step: Segments) -> list[tuple[int, int, int, int]]:
    """(row, request, start, length), one a request."""
    columns = (step.rows, step.requests, step.starts, step.lengths)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_a_request_is_prefilled_and_then_decodes_one_token_a_step() -> None:
    assert [pieces(step) for step in run(scheduler_of((3, 2)))] == [
        [(1, 0, 0, 3)],
        [(1, 0, 3, 1)],
        [(1, 0, 4, 1)],
    ]


def test_a_long_context_is_cut_to_the_budget_and_the_rest_goes_to_the_next_in_line() -> None:
    steps = list(run(scheduler_of((5, 0), (4, 1), (1, 0), prefill_budget=4)))
    assert [pieces(step) for step in steps] == [
        [(1, 0, 0, 4)],
        [(1, 0, 4, 1), (2, 1, 0, 3)],
        [(2, 1, 3, 1), (3, 2, 0, 1)],
        [(2, 1, 4, 1)],
    ]


def test_decodes_come_first_and_do_not_count_against_the_prefill_budget() -> None:
    steps = list(run(scheduler_of((1, 2), (9, 0), prefill_budget=1)))
    assert pieces(steps[1]) == [(1, 0, 1, 1), (2, 1, 0, 1)]
    assert [step.num_decodes for step in steps[:3]] == [0, 1, 1]


def test_requests_wait_for_a_free_row_and_take_the_one_freed_last() -> None:
    scheduler = scheduler_of((1, 3), (1, 1), (1, 0), (1, 0), max_running=2)
    assert [pieces(step) for step in run(scheduler)] == [
        [(1, 0, 0, 1), (2, 1, 0, 1)],
        [(1, 0, 1, 1), (2, 1, 1, 1)],
        [(1, 0, 2, 1), (2, 2, 0, 1)],
        [(1, 0, 3, 1), (2, 3, 0, 1)],
    ]


def test_a_request_longer_than_a_row_is_refused_and_one_that_just_fits_is_not() -> None:
    scheduler = scheduler_of((5, 3), (5, 4), (9, 0), (0, 9), max_context_len=8)
    steps = list(run(scheduler))
    assert {request for step in steps for _, request, _, _ in pieces(step)} == {0}
    assert scheduler.refused == {"longer than max_context": 3}
    assert scheduler.num_finished == 1


def test_a_request_without_context_is_an_empty_segment_and_then_decodes_from_zero() -> None:
    assert [pieces(step) for step in run(scheduler_of((0, 2)))] == [
        [(1, 0, 0, 0)],
        [(1, 0, 0, 1)],
        [(1, 0, 1, 1)],
    ]


def test_a_request_of_nothing_takes_part_in_one_step_and_is_finished() -> None:
    scheduler = scheduler_of((2, 0), (0, 0), (3, 0), prefill_budget=2)
    assert [pieces(step) for step in run(scheduler)] == [
        [(1, 0, 0, 2), (2, 1, 0, 0)],
        [(3, 2, 0, 2)],
        [(3, 2, 2, 1)],
    ]
    assert scheduler.num_finished == 3


def test_an_empty_context_does_not_overtake_one_that_is_cut() -> None:
    assert [pieces(step) for step in run(scheduler_of((2, 0), (0, 0), prefill_budget=1))] == [
        [(1, 0, 0, 1)],
        [(1, 0, 1, 1), (2, 1, 0, 0)],
    ]


def test_a_trace_of_only_refused_requests_has_no_step() -> None:
    scheduler = scheduler_of((65, 0), (0, 65))
    assert scheduler.plan() is None
    assert scheduler.drained


def test_live_rows_are_what_the_pool_must_hold_until_they_are_retired() -> None:
    scheduler = scheduler_of((3, 0), (6, 1), prefill_budget=4)
    step = scheduler.plan()
    assert step is not None
    scheduler.advance(step)
    assert pieces(scheduler.live()) == [(1, 0, 0, 3), (2, 1, 0, 1)]
    assert scheduler.retire().tolist() == [0]
    assert pieces(scheduler.live()) == [(2, 1, 0, 1)]
    assert scheduler.num_running == 1


def test_it_is_drained_when_only_finished_requests_hold_rows() -> None:
    scheduler = scheduler_of((1, 1), (0, 0))
    drained = []
    while (step := scheduler.plan()) is not None:
        scheduler.advance(step)
        drained.append(scheduler.drained)
        scheduler.retire()
    assert drained == [False, True]
    assert len(scheduler.live()) == 0


def test_steps_left_says_how_long_a_row_stays_in_use_at_the_least() -> None:
    scheduler = scheduler_of((3, 5), (9, 2), prefill_budget=4)
    step = scheduler.plan()
    assert step is not None
    scheduler.advance(step)
    assert scheduler.steps_left(np.array([1, 2])).tolist() == [5, 2]


def test_flat_names_piece_and_position_of_every_token_and_skips_empty_pieces() -> None:
    segments = segments_of((4, 0, 5, 2), (2, 1, 9, 0), (7, 2, 0, 3))
    piece_of, positions = segments.flat()
    assert piece_of.tolist() == [0, 0, 2, 2, 2]
    assert positions.tolist() == [5, 6, 0, 1, 2]
    assert segments.num_tokens == 5


def test_split_cuts_between_pieces_and_loses_none() -> None:
    segments = segments_of(*((row, row, 0, n) for row, n in enumerate([3, 0, 3, 9, 1, 0])))
    runs = [run.lengths.tolist() for run in segments.split(4)]
    assert runs == [[3, 0, 3], [9], [1], [0]]
    assert [run.lengths.tolist() for run in segments.split(100)] == [[3, 0, 3, 9, 1, 0]]
    assert [pieces(run)[0] for run in segments_of(*pieces(segments)[2:5]).split(1)] == (pieces(segments)[2:5])


def test_counting_the_steps_is_running_them() -> None:
    requests = [(5, 3), (0, 0), (9, 1)]
    steps = list(run(scheduler_of(*requests, prefill_budget=4)))
    assert count_steps(scheduler_of(*requests, prefill_budget=4)) == len(steps)


@pytest.mark.parametrize("setting", ["max_running", "max_context_len", "prefill_budget"])
def test_a_setting_below_one_is_refused_by_name(setting: str) -> None:
    with pytest.raises(ValueError, match=f"{setting} must be at least 1, got 0"):
        scheduler_of((1, 1), **{setting: 0})


LENGTHS = st.one_of(st.just(0), st.integers(0, 3), st.integers(0, 30))


@settings(max_examples=300)  # plain numpy, no device: cheap
@given(
    requests=st.lists(st.tuples(LENGTHS, LENGTHS), max_size=30),
    max_running=st.integers(1, 5),
    max_context_len=st.integers(1, 40),
    prefill_budget=st.integers(1, 20),
)
def test_every_token_of_every_request_that_fits_is_planned_once_and_in_order(
    requests: list[tuple[int, int]], max_running: int, max_context_len: int, prefill_budget: int
) -> None:
    scheduler = scheduler_of(
        *requests,
        max_running=max_running,
        max_context_len=max_context_len,
        prefill_budget=prefill_budget,
    )
    planned = dict.fromkeys(range(len(requests)), 0)
    row_of: dict[int, int] = {}
    for step in run(scheduler):
        assert step.num_tokens - step.num_decodes <= prefill_budget
        assert len(set(step.rows.tolist())) == len(step) <= max_running
        assert PADDING_ROW not in step.rows
        for i, (row, request, start, length) in enumerate(pieces(step)):
            context = requests[request][0]
            assert row_of.setdefault(request, row) == row, "a request stays in its row"
            assert start == planned[request], "the next token, none twice, none left out"
            assert (start >= context and length == 1) if i < step.num_decodes else (start + length <= context)
            planned[request] += length
    fits = [sum(lengths) <= max_context_len for lengths in requests]
    assert planned == {request: sum(lengths) if fits[request] else 0 for request, lengths in enumerate(requests)}
    assert scheduler.num_finished == sum(fits)
    assert sum(scheduler.refused.values()) == len(requests) - sum(fits)
    assert list(row_of) == sorted(row_of), "first come, first served"
    assert scheduler.drained


@pytest.mark.parametrize("max_running", [1, 64])
def test_a_synthetic_trace_is_planned_whole(max_running: int) -> None:
    trace = synthetic_trace(50)
    scheduler = Scheduler(trace, max_running=max_running, max_context_len=16384, prefill_budget=1000)
    assert sum(step.num_tokens for step in run(scheduler)) == trace.num_tokens
    assert scheduler.num_finished == 50


def test_the_real_conversation_trace_is_planned_whole(traces: Path) -> None:
    trace = read_trace(traces / "azure_llm_2023_conv.csv")
    scheduler = Scheduler(trace, max_running=256, max_context_len=16384, prefill_budget=8192)
    assert sum(step.num_tokens for step in run(scheduler)) == trace.num_tokens
    assert (scheduler.num_finished, scheduler.num_running) == (19_366, 0)
