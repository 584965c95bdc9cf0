"""A vLLM scheduler's step as a batch, on a stand-in with vLLM's names."""

import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest

from kv_canary.integrations import vllm
from ragged import RaggedBatchBuilder, RaggedError, RaggedTypeError, RaggedValueError


@dataclass
class NewRequestData:
    req_id: str
    prompt_token_ids: list[int] | None
    num_computed_tokens: int


@dataclass
class CachedRequestData:
    req_ids: list[str] = field(default_factory=list)
    new_token_ids: list[list[int]] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass
class SchedulerOutput:
    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    parts = vllm.MODULE.split(".")
    for depth in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType(".".join(parts[:depth])))
    module = sys.modules[vllm.MODULE]
    vars(module).update({each.__name__: each for each in (NewRequestData, CachedRequestData, SchedulerOutput)})
    return module


KNOWN = {"a": [1, 2, 3, 4, 5], "b": [7, 8, 9], "c": [20, 21, 22, 23]}
ROWS = {"a": 4, "b": 2, "c": 9}


def output(**changes: Any) -> SchedulerOutput:
    """A chunk of a's prompt, c from a cached prefix on, and a token of b."""
    new = [NewRequestData("a", KNOWN["a"], 0), NewRequestData("c", KNOWN["c"], 2)]
    cached = CachedRequestData(["b"], [], [2])
    return SchedulerOutput(new, cached, {"a": 3, "b": 1, "c": 2} | changes)


def test_a_step_is_what_is_scheduled_of_each_request(engine: ModuleType) -> None:
    batch = vllm.build(RaggedBatchBuilder(), output(), rows=ROWS, tokens_of=KNOWN.__getitem__)
    assert batch.layout.req_ids == ("a", "c", "b")
    assert [tokens.tolist() for tokens in batch.unbind()] == [[1, 2, 3], [22, 23], [9]]
    assert batch.req_pool_indices.tolist() == [4, 9, 2]
    assert batch.prefix_lens.tolist() == [0, 2, 2]


def test_a_step_of_nothing_is_an_empty_batch(engine: ModuleType) -> None:
    empty = SchedulerOutput([], CachedRequestData(), {})
    assert vllm.build(RaggedBatchBuilder(), empty, rows={}, tokens_of=KNOWN.__getitem__).num_reqs == 0


def test_a_new_request_beyond_its_prompt_is_asked_for(engine: ModuleType) -> None:
    resumed = SchedulerOutput([NewRequestData("a", [1, 2], 0)], CachedRequestData(), {"a": 4})
    batch = vllm.build(RaggedBatchBuilder(), resumed, rows=ROWS, tokens_of=KNOWN.__getitem__)
    assert batch.token_ids.tolist() == [1, 2, 3, 4]


def test_a_request_without_a_row_or_without_its_tokens_is_named(engine: ModuleType, refused: Any) -> None:
    builder = RaggedBatchBuilder()
    text = "kv-canary: rows must have request 2 (id 'b')"
    with refused(RaggedValueError, text, argument="rows", request=2, req_id="b"):
        vllm.build(builder, output(), rows={"a": 4, "c": 9}, tokens_of=KNOWN.__getitem__)
    text = "kv-canary: tokens of request 2 (id 'b') must reach to 7, got 3"
    with refused(RaggedValueError, text, argument="tokens_of", request=2, req_id="b", got=3, bound=7):
        vllm.build(builder, output(b=5), rows=ROWS, tokens_of=KNOWN.__getitem__)
    assert len(builder) == 0


def test_what_is_no_scheduler_output_is_refused(engine: ModuleType, refused: Any) -> None:
    text = "kv-canary: output must be vLLM's SchedulerOutput, got dict"
    with refused(RaggedTypeError, text, argument="output", got="dict"):
        vllm.build(RaggedBatchBuilder(), {}, rows=ROWS, tokens_of=KNOWN.__getitem__)


def test_a_version_without_a_field_is_named(engine: ModuleType) -> None:
    vars(engine)["CachedRequestData"] = type("CachedRequestData", (), {"__dataclass_fields__": {"req_ids": None}})
    with pytest.raises(RaggedError, match="not a version that is known: CachedRequestData lacks num_computed_tokens"):
        vllm.build(RaggedBatchBuilder(), output(), rows=ROWS, tokens_of=KNOWN.__getitem__)


def test_without_vllm_it_says_so() -> None:
    with pytest.raises(
        RaggedError, match=r"vLLM's vllm\.v1\.core\.sched\.output was not found: No module named 'vllm'"
    ):
        vllm.build(RaggedBatchBuilder(), output(), rows=ROWS, tokens_of=KNOWN.__getitem__)
