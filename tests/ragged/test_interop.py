"""To and from torch.nested, padded tensors and DLPack."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import Model, models

from ragged import Coercion, RaggedBatch, RaggedOverflowError, RaggedTypeError, RaggedValueError


def batch_of(model: Model, **options: Any) -> RaggedBatch:
    return RaggedBatch.from_sequences(
        model.sequences, req_pool_indices=model.rows, prefix_lens=model.prefix_lens, **options
    )


def plain(*lengths: int) -> RaggedBatch:
    return batch_of(Model.of_lengths(list(lengths)))


@given(models(), st.sampled_from([0, -1, -(2**63), 2**63 - 1]))
def test_padded_is_each_requests_tokens_and_then_the_value(model: Model, value: int) -> None:
    padded = batch_of(model).to_padded(value)
    assert padded.dtype == torch.int64
    assert padded.shape == (len(model.requests), max(model.lengths, default=0))
    assert padded.tolist() == model.padded(value)


def test_padded_is_new_memory() -> None:
    batch = plain(2, 1)
    batch.to_padded(0).fill_(9)
    assert 9 not in batch.token_ids.tolist()


@pytest.mark.parametrize("value", [1.5, None, "0", True, torch.tensor(0)], ids=repr)
def test_the_padding_value_is_an_integer(refused: Any, value: Any) -> None:
    # torch.full takes 1.5 for int64 and makes it 1.
    text = f"value must be an int, got {type(value).__name__} {value!r}"
    with refused(RaggedTypeError, text, argument="value", got=value):
        plain(2, 1).to_padded(value)


def test_the_padding_value_fits_int64(refused: Any) -> None:
    text = f"value must fit int64, got {2**63}"
    with refused(RaggedOverflowError, text, argument="value", got=2**63, bound=2**63 - 1):
        plain(2, 1).to_padded(2**63)


@given(models())
def test_unbind_is_each_requests_own_tokens_as_views(model: Model) -> None:
    batch = batch_of(model)
    parts = batch.unbind()
    assert [part.tolist() for part in parts] == model.sequences
    assert all(part.untyped_storage().data_ptr() == batch.packed.untyped_storage().data_ptr() for part in parts)


@given(models())
def test_nested_has_the_same_requests_over_the_same_memory(model: Model) -> None:
    batch = batch_of(model)
    if not model.requests:
        return
    nested = batch.to_nested()
    assert nested.is_nested
    assert nested.layout == torch.jagged
    assert [part.tolist() for part in nested.unbind()] == model.sequences
    assert nested.values().data_ptr() == batch.token_ids.data_ptr()


@pytest.mark.parametrize(("lengths", "shape"), [([1, 3], (2, 3)), ([0, 0], (2, 0)), ([0, 2, 0], (3, 2))], ids=str)
def test_torch_pads_what_we_hand_it(lengths: list[int], shape: tuple[int, int]) -> None:
    # Case 45.
    batch = plain(*lengths)
    padded = batch.to_nested().to_padded_tensor(0)
    assert tuple(padded.shape) == shape
    assert padded.tolist() == batch.to_padded(0).tolist()


def test_nested_of_zero_requests_is_one_clear_refusal(refused: Any) -> None:
    # Case 45: torch cannot build one.
    text = "torch.nested cannot hold a batch of zero requests"
    with refused(RaggedValueError, text, argument="num_reqs", got=0, bound=1):
        plain().to_nested()


@given(models(max_prefix_len=0))
def test_there_and_back_is_the_same_batch(model: Model) -> None:
    if not model.requests:
        return
    batch = batch_of(model)
    back = RaggedBatch.from_nested(batch.to_nested(), req_pool_indices=model.rows, prefix_lens=model.prefix_lens)
    assert back.layout == batch.layout
    assert torch.equal(back.packed, batch.packed)
    assert back.packed.data_ptr() != batch.packed.data_ptr()


def jagged(values: Any, offsets: Any) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def test_nested_with_int32_offsets_is_refused_strictly_and_exact_when_coerced() -> None:
    # Case 45.
    nested = jagged(torch.tensor([5, 6, 7]), torch.tensor([0, 1, 3], dtype=torch.int32))
    with pytest.raises(RaggedTypeError, match=r"^offsets must be int64, got torch\.int32"):
        RaggedBatch.from_nested(nested, req_pool_indices=[1, 2])
    batch = RaggedBatch.from_nested(nested, req_pool_indices=[1, 2], mode="coerce")
    assert [part.tolist() for part in batch.unbind()] == [[5], [6, 7]]
    assert batch.coercions == (Coercion("offsets", "int32", "int64", 24),)


@pytest.mark.parametrize(
    "value",
    [torch.tensor([[5]]), [torch.tensor([5])], None, np.array([5])],
    ids=["dense", "list", "None", "numpy"],
)
def test_what_is_not_jagged_is_refused(refused: Any, value: Any) -> None:
    name = type(value).__name__
    text = f"nested must be a jagged torch.nested tensor, got {name}"
    with refused(RaggedTypeError, text, argument="nested", got=name):
        RaggedBatch.from_nested(value, req_pool_indices=[1])


def test_nested_of_more_than_tokens_is_refused(refused: Any) -> None:
    nested = jagged(torch.zeros(3, 2, dtype=torch.int64), torch.tensor([0, 1, 3]))
    with refused(
        RaggedValueError, "token_ids must be 1-D, got shape (3, 2)", argument="token_ids", got=(3, 2), bound=1
    ):
        RaggedBatch.from_nested(nested, req_pool_indices=[1, 2])


def test_nested_with_holes_is_refused_and_says_how_to_mend_it(refused: Any) -> None:
    table = torch.arange(10).reshape(2, 5)
    nested = torch.nested.narrow(table, 1, torch.tensor([0, 1]), torch.tensor([2, 3]), layout=torch.jagged)
    with refused(
        RaggedValueError,
        "nested must have no holes: it was made by narrow and has lengths of its own",
        argument="nested",
        note="call .contiguous() on it",
    ):
        RaggedBatch.from_nested(nested, req_pool_indices=[1, 2])
    batch = RaggedBatch.from_nested(nested.contiguous(), req_pool_indices=[1, 2])
    assert [part.tolist() for part in batch.unbind()] == [[0, 1], [6, 7, 8]]


def test_a_batch_goes_out_through_dlpack_without_a_copy() -> None:
    batch = plain(2, 0, 1)
    for name in ("token_ids", "offsets", "req_pool_indices", "prefix_lens"):
        tensor = getattr(batch, name)
        out = np.from_dlpack(tensor)
        assert out.ctypes.data == tensor.data_ptr()
        assert out.tolist() == tensor.tolist()
