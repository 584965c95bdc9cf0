"""Batches in buffers of fixed sizes: what was launched once serves every smaller content, as in a CUDA graph."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_canary import GuardReport, KVCanary, TokenPool, ViolationLog, scatter
from ragged import Capacity, RaggedBatch, RaggedBatchBuilder, RaggedValueError
from tests.strategies import Model, models

CAPACITY = Capacity(max_reqs=9, max_tokens=80)
MAX_REQS, MAX_LEN = 12, 20
CONTENTS = st.lists(models(max_reqs=9, max_len=8, min_row=1, max_row=11, max_prefix_len=9), min_size=2, max_size=3)


class Recorded:
    """Launches as they were made, with the tensors and sizes of then: a CUDA graph for the interpreter."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []

    @contextmanager
    def capture(self) -> Iterator[None]:
        from kv_canary import launching

        def record(kernel: Any, _: Any, programs: int, tensors: Any, __: Any, *rest: Any, **___: Any) -> None:
            given, (sizes, constants, *_) = tensors(), rest
            self.calls.append(lambda: kernel[(programs,)](*given, *sizes, *constants))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launching, "launch", record)
            yield

    def replay(self) -> None:
        for call in self.calls:
            call()


class Graph:
    """The real thing."""

    def __init__(self) -> None:
        self.graph = torch.cuda.CUDAGraph()

    @contextmanager
    def capture(self) -> Iterator[None]:
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            yield

    def replay(self) -> None:
        self.graph.replay()


@pytest.fixture
def graph(target: Any) -> Callable[[], Any]:
    """Something that captures launches, and replays them."""
    if target.backend != "triton":
        pytest.skip("the torch backend reads sizes on the host; there is nothing to capture")
    return Recorded if target.device == "cpu" else Graph


def fill(builder: RaggedBatchBuilder, model: Model) -> RaggedBatch:
    builder.extend(model.rows, model.sequences, prefix_lens=model.prefix_lens)
    return builder.build()


def plainly(model: Model, target: Any) -> torch.Tensor:
    """The pool after an ordinary scatter of the same content."""
    pool = torch.full((MAX_REQS, MAX_LEN), -7, dtype=torch.int32)
    batch = RaggedBatch.from_sequences(model.sequences, req_pool_indices=model.rows, prefix_lens=model.prefix_lens)
    scatter(batch, pool, backend="torch")
    return pool


@settings(max_examples=12)  # two or three contents each, and grids of the whole capacity
@given(contents=CONTENTS)
def test_it_scatters_like_any_other_batch(target: Any, contents: list[Model]) -> None:
    builder = RaggedBatchBuilder(device=target.device, capacity=CAPACITY, padding_row=0)
    for model in contents:
        pool = torch.full((MAX_REQS, MAX_LEN), -7, dtype=torch.int32, device=target.device)
        report = target.report()
        target.scatter(fill(builder, model), pool, report)
        assert torch.equal(pool.cpu(), plainly(model, target))
        assert not any(report.counts().values())


# Case 10, and issue 5.
def test_a_captured_scatter_serves_every_content(target: Any, graph: Callable[[], Any]) -> None:
    captured = graph()
    builder = RaggedBatchBuilder(device=target.device, capacity=CAPACITY, padding_row=0)
    pool = torch.full((MAX_REQS, MAX_LEN), -7, dtype=torch.int32, device=target.device)
    report = GuardReport.allocate(target.device)
    target.scatter(fill(builder, Model.of_lengths([2])), pool, report)  # compiled, and all buffers there
    batch = builder.build()  # of nothing: it does not matter
    with captured.capture():
        scatter(batch, pool, report=report, backend=target.backend)
    for lengths in ([8] * 9, [1], [], [0, 3, 0, 8], [1] * 9):
        model = Model.of_lengths(lengths)
        fill(builder, model)
        pool.fill_(-7)
        captured.replay()
        assert torch.equal(pool.cpu(), plainly(model, target)), lengths
    assert not any(report.counts().values())


def test_a_captured_append_and_a_captured_verification_go_on_with_what_is_there(
    target: Any, graph: Callable[[], Any]
) -> None:
    captured = graph()
    pool = TokenPool.allocate(MAX_REQS, MAX_LEN, device=target.device, backend=target.backend)
    log = ViolationLog.allocate(target.device)
    builder = RaggedBatchBuilder(device=target.device, capacity=CAPACITY, padding_row=0)
    batch = builder.build()
    pool.append(batch)
    pool.verify(batch, report=log)
    with captured.capture():
        pool.append(batch)
        pool.verify(batch, report=log)
    held: dict[int, int] = {}
    for step in range(5):
        rows = list(range(1, 4 + step))
        starts = [held.get(row, 0) for row in rows]
        builder.extend(rows, [[step * 10 + row] * (row % 3) for row in rows], prefix_lens=starts)
        builder.build()
        captured.replay()
        held |= {row: start + row % 3 for row, start in zip(rows, starts, strict=True)}
        assert pool.valid_lens.tolist() == [held.get(row, 0) for row in range(MAX_REQS)]
        assert log.drain() == []


