"""The canary beside a replay: silent on a clean run, and it finds what is broken, in as many steps as it says."""

import re

import pytest

from kv_canary.replay.result import ReplayResult, ReplaySettings
from kv_canary.replay.run import replay
from kv_canary.replay.trace import Trace
from kv_canary.replay.watch import PERTURBATIONS

TRACE = Trace(name="test", context_lens=[40, 9, 0, 33, 17, 5] * 3, generated_lens=[30, 12, 20, 40, 25, 3] * 3)
SMALL = {"max_running": 6, "max_context": 80, "prefill_budget": 32, "page_size": 4, "verify_every": 1000}


def run(**changes: object) -> ReplayResult:
    return replay(TRACE, ReplaySettings(**SMALL, **changes))  # type: ignore[arg-type]


def test_every_token_of_a_clean_run_is_stamped_once_and_nothing_is_found() -> None:
    result = run(canary=True)
    assert result.findings == ()
    assert result.canary is not None
    assert result.canary.counts["written"] == result.tokens_scattered == TRACE.num_tokens
    assert result.canary.perturbed is None
    compared = [result.canary.counts[name] for name in ("position", "chain", "token", "kv")]
    assert min(compared) == max(compared) > TRACE.num_tokens
    assert result.to_json()["canary"]["counts"]["written"] == TRACE.num_tokens


def test_without_it_nothing_is_stamped() -> None:
    assert run().canary is None


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", PERTURBATIONS)
def test_every_perturbation_is_found_within_the_steps_and_named(kind: str, seed: int) -> None:
    result = run(perturb=kind, seed=seed)
    assert result.canary is not None
    assert result.canary.perturbed is not None
    struck = int(re.match(r"step (\d+)", result.canary.perturbed)[1])  # type: ignore[index]
    [finding, *_] = result.findings
    found = int(re.match(r"step (\d+): kv-canary: \d+ violations: .* at request \d+ \(id \d+\)", finding)[1])  # type: ignore[index]
    assert 0 <= found - struck <= result.canary.period + 1


def test_what_is_not_seen_is_a_finding_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PERTURBATIONS, "slot-swap", lambda watch, victims: "nothing was done")
    assert "perturb slot-swap: NOT seen, although nothing was done" in run(perturb="slot-swap").findings[0]
