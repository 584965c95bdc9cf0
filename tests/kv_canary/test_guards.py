"""The host guards of ``scatter``: what a pool must be for a batch; and that none of them reads an element."""

from typing import Any

import pytest
import torch

from kv_canary import guards, scatter
from ragged import RaggedBatch, RaggedError, RaggedTypeError, RaggedValueError

SAYS = "kv-canary: scatter_req_token_ids "


def _batch(**options: Any) -> RaggedBatch:
    return RaggedBatch.from_sequences([[10, 11], [20]], req_pool_indices=[3, 1], req_ids=["a", "b"], **options)


def _pool(*shape: int, **options: Any) -> torch.Tensor:
    return torch.full(shape or (4, 5), -7, **{"dtype": torch.int32, **options})


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize(
    ("make", "kind", "text", "parts"),
    [
        pytest.param(
            lambda: [[0]], RaggedTypeError, "pool_out must be a tensor, got list", {"got": "list"}, id="no_tensor"
        ),
        pytest.param(
            lambda: _pool(20),
            RaggedValueError,
            "pool_out must be 2-D, got shape (20,)",
            {"got": (20,), "bound": 2},
            id="dimension",
        ),
        pytest.param(
            lambda: _pool(dtype=torch.int64),
            RaggedTypeError,
            "pool_out must be int32, got torch.int64",
            {"got": "torch.int64", "bound": "int32"},
            id="dtype",
        ),
        pytest.param(
            lambda: _pool(5, 4).t(),
            RaggedValueError,
            "pool_out must have a last stride of 1 and a row stride of at least 5, got strides (1, 4)",
            {"got": (1, 4), "bound": (5, 1)},
            id="transposed",
        ),
        pytest.param(
            lambda: _pool(1, 5).expand(4, 5),
            RaggedValueError,
            "pool_out must have a last stride of 1 and a row stride of at least 5, got strides (0, 1)",
            {"got": (0, 1), "bound": (5, 1)},
            id="expanded",
        ),
        pytest.param(
            lambda: _pool(device="meta"),
            RaggedValueError,
            "pool_out is on meta, the batch is on cpu",
            {"got": "meta", "bound": "cpu"},
            id="device",
        ),
        pytest.param(
            lambda: _pool().to_sparse_csr(),
            RaggedTypeError,
            "pool_out must be a dense tensor, got layout torch.sparse_csr",
            {"got": "torch.sparse_csr", "bound": "torch.strided"},
            id="sparse",
        ),
        pytest.param(
            lambda: torch.nested.nested_tensor([[1.0]]),
            RaggedTypeError,
            "pool_out must be a dense tensor, got layout torch.nested",
            {"got": "torch.nested", "bound": "torch.strided"},
            id="nested",
        ),
    ],
)
def test_a_pool_that_is_no_table_is_refused_every_time(
    refused: Any, make: Any, kind: type[RaggedError], text: str, parts: dict[str, Any]
) -> None:
    for _ in range(2):  # what was accepted is remembered; what was refused is not
        pool = make()
        with refused(kind, SAYS + text, argument="pool_out", **parts):
            scatter(_batch(), pool)
        if isinstance(pool, torch.Tensor) and pool.layout is torch.strided and pool.device.type == "cpu":
            assert pool.is_nested or bool((pool == -7).all())


def test_what_is_no_batch_is_refused(refused: Any) -> None:
    with refused(RaggedTypeError, SAYS + "batch must be a RaggedBatch, got list", argument="batch"):
        scatter([[1]], _pool())  # type: ignore[arg-type]


def test_what_is_no_report_is_refused_before_anything_is_written(refused: Any) -> None:
    pool = _pool()
    with refused(RaggedTypeError, SAYS + "report must be a GuardReport, got Tensor", argument="report", got="Tensor"):
        scatter(_batch(), pool, report=torch.zeros(5, 5, dtype=torch.int64))  # type: ignore[arg-type]
    assert bool((pool == -7).all())


# Cases 9, 11: what the host can see, it refuses, naming request, id, value and bound.
@pytest.mark.parametrize("overflow", ["raise", "truncate"])
def test_a_row_beyond_the_pool_is_refused_on_the_host(refused: Any, overflow: str) -> None:
    whole = _pool(5, 5)
    with refused(
        RaggedValueError,
        "req_pool_indices must be below max_reqs 3, got 3 at request 0 (id 'a')",
        argument="req_pool_indices",
        request=0,
        req_id="a",
        got=3,
        bound=3,
    ):
        scatter(_batch(overflow=overflow), whole[:3])
    assert bool((whole == -7).all())


