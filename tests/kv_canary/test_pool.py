"""TokenPool: what its rows hold after each call, what it sends, what it refuses, and that a refusal changes nothing."""

import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kv_canary import CanaryViolation, GuardReport, TokenPool
from ragged import RaggedBatch, RaggedError, RaggedTypeError, RaggedValueError


@pytest.fixture(autouse=True)
def tiles(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tiny tiles for the tiny targets, in whatever the pool builds and launches."""
    if "target" not in request.fixturenames:
        yield
        return
    with request.getfixturevalue("target").tiles():
        yield


def pool_of(target: Any, max_reqs: int = 6, max_context_len: int = 12, **options: Any) -> TokenPool:
    return TokenPool.allocate(max_reqs, max_context_len, device=target.device, backend=target.backend, **options)


def rows_of(pool: TokenPool) -> dict[int, list[int]]:
    """What each row validly holds; both copies of the lengths must agree."""
    lens = pool.valid_lens.tolist()
    assert pool.host_valid_lens.tolist() == lens
    return {row: pool.tokens[row, :n].tolist() for row, n in enumerate(lens) if n}


def state_of(pool: TokenPool) -> Any:
    return pool.tokens.tolist(), pool.valid_lens.tolist(), pool.host_valid_lens.tolist()


def test_a_new_pool_is_empty_and_its_price_was_known(target: Any) -> None:
    pool = pool_of(target)
    assert rows_of(pool) == {}
    assert pool.tokens.tolist() == [[-2] * 12] * 6
    assert (pool.tokens.dtype, pool.valid_lens.dtype) == (torch.int32, torch.int64)
    assert TokenPool.allocation_bytes(6, 12) == pool.tokens.nbytes + pool.valid_lens.nbytes
    assert not pool.host_valid_lens.flags.writeable


# ---- batches ---------------------------------------------------------------------------------


def test_write_replaces_append_extends(target: Any) -> None:
    pool = pool_of(target)
    pool.write(target.batch([[1, 2, 3], [], [4]], [2, 4, 5]))
    assert rows_of(pool) == {2: [1, 2, 3], 5: [4]}
    pool.append(target.batch([[7], [8, 9], []], [5, 2, 4], prefix_lens=[1, 3, 0]))
    assert rows_of(pool) == {2: [1, 2, 3, 8, 9], 5: [4, 7]}
    pool.write(target.batch([[6], []], [2, 5]))
    assert rows_of(pool) == {2: [6]}


def test_a_list_of_tiles_and_empty_requests_leave_the_right_lengths(target: Any) -> None:
    # 30 tokens among empties is a list of tiles on the tiny targets; an empty request has no tile there.
    pool = pool_of(target, 12, 40)
    pool.write(target.batch([[5] * 9, [5]], [7, 8]))
    pool.write(target.batch([range(30), [], [1], []], [5, 7, 3, 8]))
    assert rows_of(pool) == {5: list(range(30)), 3: [1]}


def test_padding_requests_change_nothing(target: Any) -> None:
    pool = pool_of(target)
    batch = target.batch([[1, 2]], [3], padding_row=0).pad_to(4)
    pool.write(batch)
    assert rows_of(pool) == {3: [1, 2]}
    assert pool.tokens[0].tolist() == [-2] * 12


def test_what_is_cut_off_at_the_rows_end_is_not_valid(target: Any) -> None:
    pool = pool_of(target, 3, 4)
    pool.write(target.batch([[1, 2, 3, 4, 5, 6]], [1], overflow="truncate"))
    assert rows_of(pool) == {1: [1, 2, 3, 4]}


def test_a_row_that_was_overwritten_on_the_device_keeps_its_length(target: Any) -> None:
    # The device guards skip it and report it; the valid lengths on the device tell the truth, and verify sees it.
    pool, report = pool_of(target), GuardReport.allocate(target.device)
    batch = target.batch([[1, 2], [3]], [2, 4])
    batch.req_pool_indices[1] = 2**40
    pool.write(batch, report=report)
    assert report.counts()["row"] == 1
    assert pool.valid_lens.tolist() == [0, 0, 2, 0, 0, 0]
    [violation] = pool.verify([(2, "a", [1, 2]), (4, "b", [3])]).drain()
    assert (violation.kind, violation.req_id, violation.row, violation.column) == ("stale", "b", 4, 0)


# Case 44: write, release, write; fork onto a longer row; truncate and append.
def test_nothing_stale_is_ever_valid_again(target: Any) -> None:
    pool = pool_of(target)
    pool.write(target.batch([[1, 2, 3, 4, 5, 6]], [1]))
    pool.release([1])
    assert rows_of(pool) == {}
    pool.write(target.batch([[7, 8], [1, 2, 3, 4, 5, 6, 7, 8]], [1, 2]))
    pool.write(target.batch([[11, 12, 13, 14, 15, 16]], [3]))
    pool.fork(3, 2, 5)
    pool.truncate([3], [2])
    pool.append(target.batch([[9]], [3], prefix_lens=[2]))
    assert rows_of(pool) == {1: [7, 8], 2: [11, 12, 13, 14, 15], 3: [11, 12, 9]}
    assert pool.verify([(1, "a", [7, 8]), (3, "c", [11, 12, 9])]).drain() == []
    kinds = [v.kind for v in pool.verify([(1, "a", [7, 8, 3, 4])]).drain()]
    assert kinds == ["stale", "stale"], "what an earlier request left there is never equal"


def test_adopts_a_table_without_a_copy_whatever_its_row_stride(target: Any) -> None:
    framed = target.framed(5, 9, row_step=2)
    pool = TokenPool.adopt(framed.pool, backend=target.backend)
    assert pool.tokens is framed.pool
    framed.assert_untouched()
    pool.sync([(4, "a", [1, 2, 3]), (1, "b", [4])])
    pool.fork(4, 2, 2)
    assert rows_of(pool) == {1: [4], 2: [1, 2], 4: [1, 2, 3]}
    assert framed.rows()[4] == [1, 2, 3] + [-7] * 6
    framed.assert_border_intact()
    assert pool.verify([(4, "a", [1, 2, 3])]).drain() == []


@pytest.mark.parametrize("inside", [True, False])
def test_works_in_and_across_inference_mode(target: Any, inside: bool) -> None:
    with torch.inference_mode(inside):
        pool = pool_of(target)
        pool.sync([(1, "a", [1, 2])])
    with torch.inference_mode(not inside):
        pool.sync([(1, "a", [1, 2, 3])])
        pool.fork(1, 2, 2)
        pool.truncate([1], [1])
        assert pool.verify([(1, "a", [1])]).drain() == []
        assert rows_of(pool) == {1: [1], 2: [1, 2]}


# ---- sync ------------------------------------------------------------------------------------


def test_a_decode_step_sends_one_token_a_request(target: Any) -> None:
    pool = pool_of(target, 6, 64)
    seqs = {f"r{row}": [row * 100 + i for i in range(row)] for row in range(1, 6)}
    requests = [(int(name[1]), name, tokens) for name, tokens in seqs.items()]
    sent = pool.sync(requests)
    assert (sent.num_tokens, sent.num_rewritten) == (15, 0)
    for step in range(40):  # tails grow, and are cut back
        for tokens in seqs.values():
            tokens.append(1000 + step)
        sent = pool.sync(requests)
        assert (sent.num_tokens, sent.num_rewritten) == (5, 0)
        assert sent.num_bytes < 1024
    assert rows_of(pool) == {row: seqs[f"r{row}"] for row in range(1, 6)}
    sent = pool.sync(requests)
    assert (sent.num_tokens, sent.num_bytes) == (0, 0)
    assert pool.sync([]).num_tokens == 0


def test_a_row_that_another_request_took_over_is_sent_whole(target: Any) -> None:
    pool = pool_of(target)
    pool.sync([(1, "old", [1, 2, 3])])
    sent = pool.sync([(1, "new", [1, 2, 3, 4])])  # the same beginning, by chance
    assert (sent.num_tokens, sent.num_rewritten) == (4, 1)
    pool.release([1])
    sent = pool.sync([(1, "new", [1, 2, 3, 4])])
    assert (sent.num_tokens, sent.num_rewritten) == (4, 0), "a released row is nobody's"


def test_a_shorter_sequence_is_truncated(target: Any) -> None:
    pool = pool_of(target)
    pool.sync([(1, "a", [1, 2, 3, 4, 5]), (2, "b", [6, 7])])
    assert pool.sync([(1, "a", [1, 2]), (2, "b", [6, 7])]).num_tokens == 0
    assert rows_of(pool) == {1: [1, 2], 2: [6, 7]}
    assert pool.sync([(1, "a", [1, 2, 9])]).num_tokens == 1
    assert pool.sync([(1, "a", [])]).num_tokens == 0
    assert rows_of(pool) == {2: [6, 7]}


def test_a_sequence_that_is_cut_deeper_than_the_tail_is_sent_whole(target: Any) -> None:
    pool = pool_of(target, tail=2)
    pool.sync([(1, "a", [1, 2, 3, 4, 5])])
    sent = pool.sync([(1, "a", [1, 2, 3])])
    assert (sent.num_tokens, sent.num_rewritten) == (3, 1)


@pytest.mark.parametrize("back", [1, 2, 3])
def test_a_rewritten_tail_is_found(target: Any, back: int) -> None:
    pool = pool_of(target, tail=3)
    tokens = [1, 2, 3, 4, 5, 6]
    pool.sync([(1, "a", tokens), (2, "b", [7])])
    tokens[-back] = 99
    tokens.append(8)
    sent = pool.sync([(1, "a", tokens), (2, "b", [7])])
    assert (sent.num_tokens, sent.num_rewritten) == (7, 1)
    assert rows_of(pool)[1] == tokens


def test_a_change_further_back_is_seen_by_verify_and_by_a_whole_tail(target: Any) -> None:
    pool, thorough = pool_of(target, tail=3), pool_of(target, tail=None)
    tokens = [1, 2, 3, 4, 5, 6]
    for each in (pool, thorough):
        each.sync([(1, "a", tokens)])
    tokens[1] = 99
    assert pool.sync([(1, "a", tokens)]).num_tokens == 0
    assert thorough.sync([(1, "a", tokens)]).num_tokens == 6
    [violation] = pool.verify([(1, "a", tokens)]).drain()
    assert str(violation) == "token at request 0 (id 'a'), row 1, column 1: expected 99, found 2"
    assert thorough.verify([(1, "a", tokens)]).drain() == []


def test_a_fork_goes_on_where_it_was_cut(target: Any) -> None:
    pool = pool_of(target)
    pool.sync([(1, "a", [1, 2, 3, 4])])
    pool.fork(1, 2, 3)
    assert pool.sync([(1, "a", [1, 2, 3, 4]), (2, "b", [1, 2, 3, 9])]).num_tokens == 1
    pool.fork(1, 3, 3)
    assert pool.sync([(3, "c", [1, 2, 8, 9])]).num_tokens == 4, "it was not of that prompt"
    assert rows_of(pool) == {1: [1, 2, 3, 4], 2: [1, 2, 3, 9], 3: [1, 2, 8, 9]}


def test_a_tail_that_was_cut_is_whole_again_after_a_sync(target: Any) -> None:
    pool, tokens = pool_of(target, tail=4), [1, 2, 3, 4, 5, 6]
    pool.sync([(1, "a", tokens)])
    pool.truncate([1], [5])
    tokens[5:] = [7]
    assert pool.sync([(1, "a", tokens)]).num_tokens == 1
    tokens[2] = 99
    assert pool.sync([(1, "a", tokens)]).num_tokens == 6


def test_rows_that_came_in_batches_are_sent_whole_once(target: Any) -> None:
    pool = pool_of(target)
    pool.write(target.batch([[1, 2], []], [1, 2]))
    assert pool.sync([(1, "a", [1, 2, 3]), (2, "b", [4])]).num_tokens == 4
    pool.append(target.batch([[5]], [2], prefix_lens=[1]))
    assert pool.sync([(1, "a", [1, 2, 3, 6]), (2, "b", [4, 5])]).num_tokens == 3
    assert rows_of(pool) == {1: [1, 2, 3, 6], 2: [4, 5]}


@pytest.mark.parametrize(
    "make",
    [tuple, lambda t: array.array("q", t), np.array, torch.tensor],
    ids=["tuple", "array", "numpy", "tensor"],
)
def test_sequences_of_every_kind_are_compared(target: Any, make: Any) -> None:
    pool = pool_of(target, tail=2)
    assert pool.sync([(1, "a", make([1, 2, 3])), (2, "b", [4])]).num_tokens == 4
    assert pool.sync([(1, "a", make([1, 2, 3, 5])), (2, "b", [4, 6])]).num_tokens == 2
    assert pool.sync([(1, "a", make([1, 2, 9, 5])), (2, "b", [4, 6])]).num_tokens == 4
    assert rows_of(pool) == {1: [1, 2, 9, 5], 2: [4, 6]}


# ---- refusals --------------------------------------------------------------------------------


def refusals(target: Any, pool: TokenPool) -> dict[str, tuple[Any, type[RaggedError], str]]:
    """Calls on a pool whose row 1 holds [1, 2, 3] for "a" and row 2 [4] for "b"; what each raises and says."""

    def batch(*arguments: Any, **options: Any) -> RaggedBatch:
        made: RaggedBatch = target.batch(*arguments, **options)
        return made

    value, kind = RaggedValueError, RaggedTypeError
    return {
        "append_behind_a_gap": (
            lambda: pool.append(batch([[5], [6]], [2, 1], prefix_lens=[1, 4], req_ids=["b", "a"])),
            value,
            "prefix_lens must be 3, the valid_len of row 1, got 4 at request 1 (id 'a')",
        ),
        "write_at_a_prefix": (
            lambda: pool.write(batch([[5]], [2], prefix_lens=[1])),
            value,
            "prefix_lens must be 0, the start of row 2, got 1 at request 0",
        ),
        "tokens_for_the_padding_row": (
            lambda: pool.write(batch([[5]], [0])),
            value,
            "req_pool_indices must not be padding_row 0 for a request with tokens, got 0 at request 0",
        ),
        "an_empty_request_on_a_row_in_use": (
            lambda: pool.write(batch([[5], []], [1, 1])),
            value,
            "req_pool_indices must be unique among requests with tokens, got 1 at both request 0 and request 1",
        ),
        "a_row_outside": (
            lambda: pool.append(batch([[5]], [6])),
            value,
            "req_pool_indices must be below max_reqs 6, got 6 at request 0",
        ),
        "no_batch": (lambda: pool.write([[1]]), kind, "kv-canary: batch must be a RaggedBatch, got list"),
        "truncate_longer": (
            lambda: pool.truncate([2, 1], [1, 4]),
            value,
            "lens must be in [0, 3], the valid_len of row 1, got 4 at request 1",
        ),
        "truncate_negative": (
            lambda: pool.truncate([1], [-1]),
            value,
            "lens must be in [0, 3], the valid_len of row 1, got -1 at request 0",
        ),
        "truncate_uneven": (
            lambda: pool.truncate([1, 2], [1]),
            value,
            "kv-canary: lens length 1 != number of rows (2)",
        ),
        "release_twice": (
            lambda: pool.release([1, 2, 1]),
            value,
            "req_pool_indices must be unique among requests with tokens, got 1 at both request 0 and request 2",
        ),
        "release_outside": (
            lambda: pool.release([1, -1]),
            value,
            "req_pool_indices must not be negative, got -1 at request 1",
        ),
        "fork_longer": (
            lambda: pool.fork(1, 3, 4),
            value,
            "length must be at most valid_len 3 of src_row 1, got 4",
        ),
        "fork_onto_itself": (lambda: pool.fork(1, 1, 2), value, "dst_row must not be src_row 1"),
        "fork_onto_padding": (
            lambda: pool.fork(1, 0, 2),
            value,
            "req_pool_indices must not be padding_row 0 for a request with tokens, got 0 at request 0",
        ),
        "sync_a_float": (
            lambda: pool.sync([(1, "a", [1, 2, 3, 5]), (2, "b", [4, 0.5])]),
            kind,
            "token_ids must be integers, got float 0.5 at request 1 (id 'b'), position 0",
        ),
        "sync_a_negative_token": (
            lambda: pool.sync([(1, "a", [1, 2, 3, 5]), (2, "b", [4, -1])]),
            value,
            "token_ids must not be negative, got -1 at request 1 (id 'b'), position 0",
        ),
        "sync_too_long": (
            lambda: pool.sync([(2, "b", [4]), (1, "a", [1, 2, 3, *range(10)])]),
            value,
            "prefix_lens (3) plus length (10) must not exceed max_context_len 12, got 13 at request 1 (id 'a')",
        ),
        "sync_two_on_a_row": (
            lambda: pool.sync([(1, "a", [1, 2, 3, 5]), (1, "b", [4])]),
            value,
            "req_pool_indices must be unique among requests with tokens, got 1 at both request 0 (id 'a') and "
            "request 1 (id 'b')",
        ),
        "sync_outside": (
            lambda: pool.sync([(1, "a", [1, 2, 3, 5]), (6, "c", [4])]),
            value,
            "req_pool_indices must be below max_reqs 6, got 6 at request 1 (id 'c')",
        ),
        "sync_a_bool_as_row": (lambda: pool.sync([(True, "a", [1, 2, 3, 5]), (2, "b", [4])]), kind, "req_pool_indices"),
        "sync_no_triple": (
            lambda: pool.sync([(1, [1, 2])]),
            kind,
            "requests must be (row, req_id, token sequence) each",
        ),
        "sync_no_sequence": (
            lambda: pool.sync([(1, "a", {1: 2})]),
            kind,
            "token_ids of request 0 (id 'a') must be a sequence on the host, got dict",
        ),
        "report_of_another_kind": (
            lambda: pool.sync([(1, "a", [1, 2, 3, 5])], report=pool),  # type: ignore[arg-type]
            kind,
            "report must be a GuardReport, got TokenPool",
        ),
    }


NAMES = list(refusals(None, None))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_a_refusal_says_why_and_changes_nothing(target: Any, name: str) -> None:
    pool = pool_of(target)
    pool.sync([(1, "a", [1, 2, 3]), (2, "b", [4])])
    before = state_of(pool)
    call, kind, text = refusals(target, pool)[name]
    with pytest.raises(kind) as caught:
        call()
    assert text in str(caught.value)
    assert state_of(pool) == before
    # What the host knows of the tails is as before too: the next step sends one token each.
    assert pool.sync([(1, "a", [1, 2, 3, 5]), (2, "b", [4, 6])]).num_tokens == 2
    assert pool.verify([(1, "a", [1, 2, 3, 5]), (2, "b", [4, 6])]).drain() == []


@pytest.mark.parametrize(
    ("tokens", "kind", "text"),
    [
        ([[1]], RaggedTypeError, "kv-canary: tokens must be a tensor, got list"),
        (torch.zeros(4, dtype=torch.int32), RaggedValueError, "kv-canary: tokens must be 2-D, got shape (4,)"),
        (torch.zeros(4, 4), RaggedTypeError, "kv-canary: tokens must be int32, got torch.float32"),
        (
            torch.zeros(4, 4, dtype=torch.int32).t()[:, :2],
            RaggedValueError,
            "kv-canary: tokens must have a last stride",
        ),
    ],
    ids=["list", "vector", "float", "transposed"],
)
def test_only_a_table_is_adopted(tokens: Any, kind: type[RaggedError], text: str) -> None:
    with pytest.raises(kind) as caught:
        TokenPool.adopt(tokens)
    assert str(caught.value).startswith(text)


def test_options_are_checked_when_the_pool_is_made() -> None:
    with pytest.raises(RaggedValueError, match="tail must be at least 1, got 0"):
        TokenPool.allocate(2, 2, device="cpu", tail=0)
    with pytest.raises(RaggedTypeError, match="vocab_size"):
        TokenPool.allocate(2, 2, device="cpu", vocab_size="many")  # type: ignore[arg-type]
    with pytest.raises(RaggedValueError, match="max_reqs must be at least 0"):
        TokenPool.allocate(-1, 2, device="cpu")


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (1, 1)])
def test_pools_without_room_refuse_and_verify_nothing(target: Any, shape: tuple[int, int]) -> None:
    pool = pool_of(target, *shape)
    assert pool.sync([]).num_tokens == 0
    pool.release([])
    pool.truncate([], [])
    assert pool.verify([]).drain() == []
    with pytest.raises(RaggedError):
        pool.sync([(0, "a", [1])])


def test_placeholders_are_taken_where_they_are_allowed_and_never_compared(target: Any) -> None:
    pool = pool_of(target, allow_placeholders=True)
    pool.sync([(1, "a", [1, -1, 3])])
    log = pool.verify([(1, "a", [1, 2, -1])])
    assert (log.drain(), log.compared()) == ([], 1)
    with pytest.raises(CanaryViolation, match=r"token at request 0 \(id 'a'\), row 1, column 0: expected 9, found 1"):
        pool.verify([(1, "a", [9, 2, 3])]).raise_if_any()


@pytest.mark.gpu
def test_no_call_waits_for_the_device() -> None:
    pool = TokenPool.allocate(6, 64, device="cuda")
    log = pool.verify([(1, "a", [])])
    batches = [
        RaggedBatch.from_sequences([[1, 2], [3]], req_pool_indices=[1, 2], device="cuda"),
        RaggedBatch.from_sequences([[4], [5]], req_pool_indices=[1, 2], prefix_lens=[2, 1], device="cuda"),
    ]
    tokens = [1, 2, 4]
    for warm in (True, False):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("default" if warm else "error")
        try:
            pool.write(batches[0])
            pool.append(batches[1])
            for step in range(4):
                tokens.append(step)
                pool.sync([(1, "a", tokens)])
            pool.truncate([1], [2])
            pool.fork(1, 3, 2)
            pool.verify(batches[0], report=log)
            pool.verify([(2, "b", [3, 5])], report=log)
            log.poll()
            pool.release([1, 2, 3])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        del tokens[3:]
    assert rows_of(pool) == {}


def test_a_sync_of_nobody_after_one_of_lists_is_of_nobody(target: Any) -> None:
    # Entries that may change are not known again; neither are they, by that, the same as none.
    pool = TokenPool.allocate(4, 8, device=target.device, backend=target.backend)
    tokens = [11, 12]
    assert pool.sync([[1, "chat", tokens]]).num_tokens == 2
    tokens.append(13)
    assert pool.sync([]).num_tokens == 0
    assert pool.host_valid_lens.tolist() == pool.valid_lens.tolist() == [0, 2, 0, 0]


def test_entries_that_changed_since_are_read_anew(target: Any) -> None:
    pool = TokenPool.allocate(4, 8, device=target.device, backend=target.backend)
    entry = [1, "chat", [11, 12]]
    pool.sync([entry])
    entry[:] = [2, "other", [21]]
    assert pool.sync([entry]).num_tokens == 1
    assert pool.tokens[1:3, :2].tolist() == [[11, 12], [21, -2]]
