"""The example engine: batched, chunked and paged, it says what each sequence says alone."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import engine

PROMPTS = [[1, 2, 3], [5] * 11, [7, 8, 9, 10, 11], [4]]


@pytest.mark.parametrize("prefill_budget", [1, 3, 8, 64])
def test_the_logits_are_those_of_each_sequence_alone(prefill_budget: int) -> None:
    model = engine.Model().eval()
    together = engine.Engine(model, prefill_budget).generate(PROMPTS, 5)
    for prompt, sequence in zip(PROMPTS, together, strict=True):
        [alone] = engine.Engine(model, 64).generate([prompt], 5)
        assert sequence.tokens == alone.tokens
        assert len(sequence.logits) == 5
        torch.testing.assert_close(torch.stack(sequence.logits), torch.stack(alone.logits), rtol=1e-4, atol=1e-5)


def test_its_canary_is_alive() -> None:
    running = engine.Engine(engine.Model().eval())
    running.generate(PROMPTS, 3)
    assert running.canary.health().is_alive
    assert running.canary.counts()["kv"] > 0


def test_it_runs_as_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    engine.main()
    assert capsys.readouterr().out.count("the same alone") == 3
