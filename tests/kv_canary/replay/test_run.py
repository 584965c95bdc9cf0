"""The replay: everything is scattered once, what is wrong is found, and the figures are true."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kv_canary import kinds, pool
from kv_canary.replay import inject, run
from kv_canary.replay.result import ReplayResult, ReplaySettings
from kv_canary.replay.run import replay
from kv_canary.replay.scheduler import Scheduler
from kv_canary.replay.trace import Trace, read_trace, synthetic_trace

Patch = pytest.MonkeyPatch


def trace_of(*requests: tuple[int, int]) -> Trace:
    """A trace of (context, generated) pairs."""
    context_lens, generated_lens = zip(*requests, strict=True)
    return Trace(name="test", context_lens=context_lens, generated_lens=generated_lens)


def settings(**changes: Any) -> ReplaySettings:
    small = {"max_running": 8, "max_context": 64, "prefill_budget": 16, "verify_every": 5}
    return ReplaySettings(**(small | changes))


MIXED = trace_of(*[(3, 2), (0, 4), (0, 0), (20, 1), (9, 0), (1, 30), (60, 5), (7, 7)] * 3)
"""With empty contexts, an empty request, chunked prefill, and three requests that do not fit."""
MIXED_REFUSED = 3
MIXED_TOKENS = MIXED.num_tokens - 3 * 65


@pytest.fixture
def scattered(monkeypatch: Patch) -> list[Any]:
    """Every batch that the replay's pool scatters from here on."""
    batches: list[Any] = []
    scatter = pool.scatter_checked

    def spy(batch: Any, *args: Any, **keywords: Any) -> None:
        batches.append(batch)
        scatter(batch, *args, **keywords)

    monkeypatch.setattr(pool, "scatter_checked", spy)
    return batches


def tokens_that_fit(trace: Trace, max_context: int) -> np.ndarray:
    """All tokens of all requests that are not refused, sorted."""
    totals = trace.context_lens + trace.generated_lens
    requests = np.flatnonzero(totals <= max_context)
    return np.sort(np.concatenate([trace.token_ids(int(r), np.arange(totals[r])) for r in requests]))


# ---- a clean run ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="small"),
        pytest.param({"max_running": 1}, id="one_row"),
        pytest.param({"prefill_budget": 1}, id="one_prefill_token_a_step"),
        pytest.param({"max_running": 100, "prefill_budget": 1000}, id="all_at_once"),
        pytest.param({"verify_every": 1}, id="verified_at_every_step"),
        pytest.param({"mode": "coerce"}, id="coerce"),
    ],
)
def test_every_token_of_every_request_that_fits_is_scattered_once(
    scattered: list[Any], changes: dict[str, Any]
) -> None:
    result = replay(MIXED, settings(**changes))
    tokens = torch.cat([batch.token_ids for batch in scattered]).numpy()
    assert np.array_equal(np.sort(tokens), tokens_that_fit(MIXED, 64))
    assert result.tokens_scattered == MIXED_TOKENS
    assert result.requests_finished == len(MIXED) - MIXED_REFUSED
    assert (result.violations, result.findings) == (0, ())


@pytest.mark.parametrize(("file", "limit"), [("azure_llm_2023_code.csv", 60), ("mooncake_conversation.jsonl", 30)])
def test_a_real_trace_replays_clean(traces: Path, file: str, limit: int) -> None:
    trace = read_trace(traces / file, limit=limit)
    result = replay(trace, ReplaySettings(max_running=16, max_context=8192))
    assert result.findings == ()
    assert result.requests_finished + result.requests_refused == limit
    assert result.tokens_scattered == len(tokens_that_fit(trace, 8192)) > 0


def test_the_pool_is_verified_every_so_many_steps_and_at_the_end() -> None:
    # Holds 3, 4, 5 tokens after its three steps; the end is the third.
    assert replay(trace_of((3, 2)), settings(verify_every=2)).tokens_verified == 4 + 5
    assert replay(trace_of((3, 2)), settings(verify_every=1)).tokens_verified == 3 + 4 + 5
    assert replay(trace_of((3, 2)), settings(verify_every=99)).tokens_verified == 5


def test_it_is_said_how_many_requests_have_been_verified_at_least_once() -> None:
    trace = trace_of((3, 0), (0, 0), (2, 9))
    assert replay(trace, settings(verify_every=1)).requests_verified == 2
    assert replay(trace, settings(verify_every=99)).requests_verified == 1


def test_large_verifications_are_made_in_parts(monkeypatch: Patch) -> None:
    whole = replay(MIXED, settings())
    monkeypatch.setattr(run, "VERIFY_TOKENS", 7)
    assert replay(MIXED, settings()).tokens_verified == whole.tokens_verified > 100


def test_refused_requests_are_counted_with_the_reason() -> None:
    result = replay(MIXED, settings())
    assert result.refused_reasons == {"longer than max_context": MIXED_REFUSED}
    assert result.requests_refused == MIXED_REFUSED