# Case 43, under both policies.
@pytest.mark.parametrize(
    ("prefix_len", "length", "written", "dropped", "text", "parts"),
    [
        pytest.param(
            14,
            3,
            2,
            1,
            "prefix_lens (14) plus length (3) must not exceed max_context_len 16, got 17",
            {"got": 17},
            id="one_past_the_end",
        ),
        pytest.param(
            16,
            2,
            0,
            2,
            "prefix_lens (16) plus length (2) must not exceed max_context_len 16, got 18",
            {"got": 18},
            id="no_room",
        ),
        pytest.param(
            0,
            20,
            16,
            4,
            "prefix_lens (0) plus length (20) must not exceed max_context_len 16, got 20",
            {"got": 20},
            id="longer_than_the_row",
        ),
    ],
)
def test_a_segment_beyond_the_row_is_refused_or_truncated(
    target: Any,
    counts: Any,
    refused: Any,
    prefix_len: int,
    length: int,
    written: int,
    dropped: int,
    text: str,
    parts: dict[str, Any],
) -> None:
    framed, report = target.framed(4, 16), target.report()
    tokens = [list(range(10, 10 + length))]
    batch = target.batch(tokens, [2], prefix_lens=[prefix_len])
    with refused(RaggedValueError, f"{text} at request 0", argument="prefix_lens", request=0, bound=16, **parts):
        target.scatter(batch, framed.pool, report)
    framed.assert_untouched()
    batch = target.batch(tokens, [2], prefix_lens=[prefix_len], overflow="truncate", pool_shape=(4, 16))
    assert batch.dropped_tokens == dropped
    target.scatter(batch, framed.pool, report)
    assert framed.rows()[2] == [-7] * prefix_len + tokens[0][:written] + [-7] * (16 - prefix_len - written)
    framed.assert_border_intact()
    assert report.counts() == counts(dropped=dropped)


# Case 43: a prefix beyond the row is corrupt under both policies, whatever its length.
@pytest.mark.parametrize("overflow", ["raise", "truncate"])
@pytest.mark.parametrize(("prefix_len", "length"), [(17, 0), (2**62, 2)], ids=["empty", "huge"])
def test_a_prefix_beyond_the_row_is_refused_under_both_policies(
    refused: Any, overflow: str, prefix_len: int, length: int
) -> None:
    batch = RaggedBatch.from_sequences(
        [[1] * length], req_pool_indices=[2], prefix_lens=[prefix_len], overflow=overflow
    )
    pool = _pool(4, 16)
    with refused(
        RaggedValueError,
        f"prefix_lens must not exceed max_context_len 16, got {prefix_len} at request 0",
        argument="prefix_lens",
        request=0,
        got=prefix_len,
        bound=16,
    ):
        scatter(batch, pool)
    assert bool((pool == -7).all())


def test_a_pool_inside_the_batchs_own_memory_is_refused() -> None:
    batch = _batch()
    pool = batch.packed.view(torch.int32)[:20].view(4, 5)
    before = batch.packed.clone()
    scatter(batch, _pool())  # a pool that looks alike was accepted before
    with pytest.raises(RaggedValueError) as caught:
        scatter(batch, pool)
    assert str(caught.value) == SAYS + "packed shares memory with pool_out"
    assert torch.equal(batch.packed, before)


def test_a_pool_inside_tokens_that_came_in_on_the_device_is_refused() -> None:
    # They are a buffer of their own; made by hand here, so that it needs no device.
    batch = _batch()
    header, token_ids = batch.packed[:-3], torch.tensor([10, 11, 20] + [0] * 20)
    batch = RaggedBatch(batch.layout, header, token_ids[:3])
    scatter(batch, token_ids[3:].view(torch.int32)[:20].view(4, 5))  # beside them
    assert token_ids[:3].tolist() == [10, 11, 20]
    with pytest.raises(RaggedValueError) as caught:
        scatter(batch, token_ids.view(torch.int32)[:20].view(4, 5))
    assert str(caught.value) == SAYS + "token_ids shares memory with pool_out"
    assert token_ids[:3].tolist() == [10, 11, 20]


def test_what_was_accepted_is_forgotten_before_it_grows_without_end() -> None:
    for columns in range(5, 5 + guards.ACCEPTED_KEPT + 3):
        pool = _pool(4, columns)
        scatter(_batch(), pool)
        assert pool[3, :3].tolist() == [10, 11, -7]
    assert len(guards._accepted) <= guards.ACCEPTED_KEPT
    with pytest.raises(RaggedTypeError):
        scatter(_batch(), _pool(dtype=torch.int64))


# Case 21, without a device: elements of meta tensors cannot be read, and every guard is passed all the same.
def test_host_guards_read_no_element() -> None:
    arrays = {
        name: torch.zeros(shape, dtype=torch.int64, device="meta")
        for name, shape in (("flat_in", 3), ("offsets", 3), ("req_pool_indices", 2), ("prefix_lens", 2))
    }
    arrays["pool_out"] = torch.zeros(2, 2, dtype=torch.int32, device="meta")
    rules = [
        *guards.DIMENSIONS, *guards.PREFIX_DIMENSIONS, *guards.DTYPES, *guards.LENGTHS, *guards.PREFIX,
        *(rule for rule in (*guards.OURS, *guards.PREFIX_OURS) if type(rule).__name__ != "NoOverlap"),
    ]  # fmt: skip
    assert [rule.broken(arrays) for rule in rules] == [None] * len(rules)