def test_a_captured_verification_finds_what_is_wrong_when_it_is_replayed(target: Any, graph: Callable[[], Any]) -> None:
    captured = graph()
    pool = TokenPool.allocate(MAX_REQS, MAX_LEN, device=target.device, backend=target.backend)
    log = ViolationLog.allocate(target.device)
    builder = RaggedBatchBuilder(device=target.device, capacity=CAPACITY, padding_row=0)
    pool.sync([(row, None, [10 * row + i for i in range(row)]) for row in range(1, 6)])
    batch = builder.build()
    pool.verify(batch, report=log)
    with captured.capture():
        pool.verify(batch, report=log)
    for row in (5, 3):
        pool.tokens[row, 1] ^= 1
        builder.extend(range(1, 6), [[10 * row + i for i in range(row)] for row in range(1, 6)])
        builder.build()
        captured.replay()
        assert [(found.row, found.column) for found in log.drain()] == [(row, 1)]
        pool.tokens[row, 1] ^= 1


def test_a_captured_write_and_verification_stamp_and_compare_what_is_there(
    target: Any, graph: Callable[[], Any]
) -> None:
    # The whole decode step of a canary in one graph: columns lie in buffers that are refilled before each replay.
    captured = graph()
    size, num_slots = CAPACITY.max_tokens, MAX_REQS * MAX_LEN
    builder = RaggedBatchBuilder(device=target.device, capacity=CAPACITY, padding_row=0)
    canary, plain = (KVCanary.allocate(num_slots, device=target.device, backend=target.backend) for _ in range(2))
    table = torch.arange(num_slots, dtype=torch.int32, device=target.device).reshape(MAX_REQS, MAX_LEN)
    slots, seeds, rows, lens = (
        torch.full((n,), fill, dtype=torch.int64, device=target.device)
        for n, fill in ((size, -1), (CAPACITY.max_reqs, -1), (CAPACITY.max_reqs, 1), (CAPACITY.max_reqs, 0))
    )
    batch = builder.build()

    def step() -> None:
        canary.write(batch, slots, seed_slots=seeds)
        canary.verify(table, rows, lens)

    step()
    with captured.capture():
        step()
    held = dict.fromkeys(range(1, 8), 0)
    for number in range(4):
        lengths = {row: (row + number) % 4 if number else row for row in held}
        taken = [row * MAX_LEN + held[row] + i for row, length in lengths.items() for i in range(length)]
        before = [row * MAX_LEN + held[row] - 1 if held[row] else -1 for row in held]
        tokens, starts = [[number * 10 + row] * length for row, length in lengths.items()], list(held.values())
        builder.extend(list(held), tokens, prefix_lens=starts)
        builder.build()
        slots[: len(taken)] = torch.tensor(taken)
        seeds[: len(before)] = torch.tensor(before)
        held = {row: held[row] + lengths[row] for row in held}
        rows[: len(held)], lens[: len(held)] = torch.tensor(list(held)), torch.tensor(list(held.values()))
        already = canary.counts()["position"]
        captured.replay()
        other = RaggedBatch.from_sequences(
            tokens, req_pool_indices=list(lengths), prefix_lens=starts, device=target.device
        )
        plain.write(other, taken, seed_slots=before)
        assert torch.equal(canary.stamps, plain.stamps)
        assert canary.counts()["position"] - already == sum(held.values())
        assert canary.log.drain() == []
    canary.stamps[table[3, 1].item(), 0] ^= 1
    captured.replay()
    assert {violation.row for violation in canary.log.drain()} == {3}


def test_a_write_that_may_be_replayed_says_where_requests_continue(target: Any) -> None:
    batch = RaggedBatchBuilder(device=target.device, capacity=CAPACITY, padding_row=0).build()
    canary = KVCanary.allocate(9, device=target.device, backend=target.backend)
    with pytest.raises(RaggedValueError, match="seed_slots must be given where a batch has a capacity"):
        canary.write(batch, [-1] * CAPACITY.max_tokens)
    with pytest.raises(RaggedValueError, match=r"out_cache_loc length 3 != max_tokens \(80\)"):
        canary.write(batch, [1, 2, 3], seed_slots=[-1] * CAPACITY.max_reqs)


@pytest.mark.gpu
def test_what_a_replay_finds_is_not_named_by_the_requests_of_the_capture() -> None:
    graph, log = torch.cuda.CUDAGraph(), ViolationLog.allocate("cuda")
    pool = TokenPool.allocate(MAX_REQS, MAX_LEN, device="cuda")
    builder = RaggedBatchBuilder(device="cuda", capacity=CAPACITY, padding_row=0)
    pool.sync([(1, None, [11]), (2, None, [12])])
    for row, req_id in ((1, "captured"), (2, "replayed")):
        builder.extend([row], [[10 + row]], req_ids=[req_id])
        batch = builder.build()
        if row == 1:
            pool.verify(batch, report=log)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                pool.verify(batch, report=log)
    pool.tokens[2, 0] ^= 1
    graph.replay()
    assert [(found.row, found.req_id) for found in log.drain()] == [(2, None)]


def _allocations() -> int:
    """How often memory has been taken; how much is held depends on what Python has let go of."""
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


@pytest.mark.gpu
def test_a_replay_allocates_nothing_and_waits_for_nothing(no_sync: Any) -> None:
    graph = torch.cuda.CUDAGraph()
    pool, report = TokenPool.allocate(MAX_REQS, MAX_LEN, device="cuda"), GuardReport.allocate("cuda")
    builder = RaggedBatchBuilder(device="cuda", capacity=CAPACITY, padding_row=0)
    log, batch = ViolationLog.allocate("cuda"), builder.build()

    def step() -> None:
        pool.append(batch, report=report)
        pool.verify(batch, report=log)
        scatter(batch, pool.tokens, report=report)

    step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        before = _allocations()  # torch has taken what a capture takes
        step()
        assert _allocations() == before
    with no_sync():
        builder.extend([1, 2], [[5], [6, 7]])
        builder.build()
        graph.replay()
    assert _allocations() == before