def test_a_trace_of_only_refused_requests_runs_no_step_and_compares_nothing() -> None:
    result = replay(trace_of((65, 0)), settings())
    assert (result.steps, result.tokens_verified, result.requests_refused) == (0, 0, 1)
    assert (result.host_us_at(50), result.findings) == (0, ())


def test_bytes_and_host_time_are_counted_by_step(scattered: list[Any]) -> None:
    result = replay(MIXED, settings())
    assert result.steps == len(result.host_us) == len(result.running) == len(result.step_tokens)
    assert len(scattered) <= result.steps, "a step in which nothing is new sends nothing"
    assert result.step_tokens.sum() == result.tokens_scattered
    assert result.bytes_copied == sum(batch.packed.nbytes for batch in scattered)
    assert 0 < result.host_us_at(50) <= result.host_us_at(99)


def test_a_batch_names_its_requests_rows_and_prefixes_as_planned(scattered: list[Any]) -> None:
    replay(trace_of((1, 5), (20, 2)), settings())
    layout = scattered[1].layout
    assert layout.req_pool_indices.tolist() == [1, 2]
    assert layout.prefix_lens.tolist() == [1, 15]
    assert layout.lengths.tolist() == [1, 5]
    assert list(layout.req_ids) == [0, 1]


def test_it_is_said_what_a_full_rescatter_would_have_sent() -> None:
    # Two requests hold 3 + 2, then 4 + 3, then 5 + 4 tokens after their steps.
    result = replay(trace_of((3, 2), (2, 2)), settings())
    assert (result.tokens_scattered, result.rescatter_tokens) == (9, 5 + 7 + 9)
    assert result.rescatter_bytes == 8 * (21 + 3 * 48)
    assert result.running.tolist() == [2, 2, 2]
    assert result.step_tokens.tolist() == [5, 2, 2]
    assert result.per_step()["tokens"] == 3


def test_a_recycled_row_is_truncated_before_its_new_request_has_a_token() -> None:
    # The second request waits for prefill, in the row of the first, while the third is still being prefilled.
    result = replay(trace_of((9, 0), (9, 1), (9, 1)), settings(max_running=2, prefill_budget=2, verify_every=1))
    assert result.findings == ()


# ---- finding ----------------------------------------------------------------------------


def test_a_cell_that_was_never_written_is_found_and_named(monkeypatch: Patch) -> None:
    sync = pool.TokenPool.sync
    expected = MIXED.token_ids(3, np.array([12])).item()

    def forgetful(self: Any, *args: Any, **keywords: Any) -> Any:
        sent = sync(self, *args, **keywords)
        self.tokens[self.tokens == expected] = kinds.UNWRITTEN
        return sent

    monkeypatch.setattr(pool.TokenPool, "sync", forgetful)
    result = replay(MIXED, settings(verify_every=1))
    assert len(result.findings) == result.violations == 1
    assert f"(id 3), row 4, column 12: expected {expected}, found -2" in result.findings[0]
    assert result.violation_cells.tolist() == [[4, 12]]


def test_of_many_wrong_cells_the_first_are_named_and_all_are_counted(monkeypatch: Patch) -> None:
    monkeypatch.setattr(pool, "scatter_checked", lambda *args, **keywords: None)
    result = replay(trace_of((16, 1), (9, 1)), settings(verify_every=1))
    assert result.violations == 16
    assert len(result.findings) == run.MAX_FINDINGS
    assert result.steps == 1, "the run ends at the first finding"


# ---- faults on purpose ------------------------------------------------------------------

NAMED = {
    "int32-offsets": "offsets must be int64, got torch.int32",
    "short-offsets": "offsets length",
    "bad-row": "req_pool_indices must be in [0, 9), got ",
    "duplicate-row": "must be unique among requests with tokens",
    "bad-token": "flat_in must fit int32, got ",
    "flip": "pool differs: token at request ",
    "stale-row": "pool differs: token at request ",
    "lost-token": "pool differs: token at request ",
    "swapped-rows": "pool differs: ",
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", inject.KINDS)
def test_every_fault_is_found_at_once_or_by_the_next_verification_and_named(kind: str, seed: int) -> None:
    result = replay(MIXED, settings(inject=kind, seed=seed))
    assert result.findings and all(NAMED[kind] in finding for finding in result.findings)
    assert not any("\n" in finding for finding in result.findings)
    if kind not in ("stale-row", "lost-token", "swapped-rows"):  # those break many cells at once
        assert result.violations == len(result.findings) == 1


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("stale-row", r"row (\d+) kept \d+ tokens of request id \d+"),
        ("lost-token", r"row (\d+) lost its token at position \d+"),
        ("swapped-rows", r"rows (\d+) and (\d+) were swapped"),
    ],
)
def test_the_rows_that_were_broken_are_the_ones_that_are_found(
    kind: str, words: str, seed: int, monkeypatch: Patch
) -> None:
    made: list[inject.Injector] = []
    monkeypatch.setattr(
        run, "Injector", lambda *args, **keywords: made.append(inject.Injector(*args, **keywords)) or made[0]
    )
    result = replay(MIXED, settings(inject=kind, seed=seed))
    broken = re.fullmatch(words, made[0].done or "")
    assert broken is not None
    assert {row for row, _ in result.violation_cells.tolist()} == {int(row) for row in broken.groups()}


