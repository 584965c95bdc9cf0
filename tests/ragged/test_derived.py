"""Metadata derived on the device, held to lists of requests."""

from typing import Any

import pytest
import torch
from hypothesis import given
from strategies import Model, models

from ragged import RaggedOverflowError, derived

INT32_MAX = 2**31 - 1


def column(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@given(models())
def test_derived_metadata_is_what_the_list_of_requests_says(model: Model) -> None:
    offsets, num_tokens = column(model.offsets), len(model.token_ids)
    found = {
        "cu_seqlens": derived.cu_seqlens(offsets, num_tokens),
        "req_ids": derived.req_ids(offsets, num_tokens),
        "last_token_indices": derived.last_token_indices(offsets),
    }
    found["positions"] = derived.positions(offsets, column(model.prefix_lens), found["req_ids"])
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "cu_seqlens": model.offsets,
        "req_ids": model.req_ids,
        "last_token_indices": model.last_token_indices,
        "positions": model.positions,
    }
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "cu_seqlens": torch.int32,
        "req_ids": torch.int64,
        "last_token_indices": torch.int64,
        "positions": torch.int64,
    }


@pytest.mark.parametrize(
    ("lengths", "req_ids", "last"),
    [
        ([2, 0, 3], [0, 0, 2, 2, 2], [1, -1, 4]),  # fla's version says 0 0 1 1 1
        ([0, 0, 1], [2], [-1, -1, 0]),
        ([1, 0, 0], [0], [0, -1, -1]),
        ([0], [], [-1]),
        ([], [], []),
    ],
    ids=str,
)
def test_an_empty_request_owns_no_token_and_its_last_is_nobodys(
    lengths: list[int], req_ids: list[int], last: list[int]
) -> None:
    offsets = column([sum(lengths[:request]) for request in range(len(lengths) + 1)])
    assert derived.req_ids(offsets, sum(lengths)).tolist() == req_ids
    assert derived.last_token_indices(offsets).tolist() == last


@pytest.mark.parametrize("block", [16, 64, 128, 1024])
def test_empties_around_the_block_sizes_of_kernels(block: int) -> None:
    # Case 23.
    for lengths in ([block - 1, 0, 1, 0, 0, block], [0, block, 0], [block, 0, block], [0] * 600 + [1]):
        model = Model.of_lengths(lengths)
        offsets = column(model.offsets)
        assert derived.req_ids(offsets, sum(lengths)).tolist() == model.req_ids
        assert derived.last_token_indices(offsets).tolist() == model.last_token_indices


def test_int32_cumulative_lengths_reach_to_the_last_int32_and_no_further(refused: Any) -> None:
    # Case 5 and 17.
    fits = derived.cu_seqlens(column([0, INT32_MAX]), INT32_MAX)
    assert (fits.tolist(), fits.dtype) == ([0, INT32_MAX], torch.int32)
    with refused(
        RaggedOverflowError,
        f"cu_seqlens must fit int32, got num_tokens {INT32_MAX + 2}",
        argument="cu_seqlens",
        got=INT32_MAX + 2,
        bound=INT32_MAX,
        note="use offsets, which are int64, or split the batch",
    ):
        derived.cu_seqlens(column([0, INT32_MAX, INT32_MAX + 2]), INT32_MAX + 2)
