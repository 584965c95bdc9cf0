"""Index arithmetic of layouts, held to lists of requests."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import Model, models

from ragged import Bounds, RaggedLayout, RaggedOverflowError, RaggedTypeError, RaggedValueError
from ragged.rearrange import concat, pad_to, select, split


def layout_of(model: Model, ids: tuple[object, ...] | None = None, bounds: Bounds | None = None) -> RaggedLayout:
    return RaggedLayout(
        lengths=model.lengths,
        req_pool_indices=model.rows,
        prefix_lens=model.prefix_lens,
        req_ids=ids,
        bounds=bounds or Bounds(),
    )


def plain(*lengths: int, rows: Any = None, prefix_lens: Any = None, ids: Any = None, **bounds: Any) -> RaggedLayout:
    return RaggedLayout(
        lengths=list(lengths),
        req_pool_indices=list(range(1, len(lengths) + 1)) if rows is None else rows,
        prefix_lens=[0] * len(lengths) if prefix_lens is None else prefix_lens,
        req_ids=ids,
        bounds=Bounds(**bounds),
    )


def ids_of(model: Model) -> tuple[object, ...]:
    return tuple(f"chat-{index}" for index in range(len(model.requests)))


@given(models(), st.data())
def test_select_takes_the_requests_in_the_order_asked_for(model: Model, data: st.DataObject) -> None:
    # Case 53: ids, rows and prefixes move together.
    everything = list(range(len(model.requests)))
    indices = data.draw(st.lists(st.sampled_from(everything), unique=True) if everything else st.just([]))
    chosen = select(layout_of(model, ids_of(model)), np.array(indices, dtype=np.int64))
    assert chosen == layout_of(model.select(indices), tuple(f"chat-{index}" for index in indices))


def test_select_starts_at_zero_again() -> None:
    # Case 29.
    assert select(plain(3, 2, 5), np.array([1, 2])).offsets.tolist() == [0, 2, 7]


@pytest.mark.parametrize("index", [3, -1, 2**62])
def test_select_refuses_an_index_that_names_no_request(refused: Any, index: int) -> None:
    text = f"indices must be in [0, 3), got {index}"
    with refused(RaggedValueError, text, argument="indices", got=index, bound=3):
        select(plain(1, 2, 3), np.array([0, index, 7]))


def test_select_of_one_request_twice_claims_its_row_twice() -> None:
    with pytest.raises(RaggedValueError, match=r"got 2 at both request 0 and request 1$"):
        select(plain(1, 2, 3), np.array([1, 1]))
    assert select(plain(1, 0), np.array([1, 1])).req_pool_indices.tolist() == [2, 2]  # empty: nothing is claimed


@given(st.lists(models(max_reqs=4, max_row=10**6), min_size=1, max_size=4), st.booleans())
def test_concat_is_one_list_of_requests_after_the_other(parts: list[Model], named: bool) -> None:
    whole = Model([request for part in parts for request in part.requests])
    rows = [request.row for request in whole.requests if request.tokens]
    layouts = [layout_of(part, ids_of(part) if named else None) for part in parts]
    if len(set(rows)) < len(rows):
        with pytest.raises(RaggedValueError, match=r"^req_pool_indices must be unique among requests with tokens"):
            concat(layouts)
        return
    ids = tuple(name for part in parts for name in ids_of(part)) if named else None
    assert concat(layouts) == layout_of(whole, ids)


def test_concat_adds_offsets_up_once() -> None:
    # Case 29: lengths [3, 2] and [2, 5].
    assert concat([plain(3, 2), plain(2, 5, rows=[3, 4])]).offsets.tolist() == [0, 3, 5, 7, 12]


def test_concat_of_named_and_nameless_layouts_keeps_the_names_at_their_requests() -> None:
    joined = concat([plain(1), plain(2, 3, rows=[5, 6], ids=["a", "b"]), plain(rows=[], ids=[])])
    assert joined.req_ids == (None, "a", "b")


def test_concat_refuses_nothing_and_layouts_held_against_other_bounds(refused: Any) -> None:
    with refused(RaggedValueError, "batches must not be empty", argument="batches", got=0, bound=1):
        concat([])
    one, other = plain(1), plain(1, rows=[2], padding_row=0)
    with refused(
        RaggedValueError,
        f"batches must share their bounds, got {other.bounds} at 1 after {one.bounds}",
        argument="batches",
        got=other.bounds,
        bound=one.bounds,
    ):
        concat([one, other])


def test_concat_beyond_int64_is_an_overflow() -> None:
    with pytest.raises(RaggedOverflowError, match=r"^lengths must sum to at most"):
        concat([plain(2**62), plain(2**62, rows=[2])])


@given(models(), st.integers(1, 20))
def test_split_deals_the_tokens_in_order(model: Model, max_tokens: int) -> None:
    pieces = split(layout_of(model), max_tokens)
    assert pieces == [layout_of(piece) for piece in model.split(max_tokens)]


@given(models(), st.integers(1, 20))
def test_the_pieces_of_a_split_are_full_but_for_the_last_and_lose_nothing(model: Model, max_tokens: int) -> None:
    layout = layout_of(model, ids_of(model))
    pieces = split(layout, max_tokens)
    sizes = [piece.num_tokens for piece in pieces]
    assert sum(sizes) == layout.num_tokens
    assert all(size == max_tokens for size in sizes[:-1])
    cells = []
    for piece in pieces:
        columns = (piece.req_ids or (), piece.lengths.tolist(), piece.prefix_lens.tolist())
        cells += [(name, start + i) for name, length, start in zip(*columns, strict=True) for i in range(length)]
    assert cells == list(zip([f"chat-{r}" for r in model.req_ids], model.positions, strict=True))
    named = [name for piece in pieces for name in piece.req_ids or ()]
    assert [name for name in ids_of(model) if named.count(name) == 0] == []
    empty = [name for name, request in zip(ids_of(model), model.requests, strict=True) if not request.tokens]
    assert [named.count(name) for name in empty] == [1] * len(empty)


def test_split_gives_the_second_half_of_a_request_the_right_prefix() -> None:
    # Case 25.
    pieces = split(plain(4, 5, 6), 6)
    assert [piece.lengths.tolist() for piece in pieces] == [[4, 2], [3, 3], [3]]
    assert [piece.prefix_lens.tolist() for piece in pieces] == [[0, 0], [2, 0], [3]]
    assert [piece.req_pool_indices.tolist() for piece in pieces] == [[1, 2], [2, 3], [3]]
    assert [piece.lengths.tolist() for piece in split(plain(4, 5, 6), 15)] == [[4, 5, 6]]
    assert [piece.lengths.tolist() for piece in split(plain(4, 5, 6), 1)] == [[1]] * 15


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([], [[]]),
        ([0, 0], [[0, 0]]),
        ([3, 0], [[3, 0]]),
        ([0, 3, 0, 3, 0], [[0, 3], [0, 3, 0]]),
        ([6, 0], [[3], [3, 0]]),
        ([0, 7], [[0, 3], [3], [1]]),
    ],
    ids=str,
)
def test_an_empty_request_is_in_the_piece_in_which_its_offset_falls(
    lengths: list[int], expected: list[list[int]]
) -> None:
    assert [piece.lengths.tolist() for piece in split(plain(*lengths), 3)] == expected


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_split_into_pieces_of_nothing_is_refused(refused: Any, max_tokens: int) -> None:
    # Case 25.
    text = f"max_tokens must be at least 1, got {max_tokens}"
    with refused(RaggedValueError, text, argument="max_tokens", got=max_tokens, bound=1):
        split(plain(4), max_tokens)


@pytest.mark.parametrize("value", [True, 2.0, "2", None], ids=repr)
@pytest.mark.parametrize(("call", "argument"), [(split, "max_tokens"), (pad_to, "num_reqs")], ids=["split", "pad_to"])
def test_a_size_is_an_integer(refused: Any, call: Any, argument: str, value: Any) -> None:
    text = f"{argument} must be an int, got {type(value).__name__} {value!r}"
    with refused(RaggedTypeError, text, argument=argument, got=value):
        call(plain(1), value)


def test_a_size_may_be_numpys() -> None:
    assert split(plain(4), np.int64(3)) == split(plain(4), 3)
    assert pad_to(plain(4), np.int32(3)) == pad_to(plain(4), 3)


@pytest.mark.parametrize("max_tokens", [1, 7, 16, 17, 18, 19, 30])
def test_the_pieces_of_a_truncated_request_drop_together_what_it_drops(max_tokens: int) -> None:
    # Case 43: the row has 16 columns. A piece that starts beyond them writes nothing, and is no error.
    whole = plain(2, 20, prefix_lens=[0, 3], pool_shape=(4, 16), overflow="truncate")
    pieces = split(whole, max_tokens)
    assert sum(piece.num_tokens for piece in pieces) == whole.num_tokens
    assert sum(piece.dropped_tokens for piece in pieces) == whole.dropped_tokens == 7
    written = []
    for piece in pieces:
        for row, start, length in zip(piece.req_pool_indices, piece.prefix_lens, piece.lengths, strict=True):
            written += [(int(row), column) for column in range(start, start + length) if column < 16]
    assert written == [(1, 0), (1, 1), *((2, column) for column in range(3, 16))]


@given(models(min_row=1), st.integers(0, 5), st.sampled_from([None, 0, 77]))
def test_pad_to_appends_empty_requests_on_the_padding_row(model: Model, more: int, padding_row: int | None) -> None:
    layout = layout_of(model, bounds=Bounds(padding_row=padding_row))
    padded = pad_to(layout, layout.num_reqs + more)
    assert padded.lengths.tolist() == model.lengths + [0] * more
    assert padded.req_pool_indices.tolist() == model.rows + [padding_row or 0] * more
    assert padded.prefix_lens.tolist() == model.prefix_lens + [0] * more
    assert padded.offsets.tolist() == model.offsets + [model.offsets[-1]] * more
    assert padded.bounds == layout.bounds


def test_pad_to_the_number_there_is_keeps_the_offsets() -> None:
    # Case 25: still 4 offsets.
    assert pad_to(plain(4, 5, 6), 3).offsets.tolist() == [0, 4, 9, 15]


def test_pad_to_keeps_ids_and_gives_padding_none() -> None:
    assert pad_to(plain(1, 2, ids=["a", "b"]), 4).req_ids == ("a", "b", None, None)


def test_pad_to_fewer_requests_is_refused(refused: Any) -> None:
    with refused(RaggedValueError, "num_reqs must be at least 3, got 2", argument="num_reqs", got=2, bound=3):
        pad_to(plain(4, 5, 6), 2)
