"""Verification: every fault is found and named, nothing is invented, and how much was compared is said."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_canary import KVCanary, TokenPool, Violation, ViolationLog, backends, kinds, reference, verify_tokens
from ragged import RaggedBatch, RaggedTypeError, RaggedValueError

INT64 = st.sampled_from([-(2**63), -(2**40), -1, 0, 1, 2, 5, 6, 7, 2**31, 2**40, 2**63 - 1])


@pytest.fixture(autouse=True)
def tiles(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tiny tiles for the tiny targets, in whatever is built and launched."""
    if "target" not in request.fixturenames:
        yield
        return
    with request.getfixturevalue("target").tiles():
        yield


def found_by(log: ViolationLog[Any]) -> list[Violation]:
    """In an order of their own: kernels find them in any."""
    return sorted(log.drain(), key=lambda v: (v.request, v.column, v.kind, v.expected, v.found))


@st.composite
def worlds(draw: st.DrawFn) -> dict[str, Any]:
    """A batch, a pool and valid lengths, each with faults in random places of their device copies."""
    lengths = draw(st.lists(st.sampled_from([0, 0, 1, 2, 3, 9, 30]), max_size=5))
    prefixes = draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)))
    token = st.sampled_from([-1, 3, 3, 3, 4, 2**31 - 1, 2**31, 2**40 + 3])
    return {
        "sequences": [draw(st.lists(token, min_size=n, max_size=n)) for n in lengths],
        "prefixes": prefixes,
        "cells": draw(st.lists(st.sampled_from([3, 3, 3, 4, -1]), min_size=7 * 32, max_size=7 * 32)),
        "valid_lens": [
            draw(st.sampled_from([n + p, n + p, n + p + 1, n, 0]) | INT64)
            for n, p in zip(lengths, prefixes, strict=True)
        ],
        "broken": draw(st.lists(st.tuples(st.sampled_from(["offsets", "rows", "prefixes"]), st.integers(0, 5), INT64))),
        "capacity": draw(st.sampled_from([1, 4, 1000])),
        "exact": draw(st.booleans()),
    }


@given(world=worlds())
def test_equals_the_reference_whatever_the_device_holds(target: Any, world: dict[str, Any]) -> None:
    logs = []
    for device, module in (
        ("cpu", reference),
        (target.device, backends.resolve(target.backend, torch.device(target.device))),
    ):
        rows = range(1, 1 + len(world["sequences"]))
        batch = RaggedBatch.from_sequences(
            world["sequences"],
            req_pool_indices=rows,
            prefix_lens=world["prefixes"],
            allow_placeholders=True,
            wide_tokens="opaque",
            device=device,
        )
        parts = {"offsets": batch.offsets, "rows": batch.req_pool_indices, "prefixes": batch.prefix_lens}
        for name, index, value in world["broken"]:
            if index < len(parts[name]):
                parts[name][index] = value
        pool = torch.tensor(world["cells"], dtype=torch.int32, device=device).view(7, 32)
        valid_lens = torch.zeros(7, dtype=torch.int64, device=device)
        valid_lens[1 : 1 + len(rows)] = torch.tensor(world["valid_lens"], dtype=torch.int64, device=device)
        log = ViolationLog.allocate(device, capacity=world["capacity"])
        launch = log.begin(None, batch.num_tokens)
        if batch.num_reqs:
            module.verify_batch(batch, pool, valid_lens, log.table, launch, world["exact"])
        logs.append(log)
    ours, right = found_by(logs[1]), found_by(logs[0])
    assert (logs[1].found, logs[1].lost) == (logs[0].found, logs[0].lost)
    assert logs[1].compared() == logs[0].compared()
    if not logs[0].lost:
        assert ours == right


def clean_pool(target: Any, num_reqs: int, max_context_len: int) -> tuple[TokenPool, RaggedBatch]:
    """A pool and the batch that has filled it but for its last column."""
    tokens = np.random.default_rng(5).integers(0, 2**31, (num_reqs, max_context_len - 1))
    pool = TokenPool.allocate(num_reqs + 1, max_context_len, device=target.device, backend=target.backend)
    batch = target.batch(tokens, np.arange(1, num_reqs + 1), req_ids=[f"r{i}" for i in range(num_reqs)])
    pool.write(batch)
    return pool, batch


FAULTS = 10_000
PER_RUN = 100
"""Faults at once; a clean run between any two."""


