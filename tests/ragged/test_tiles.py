"""The work list: where there is one, it lists every tile that holds tokens, once and in order."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ragged.tiles
from ragged import RaggedLayout
from ragged.tiles import TILE, list_tiles


def tiles_of(lengths: list[int]) -> list[list[int]]:
    return list_tiles(np.array(lengths, dtype=np.int64), max(lengths, default=0), sum(lengths)).tolist()


def expected(lengths: list[int], tile: int) -> list[list[int]]:
    """Walk every token; a tile is listed when its first token comes by."""
    return [[request, t // tile] for request, length in enumerate(lengths) for t in range(length) if t % tile == 0]


@contextmanager
def small_tiles() -> Iterator[None]:
    """Tiles of 4 tokens and no free programs: small batches have lists."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragged.tiles, "TILE", 4)
        patch.setattr(ragged.tiles, "ONE_WAVE", 0)
        yield


@given(st.lists(st.sampled_from([0, 0, 1, 3, 4, 5, 8, 9, 40]), max_size=12))
def test_a_list_has_every_tile_that_holds_tokens(lengths: list[int]) -> None:
    with small_tiles():
        tiles = tiles_of(lengths)
    assert tiles in ([], expected(lengths, 4))


@given(st.lists(st.sampled_from([0, 0, 1, 3, 4, 5, 8, 9, 40]), max_size=12))
def test_a_batch_without_a_list_wastes_little_without_one(lengths: list[int]) -> None:
    with small_tiles():
        tiles = tiles_of(lengths)
    if not tiles and max(lengths, default=0) > 4:
        rectangle = len(lengths) * -(-max(lengths) // 4)
        assert rectangle <= ragged.tiles.EVEN_ENOUGH * len(expected(lengths, 4))


@pytest.mark.parametrize(
    "lengths", [[], [0, 0], [TILE] * 500, [TILE, *([0] * 500)], [5000] * 100, [TILE + 1, *([1] * 60)]], ids=len
)
def test_even_lengths_and_few_tiles_need_no_list(lengths: list[int]) -> None:
    assert tiles_of(lengths) == []


def test_one_long_among_short_has_a_list() -> None:
    lengths = [1, 200 * TILE, *([2, 0] * 200)]
    assert tiles_of(lengths) == expected(lengths, TILE)


@pytest.mark.parametrize("length", [2**40, 2**62, 2**63 - 1])
def test_a_layout_of_more_tokens_than_any_memory_holds_lists_nothing(length: int) -> None:
    # Case 5: a layout needs no tokens, and must not need memory in their place.
    layout = RaggedLayout(lengths=[length, 0, 0, 0], req_pool_indices=[1, 2, 3, 4])
    assert layout.tiles.shape == (0, 2)


def test_the_list_of_a_layout_cannot_be_written() -> None:
    layout = RaggedLayout(lengths=[200 * TILE, *([1] * 400)], req_pool_indices=list(range(401)))
    with pytest.raises(ValueError, match="read-only"):
        layout.tiles[0, 0] = 9
