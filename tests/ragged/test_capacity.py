"""A builder of a fixed capacity: the same memory for every batch, padded, and nothing beyond it."""

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragged import Capacity, RaggedBatchBuilder, RaggedTypeError, RaggedValueError
from ragged.packing import static_tokens
from tests.strategies import Model, models

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MAX_REQS, MAX_TOKENS = 9, 80


def fill(builder: RaggedBatchBuilder, model: Model) -> Any:
    builder.extend(model.rows, model.sequences, prefix_lens=model.prefix_lens)
    return builder.build()


@pytest.mark.parametrize("device", DEVICES)
@given(contents=st.lists(models(max_reqs=MAX_REQS, max_len=8, min_row=1), min_size=2, max_size=4))
def test_every_batch_lies_in_the_same_memory_and_is_padded(device: str, contents: list[Model]) -> None:
    builder = RaggedBatchBuilder(device=device, capacity=Capacity(MAX_REQS, MAX_TOKENS), padding_row=0)
    addresses = set()
    for model in contents:
        batch = fill(builder, model)
        padded = MAX_REQS - len(model.rows)
        assert batch.num_reqs == MAX_REQS
        assert batch.token_ids.tolist() == [token for tokens in model.sequences for token in tokens]
        assert batch.offsets.tolist() == model.offsets + [model.offsets[-1]] * padded
        assert batch.req_pool_indices.tolist() == model.rows + [0] * padded
        assert batch.prefix_lens.tolist() == model.prefix_lens + [0] * padded
        assert len(batch.layout.tiles) == 0
        memory = static_tokens(batch.packed, batch.layout)
        assert memory.shape == (MAX_TOKENS,)
        addresses.add((batch.packed.data_ptr(), memory.data_ptr()))
    assert len(addresses) == 1


@pytest.mark.parametrize("device", DEVICES)
def test_what_exceeds_it_is_refused_before_anything_is_written(device: str, refused: Any) -> None:
    builder = RaggedBatchBuilder(device=device, capacity=Capacity(max_reqs=2, max_tokens=5))
    before = builder.build().packed.clone()
    builder.extend([1], [[5, 6, 7]])
    text = "num_tokens must not exceed the capacity's max_tokens 5, got 6"
    with refused(RaggedValueError, text, argument="num_tokens", got=6, bound=5):
        builder.extend([2], [[8, 9, 10]])
    with refused(RaggedValueError, text, argument="num_tokens", got=6, bound=5):
        builder.add(2, [8, 9], [10])
    text = "num_reqs must not exceed the capacity's max_reqs 2, got 3"
    with refused(RaggedValueError, text, argument="num_reqs", got=3, bound=2):
        builder.extend([2, 3], [[8], []])
    builder.add(2, [8, 9])
    with refused(RaggedValueError, text, argument="num_reqs", got=3, bound=2):
        builder.add(3, [])
    batch = builder.build()
    assert batch.packed[: len(before)].ne(before).any()
    assert [tokens.tolist() for tokens in batch.unbind()] == [[5, 6, 7], [8, 9]]


@pytest.mark.gpu
def test_tokens_that_come_in_on_the_device_go_into_the_same_memory() -> None:
    builder = RaggedBatchBuilder(device="cuda", capacity=Capacity(3, 10))
    first = builder.build().packed.data_ptr()
    builder.extend([1, 2], [torch.tensor([5, 6], device="cuda"), torch.tensor([7], device="cuda")])
    batch = builder.build()
    assert batch.packed.data_ptr() == first
    assert batch.device_tokens is None
    assert batch.token_ids.tolist() == [5, 6, 7]


# Case 70.
def test_a_copy_of_a_batch_carries_none_of_the_memory_that_it_does_not_use() -> None:
    builder = RaggedBatchBuilder(capacity=Capacity(8, 10**6))
    builder.extend([1, 2, 3], [[5], [6, 7], []])
    batch = builder.build()
    data = pickle.dumps(batch)
    assert len(data) < 10_000
    assert pickle.loads(data).token_ids.tolist() == [5, 6, 7]
    assert batch.select([1]).token_ids.tolist() == [6, 7]


def test_a_capacity_is_two_sizes(refused: Any) -> None:
    with refused(RaggedValueError, "max_reqs must be at least 0, got -1", argument="max_reqs", got=-1, bound=0):
        Capacity(-1, 5)
    text = "capacity must be a Capacity, got tuple"
    with refused(RaggedTypeError, text, argument="capacity", got="tuple"):
        RaggedBatchBuilder(capacity=(2, 5))  # type: ignore[arg-type]