@pytest.mark.parametrize("kind", kinds.VIOLATIONS)
def test_ten_thousand_faults_are_all_found_and_none_is_invented(target: Any, kind: str) -> None:
    slow = target.backend == "triton" and target.device == "cpu"  # the interpreter
    num_reqs, width, total, at_once = (8, 12, 12, 6) if slow else (128, 64, FAULTS, PER_RUN)
    pool, batch = clean_pool(target, num_reqs, width)
    rng, log = np.random.default_rng(11), ViolationLog.allocate(target.device, capacity=2 * at_once)
    good = {"lens": pool.valid_lens.clone(), "rows": batch.req_pool_indices.clone()}
    for _ in range(total // at_once):
        pool.verify(batch, report=log)
        requests = rng.choice(num_reqs, at_once, replace=False)
        rows = torch.tensor(requests + 1, device=target.device)
        columns = torch.tensor(rng.integers(0, width - 1, at_once), device=target.device)
        cells = pool.tokens[rows, columns].clone()
        if kind == "token":
            bits = torch.tensor(rng.integers(0, 31, at_once), device=target.device)
            pool.tokens[rows, columns] = cells ^ (1 << bits).to(torch.int32)
            expected = {(r, c) for r, c in zip(requests.tolist(), columns.tolist(), strict=True)}
        elif kind == "stale":
            pool.valid_lens[rows] = width - 2
            expected = {(r, width - 2) for r in requests.tolist()}
        elif kind == "length":
            pool.valid_lens[rows] = width
            expected = {(r, width - 1) for r in requests.tolist()}
        else:
            outside = torch.tensor(rng.integers(num_reqs + 1, 2**62, at_once), device=target.device)
            batch.req_pool_indices[torch.tensor(requests, device=target.device)] = outside
            expected = {(r, 0) for r in requests.tolist()}
        pool.verify(batch, report=log)
        found = log.drain()
        assert {(v.kind, v.request, v.column) for v in found} == {(kind, r, c) for r, c in expected}
        assert len(found) == len(expected)
        assert all(v.req_id == f"r{v.request}" for v in found)
        pool.tokens[rows, columns] = cells
        pool.valid_lens.copy_(good["lens"])
        batch.req_pool_indices.copy_(good["rows"])
    pool.verify(batch, report=log)
    assert (log.drain(), log.found, log.lost) == ([], total // at_once * at_once, 0)


def test_a_segment_is_compared_from_its_prefix_on(target: Any) -> None:
    pool = TokenPool.allocate(3, 8, device=target.device, backend=target.backend)
    pool.sync([(1, "a", [1, 2, 3, 4]), (2, "b", [5])])
    assert pool.verify(target.batch([[3, 4], []], [1, 2], prefix_lens=[2, 1])).drain() == []
    [violation] = pool.verify(target.batch([[3], [5]], [1, 2], prefix_lens=[2, 0])).drain()
    assert (violation.kind, violation.row, violation.expected, violation.found) == ("length", 1, 3, 4)
    assert str(violation) == "length at request 0, row 1, column 3: expected 3 tokens, found 4"


def test_what_is_no_log_of_this_device_is_refused(target: Any) -> None:
    pool = TokenPool.allocate(3, 8, device=target.device, backend=target.backend)
    batch = target.batch([[1]], [1])
    with pytest.raises(RaggedTypeError, match="kv-canary: report must be a ViolationLog, got str"):
        pool.verify(batch, report="log")  # type: ignore[arg-type]
    with pytest.raises(RaggedValueError, match="kv-canary: log must have 8 columns, got 16"):
        pool.verify(batch, report=KVCanary.allocate(4, device=target.device).log)
    with pytest.raises(RaggedValueError, match="req_pool_indices must be below max_reqs 3, got 3 at request 0"):
        pool.verify(target.batch([[1]], [3]))
    if target.device == "cuda":
        with pytest.raises(RaggedValueError, match="kv-canary: report is on cpu, the pool is on cuda:0"):
            pool.verify(batch, report=ViolationLog.allocate("cpu"))


# ---- two tables ------------------------------------------------------------------------------


def test_two_tables_are_compared_where_they_are_said_to_be_valid(target: Any) -> None:
    ours, theirs = target.framed(5, 9, row_step=2), target.framed(6, 7)
    log = verify_tokens(ours.pool, theirs.pool, [4, 0, 2], [7, 0, 3], backend=target.backend)
    assert (log.drain(), log.compared()) == ([], 10)
    theirs.pool[4, 6] = -9
    ours.pool[2, 2] = 2**31 - 1
    theirs.pool[2, 3] = 5  # beyond what is valid
    log = verify_tokens(ours.pool, theirs.pool, [4, 0, 2], [7, 0, 3], backend=target.backend)
    assert [(v.kind, v.request, v.row, v.column, v.expected, v.found) for v in found_by(log)] == [
        ("token", 0, 4, 6, -9, -7),
        ("token", 2, 2, 2, -7, 2**31 - 1),
    ]
    ours.pool[4, 6] = -1
    assert len(verify_tokens(ours.pool, theirs.pool, [4], [7], backend=target.backend).drain()) == 0


@pytest.mark.parametrize(
    ("rows", "lens", "text"),
    [
        ([5], [1], "req_pool_indices must be below max_reqs 5, got 5 at request 0"),
        ([0], [8], "prefix_lens (0) plus length (8) must not exceed max_context_len 7, got 8 at request 0"),
        ([1, 1], [1, 1], "req_pool_indices must be unique among requests with tokens, got 1 at both request 0 and"),
        ([1], [-1], "lengths must not be negative, got -1 at request 0"),
    ],
    ids=["row", "length", "twice", "negative"],
)
def test_rows_and_lens_must_lie_in_both_tables(target: Any, rows: list[int], lens: list[int], text: str) -> None:
    ours, theirs = target.framed(5, 9), target.framed(6, 7)
    with pytest.raises(RaggedValueError) as caught:
        verify_tokens(ours.pool, theirs.pool, rows, lens, backend=target.backend)
    assert str(caught.value).startswith(text)


def test_tables_are_checked_by_name() -> None:
    table = torch.zeros((2, 2), dtype=torch.int32, device="cpu")
    with pytest.raises(RaggedTypeError, match=r"kv-canary: pool_b must be int32, got torch\.int64"):
        verify_tokens(table, table.long(), [0], [1])
    with pytest.raises(RaggedTypeError, match="kv-canary: pool_a must be a tensor, got list"):
        verify_tokens([[1]], table, [0], [1])  # type: ignore[arg-type]
