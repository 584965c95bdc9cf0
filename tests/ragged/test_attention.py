"""Metadata for attention kernels, against loops over requests and positions."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragged import RaggedBatch, RaggedTypeError, RaggedValueError
from ragged.attention import AttentionMetadata
from tests.strategies import Model, models

PAGES = 12
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def build(model: Model, device: str) -> RaggedBatch:
    return RaggedBatch.from_sequences(
        model.sequences, req_pool_indices=model.rows, prefix_lens=model.prefix_lens, device=device
    )


@pytest.mark.parametrize("device", DEVICES)
@given(
    model=models(max_len=9, max_row=9, max_prefix_len=8), page_size=st.sampled_from([1, 2, 5]), seed=st.integers(0, 9)
)
def test_a_table_of_pages_says_what_a_loop_says(device: str, model: Model, page_size: int, seed: int) -> None:
    table = np.random.default_rng(seed).integers(0, 99, (10, 20), dtype=np.int32)
    found = AttentionMetadata.from_block_table(build(model, device), torch.from_numpy(table).to(device), page_size)
    ends = [prefix + len(tokens) for prefix, tokens in zip(model.prefix_lens, model.sequences, strict=True)]
    slots, pages, indptr = [], [], [0]
    for row, prefix, end in zip(model.rows, model.prefix_lens, ends, strict=True):
        for position in range(prefix, end):
            slots.append(int(table[row, position // page_size]) * page_size + position % page_size)
        used = -(-end // page_size)
        pages += table[row, :used].tolist()
        indptr.append(indptr[-1] + used)
    assert found.slot_mapping.tolist() == slots
    assert (found.kv_indices.tolist(), found.kv_indptr.tolist()) == (pages, indptr)
    assert found.kv_last_page_len.tolist() == [
        end - (-(-end // page_size) - 1) * page_size if end else 0 for end in ends
    ]
    assert found.seq_lens.tolist() == ends
    assert found.block_table is not None
    assert found.block_table.tolist() == [table[row].tolist() for row in model.rows]
    assert found.query_start_loc.tolist() == np.cumsum([0, *map(len, model.sequences)]).tolist()
    owned = [
        (r, p) for r, (prefix, end) in enumerate(zip(model.prefix_lens, ends, strict=True)) for p in range(prefix, end)
    ]
    assert list(zip(found.req_ids.tolist(), found.positions.tolist(), strict=True)) == owned
    int32 = (found.query_start_loc, found.seq_lens, found.kv_indptr, found.kv_indices, found.kv_last_page_len)
    assert {tensor.dtype for tensor in int32} == {torch.int32}


@pytest.mark.parametrize("device", DEVICES)
@given(model=models(max_len=9, max_row=9, max_prefix_len=8), page_size=st.sampled_from([1, 4]))
def test_a_table_of_slots_says_the_same_as_the_pages_that_it_came_from(
    device: str, model: Model, page_size: int
) -> None:
    pages = torch.randperm(100, dtype=torch.int32)[:50].reshape(10, 5).repeat_interleave(4 // page_size, 1)[:, :20]
    slots = (pages[:, :, None] * page_size + torch.arange(page_size, dtype=torch.int32)).reshape(10, -1)
    batch = build(model, device)
    by_slot = AttentionMetadata.from_req_to_token(batch, slots.to(device), page_size)
    by_page = AttentionMetadata.from_block_table(batch, pages.to(device), page_size)
    for name in ("slot_mapping", "kv_indptr", "kv_indices", "kv_last_page_len", "seq_lens"):
        assert torch.equal(getattr(by_slot, name), getattr(by_page, name)), name
    assert by_slot.block_table is None


@pytest.mark.parametrize(
    ("table", "error", "text"),
    [
        (torch.zeros(4, dtype=torch.int32), RaggedValueError, "block_table must be 2-D, got shape (4,)"),
        (torch.zeros(4, 4), RaggedTypeError, "block_table must be int32, got torch.float32"),
        (
            torch.zeros(2, 4, dtype=torch.int32),
            RaggedValueError,
            "req_pool_indices must be below max_reqs 2, got 3 at request 0",
        ),
        (
            torch.zeros(4, 1, dtype=torch.int32),
            RaggedValueError,
            "prefix_lens must not exceed max_context_len 2, got 4 at request 0",
        ),
    ],
    ids=["dimensions", "dtype", "row", "length"],
)
def test_a_table_that_does_not_fit_is_refused(table: torch.Tensor, error: Any, text: str) -> None:
    batch = RaggedBatch.from_sequences([[5]], req_pool_indices=[3], prefix_lens=[4])
    with pytest.raises(error) as caught:
        AttentionMetadata.from_block_table(batch, table, page_size=2)
    assert str(caught.value) == text


def test_a_truncated_batch_has_no_slots_beyond_its_table(refused: Any) -> None:
    batch = RaggedBatch.from_sequences([[5, 6, 7]], req_pool_indices=[0], pool_shape=(1, 2), overflow="truncate")
    text = "block_table has room for 2 positions, got a request that ends at 3"
    with refused(RaggedValueError, text, argument="block_table", got=3, bound=2):
        AttentionMetadata.from_block_table(batch, torch.zeros(1, 2, dtype=torch.int32), page_size=1)


@pytest.mark.gpu
def test_none_of_it_waits_for_the_device(no_sync: Any) -> None:
    batch = build(Model.of_lengths([3, 0, 5]), "cuda")
    table = torch.zeros(8, 8, dtype=torch.int32, device="cuda")
    with no_sync():
        AttentionMetadata.from_block_table(batch, table, page_size=4)
        AttentionMetadata.from_req_to_token(batch, table)