@pytest.mark.parametrize("verify_every", [1, 7, 10**9])
@pytest.mark.parametrize("seed", range(5))
def test_a_flip_is_found_however_rarely_the_pool_is_verified(seed: int, verify_every: int) -> None:
    result = replay(MIXED, settings(inject="flip", seed=seed, verify_every=verify_every))
    assert "pool differs: token at request " in result.findings[0]


def test_a_fault_strikes_in_the_middle_of_the_run() -> None:
    steps = replay(MIXED, settings()).steps
    struck = {replay(MIXED, settings(inject="bad-row", seed=seed)).steps for seed in range(8)}
    assert len(struck) > 1
    assert all(steps // 4 <= step <= steps for step in struck)


@pytest.mark.parametrize("kind", ["int32-offsets", "short-offsets", "bad-row", "bad-token"])
def test_a_fault_that_nobody_sees_is_a_failure_of_its_own(kind: str, monkeypatch: Patch) -> None:
    def blind(self: inject.Injector, *arguments: Any) -> bool:
        self.done = "something was broken"
        return False

    monkeypatch.setattr(inject.Injector, "launch", blind)
    result = replay(MIXED, settings(inject=kind))
    assert result.findings == (f"inject {kind}: NOT seen, although something was broken",)


def test_a_fault_that_never_had_its_case_is_a_failure_too() -> None:
    result = replay(MIXED, settings(inject="duplicate-row", max_running=1))
    assert result.findings == ("inject duplicate-row: NOT injected: no step had what it needs",)


def test_an_unknown_fault_is_refused() -> None:
    with pytest.raises(ValueError, match=r"inject must be one of int32-offsets, .*, got 'rust'"):
        replay(MIXED, settings(inject="rust"))


# ---- on a GPU ---------------------------------------------------------------------------


@pytest.mark.gpu
def test_on_a_gpu_a_trace_replays_clean() -> None:
    result = replay(MIXED, settings(device="cuda"))
    assert result.findings == ()
    assert result.tokens_scattered == MIXED_TOKENS
    assert result.tokens_verified == replay(MIXED, settings()).tokens_verified


@pytest.mark.gpu
@pytest.mark.parametrize("kind", inject.KINDS)
def test_on_a_gpu_every_fault_is_found_and_named_as_on_the_cpu(kind: str) -> None:
    found = replay(MIXED, settings(inject=kind, device="cuda")).findings
    assert found == replay(MIXED, settings(inject=kind)).findings


# ---- figures ----------------------------------------------------------------------------


def test_the_json_has_the_promised_keys_and_all_settings() -> None:
    figures = json.loads(json.dumps(replay(MIXED, settings()).to_json()))
    assert figures["steps"] > 0
    assert figures["requests_finished"] == len(MIXED) - MIXED_REFUSED
    assert figures["requests_refused"] == MIXED_REFUSED
    assert figures["tokens_scattered"] == MIXED_TOKENS
    assert figures["bytes_copied"] >= 8 * MIXED_TOKENS
    assert figures["host_us_p99"] >= figures["host_us_p50"] > 0
    assert figures["tokens_verified"] > 0
    assert figures["violations"] == 0
    assert figures["settings"] == {
        "trace": "test",
        "requests": 24,
        "max_running": 8,
        "max_context": 64,
        "prefill_budget": 16,
        "device": "cpu",
        "mode": "strict",
        "seed": 0,
        "verify_every": 5,
        "inject": None,
        "canary": False,
        "perturb": None,
        "page_size": 16,
    }


def test_ctrl_c_ends_the_run_with_the_figures_so_far() -> None:
    def press_at(step: int) -> Callable[[Scheduler], None]:
        left = iter(range(step - 1, -1, -1))

        def on_step(_: Scheduler) -> None:
            if not next(left):
                raise KeyboardInterrupt

        return on_step

    result: ReplayResult = replay(MIXED, settings(), on_step=press_at(4))
    assert (result.steps, result.interrupted) == (4, True)
    assert result.findings == ()


def test_the_same_seed_replays_the_same() -> None:
    one, two = (replay(synthetic_trace(30, seed=3), ReplaySettings()).to_json() for _ in range(2))
    for timing in ("seconds", "host_us_p50", "host_us_p99"):
        del one[timing], two[timing]
    assert one == two
