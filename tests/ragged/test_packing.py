"""The packed buffer: where each part starts, and what lies between."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import Model, models

from ragged import RaggedBatch, RaggedLayout
from ragged.header import ALIGNMENT, aligned, starts
from ragged.packing import addresses, starts_of, views

SIZES = [0, 1, 2, 14, 15, 16, 17, 31, 32, 33, 63, 64, 65, 511, 512, 513]
SKEWED = [200_000, *([1, 0] * 100)]


def layout_of(*lengths: int) -> RaggedLayout:
    return RaggedLayout(lengths=list(lengths), req_pool_indices=list(range(1, len(lengths) + 1)))


def test_a_part_starts_at_a_multiple_of_128_bytes() -> None:
    assert 8 * ALIGNMENT == 128


@pytest.mark.parametrize("number", SIZES)
def test_aligned_is_the_next_multiple(number: int) -> None:
    assert aligned(number) % ALIGNMENT == 0
    assert number <= aligned(number) < number + ALIGNMENT


@pytest.mark.parametrize("num_tiles", [0, 1, 8, 9])
@pytest.mark.parametrize("num_reqs", SIZES)
def test_every_part_starts_aligned_and_behind_the_one_before(num_reqs: int, num_tiles: int) -> None:
    at = starts(num_reqs, num_tiles)
    assert [start % ALIGNMENT for start in at] == [0] * len(at)
    sizes = [num_reqs + 1, num_reqs, num_reqs, 2 * num_tiles]
    ends = [start + size for start, size in zip(at, sizes, strict=False)]
    assert at[0] == 0
    assert [0 <= start - end < ALIGNMENT for start, end in zip(at[1:], ends, strict=True)] == [True] * 4


@pytest.mark.parametrize(
    "lengths", [[], [0], [3], [3, 0, 2], [1] * 16, [0] * 17, SKEWED], ids=lambda v: f"{len(v)}_requests"
)
def test_the_parts_are_views_of_the_buffer(lengths: list[int]) -> None:
    layout = layout_of(*lengths)
    packed = torch.arange(len(layout.header) + layout.num_tokens, dtype=torch.int64)
    parts = views(packed, layout)
    num_reqs, num_tiles = layout.num_reqs, len(layout.tiles)
    shapes = [(num_reqs + 1,), (num_reqs,), (num_reqs,), (num_tiles, 2), (layout.num_tokens,)]
    assert [tuple(part.shape) for part in parts] == shapes
    assert [part.storage_offset() for part in parts] == list(starts_of(layout))
    assert {part.untyped_storage().data_ptr() for part in parts} == {packed.data_ptr()}


@given(models())
def test_a_header_is_written_whole_and_its_gaps_are_zero(model: Model) -> None:
    layout = RaggedLayout(lengths=model.lengths, req_pool_indices=model.rows, prefix_lens=model.prefix_lens)
    expected = [0] * starts_of(layout).token_ids
    for start, values in zip(starts_of(layout), (model.offsets, model.rows, model.prefix_lens), strict=False):
        expected[start : start + len(values)] = values
    assert layout.header.tolist() == expected
    assert not layout.header.flags.writeable


def test_a_skewed_batch_carries_its_work_list_and_still_its_own_tokens() -> None:
    # The list is known only when the batch is built: the header then grows over what was reserved for it.
    lengths = [3000, *([1, 0] * 1000), 5000]
    sequences = [[7 + request] * length for request, length in enumerate(lengths)]
    batch = RaggedBatch.from_sequences(sequences, req_pool_indices=list(range(len(lengths))))
    assert len(batch.tiles) > 0
    assert batch.tiles.tolist() == batch.layout.tiles.tolist()
    assert batch.token_ids.tolist() == [token for sequence in sequences for token in sequence]
    assert batch.offsets.tolist() == batch.layout.offsets.tolist()
    assert batch.req_pool_indices.tolist() == list(range(len(lengths)))
    assert batch.prefix_lens.tolist() == [0] * len(lengths)


@given(models(max_reqs=40), st.sampled_from(["from_sequences", "select", "pad_to", "concat"]))
def test_a_batch_is_views_of_one_aligned_buffer_however_it_was_made(model: Model, how: str) -> None:
    batch = RaggedBatch.from_sequences(model.sequences, req_pool_indices=model.rows, prefix_lens=model.prefix_lens)
    if how == "select":
        batch = batch.select(list(range(batch.num_reqs)))
    elif how == "pad_to":
        batch = batch.pad_to(batch.num_reqs + 3)
    elif how == "concat":
        batch = RaggedBatch.concat([batch])
    packed = batch.packed
    assert packed.is_contiguous()
    for part in (batch.offsets, batch.req_pool_indices, batch.prefix_lens, batch.token_ids):
        assert part.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()
        assert (part.storage_offset() - packed.storage_offset()) % ALIGNMENT == 0
        assert part.stride() == (1,)
    parts = (batch.offsets, batch.req_pool_indices, batch.prefix_lens, batch.tiles, batch.token_ids)
    starts = addresses(packed, batch.layout, batch.device_tokens)
    assert list(starts) == [part.data_ptr() if part.numel() else at for part, at in zip(parts, starts, strict=True)]


@given(models())
def test_equal_batches_are_equal_bytes(model: Model) -> None:
    one, other = (
        RaggedBatch.from_sequences(model.sequences, req_pool_indices=model.rows, prefix_lens=model.prefix_lens)
        for _ in range(2)
    )
    assert torch.equal(one.packed, other.packed)
