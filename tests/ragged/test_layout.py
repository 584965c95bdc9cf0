"""The host truth: what a layout computes, what it refuses, and that nobody can change it afterwards."""

import array
import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import INT64_MAX, Model, columns, models

from ragged import Bounds, Overflow, RaggedError, RaggedLayout, RaggedOverflowError, RaggedTypeError, RaggedValueError

COLUMNS = ("lengths", "req_pool_indices", "prefix_lens", "offsets")


def layout_of(lengths: Any, rows: Any = None, prefix_lens: Any = None, **options: Any) -> RaggedLayout:
    """Rows 1, 2, 3, ... where none are given; ``req_ids`` apart, options are those of Bounds."""
    req_ids = options.pop("req_ids", None)
    fields = {} if prefix_lens is None else {"prefix_lens": prefix_lens}
    rows = range(1, len(lengths) + 1) if rows is None else rows
    return RaggedLayout(lengths=lengths, req_pool_indices=rows, req_ids=req_ids, bounds=Bounds(**options), **fields)


@given(models())
def test_a_layout_is_what_the_list_of_requests_says(model: Model) -> None:
    layout = layout_of(model.lengths, model.rows, model.prefix_lens)
    assert layout.offsets.tolist() == model.offsets
    assert [getattr(layout, name).dtype for name in COLUMNS] == [np.int64] * 4
    assert (layout.num_reqs, layout.num_tokens) == (len(model.requests), len(model.token_ids))
    assert layout.max_len == max(model.lengths, default=0)
    assert layout.max_row == max(model.rows, default=-1)
    assert layout.max_prefix_len == max(model.prefix_lens, default=0)
    ends = [request.prefix_len + len(request.tokens) for request in model.requests]
    assert layout.max_end == max(ends, default=0)
    assert layout == RaggedLayout.from_offsets(
        model.offsets, req_pool_indices=model.rows, prefix_lens=model.prefix_lens
    )


def test_zero_requests_have_one_offset() -> None:
    # Case 6.
    layout = layout_of([])
    assert layout.offsets.tolist() == [0]
    assert (layout.num_reqs, layout.num_tokens, layout.max_len) == (0, 0, 0)
    assert RaggedLayout.from_offsets([0], req_pool_indices=[]) == layout


def test_lengths_beyond_int32_sum_without_wrapping() -> None:
    # Case 5, case 34 (int32 scalars).
    assert layout_of([2**31 - 1, 2]).offsets.tolist() == [0, 2**31 - 1, 2**31 + 1]
    assert layout_of([np.int32(2**31 - 1), np.int32(1)]).offsets.tolist() == [0, 2**31 - 1, 2**31]


@pytest.mark.parametrize("lengths", [[INT64_MAX, 1], [2**62, 2**62], [2**62] * 6, [1, INT64_MAX - 1, 0, 1]], ids=str)
def test_lengths_that_sum_beyond_int64_are_an_overflow_that_says_the_sum(refused: Any, lengths: list[int]) -> None:
    text = f"lengths must sum to at most {INT64_MAX}, got {sum(lengths)}"
    with refused(RaggedOverflowError, text, argument="lengths", got=sum(lengths), bound=INT64_MAX):
        layout_of(lengths)


def test_lengths_that_sum_to_the_largest_int64_are_taken() -> None:
    assert layout_of([2**62, 2**62 - 1]).num_tokens == INT64_MAX


# Every refusal of one request, through the fast screen.

REFUSED: dict[str, tuple[dict[str, Any], type[RaggedError], str, dict[str, Any]]] = {
    "negative_length": (
        {"lengths": [1, -2]},
        RaggedValueError,
        "lengths must not be negative, got -2",
        {"argument": "lengths", "got": -2, "bound": 0},
    ),
    # Case 11.
    "negative_row": (
        {"rows": [1, -1]},
        RaggedValueError,
        "req_pool_indices must not be negative, got -1",
        {"argument": "req_pool_indices", "got": -1, "bound": 0},
    ),
    "negative_row_of_an_empty_request": (
        {"lengths": [1, 0], "rows": [1, -5]},
        RaggedValueError,
        "req_pool_indices must not be negative, got -5",
        {"argument": "req_pool_indices", "got": -5, "bound": 0},
    ),
    "negative_prefix": (
        {"prefix_lens": [0, -1]},
        RaggedValueError,
        "prefix_lens must not be negative, got -1",
        {"argument": "prefix_lens", "got": -1, "bound": 0},
    ),
    # Case 9.
    "row_is_max_reqs": (
        {"rows": [1, 4], "pool_shape": (4, 16)},
        RaggedValueError,
        "req_pool_indices must be below max_reqs 4, got 4",
        {"argument": "req_pool_indices", "got": 4, "bound": 4},
    ),
    # Case 43, pool [4, 16].
    "segment_ends_beyond_the_row": (
        {"lengths": [1, 3], "prefix_lens": [0, 14], "pool_shape": (4, 16)},
        RaggedValueError,
        "prefix_lens (14) plus length (3) must not exceed max_context_len 16, got 17",
        {"argument": "prefix_lens", "got": 17, "bound": 16},
    ),
    "segment_starts_at_the_end_of_the_row": (
        {"lengths": [1, 2], "prefix_lens": [0, 16], "pool_shape": (4, 16)},
        RaggedValueError,
        "prefix_lens (16) plus length (2) must not exceed max_context_len 16, got 18",
        {"argument": "prefix_lens", "got": 18, "bound": 16},
    ),
    "longer_than_the_row": (
        {"lengths": [1, 20], "pool_shape": (4, 16)},
        RaggedValueError,
        "prefix_lens (0) plus length (20) must not exceed max_context_len 16, got 20",
        {"argument": "prefix_lens", "got": 20, "bound": 16},
    ),
    "prefix_beyond_the_row_of_an_empty_request": (
        {"lengths": [1, 0], "prefix_lens": [0, 17], "pool_shape": (4, 16)},
        RaggedValueError,
        "prefix_lens must not exceed max_context_len 16, got 17",
        {"argument": "prefix_lens", "got": 17, "bound": 16},
    ),
    "huge_prefix": (
        {"lengths": [1, 2], "prefix_lens": [0, 2**62], "pool_shape": (4, 16)},
        RaggedValueError,
        f"prefix_lens must not exceed max_context_len 16, got {2**62}",
        {"argument": "prefix_lens", "got": 2**62, "bound": 16},
    ),
    "a_prefix_beyond_the_row_is_corrupt_also_when_truncating": (
        {"lengths": [1, 2], "prefix_lens": [0, 17], "pool_shape": (4, 16), "overflow": "truncate"},
        RaggedValueError,
        "prefix_lens must not exceed max_context_len 16, got 17",
        {"argument": "prefix_lens", "got": 17, "bound": 16},
    ),
    "a_huge_prefix_is_corrupt_also_when_truncating": (
        {"lengths": [1, 2], "prefix_lens": [0, 2**62], "pool_shape": (4, 16), "overflow": "truncate"},
        RaggedValueError,
        f"prefix_lens must not exceed max_context_len 16, got {2**62}",
        {"argument": "prefix_lens", "got": 2**62, "bound": 16},
    ),
    "end_beyond_int64": (
        {"lengths": [1, 2], "prefix_lens": [0, INT64_MAX - 1]},
        RaggedOverflowError,
        f"prefix_lens plus length must fit int64, got {INT64_MAX + 1}",
        {"argument": "prefix_lens", "got": INT64_MAX + 1, "bound": INT64_MAX},
    ),
    "tokens_on_the_padding_row": (
        {"rows": [1, 3], "padding_row": 3},
        RaggedValueError,
        "req_pool_indices must not be padding_row 3 for a request with tokens, got 3",
        {"argument": "req_pool_indices", "got": 3, "bound": 3},
    ),
    "tokens_on_padding_row_zero": (
        {"rows": [1, 0], "padding_row": 0},
        RaggedValueError,
        "req_pool_indices must not be padding_row 0 for a request with tokens, got 0",
        {"argument": "req_pool_indices", "got": 0, "bound": 0},
    ),
    "no_rows_in_the_pool": (
        {"lengths": [0, 0], "rows": [0, 0], "pool_shape": (0, 16), "request": 0},
        RaggedValueError,
        "req_pool_indices must be below max_reqs 0, got 0",
        {"argument": "req_pool_indices", "got": 0, "bound": 0},
    ),
}


@pytest.mark.parametrize("named", [False, True], ids=["nameless", "named"])
@pytest.mark.parametrize(("fields", "kind", "text", "parts"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_request_is_named_by_position_and_id(
    refused: Any, fields: dict[str, Any], kind: Any, text: str, parts: dict[str, Any], named: bool
) -> None:
    fields = {"lengths": [1, 1]} | fields
    request = fields.pop("request", 1)
    parts = parts | {"request": request}
    text += f" at request {request}"
    if named:
        fields["req_ids"] = ["chat-0", "chat-1"]
        parts["req_id"] = f"chat-{request}"
        text += f" (id 'chat-{request}')"
    with refused(kind, text, **parts):
        layout_of(**fields)


@pytest.mark.parametrize("ids", [None, ["a", "b", "c"]], ids=["nameless", "named"])
def test_a_row_claimed_twice_names_both_requests(refused: Any, ids: Any) -> None:
    # Case 31.
    first, second = ("request 0", "request 2") if ids is None else ("request 0 (id 'a')", "request 2 (id 'c')")
    with refused(
        RaggedValueError,
        f"req_pool_indices must be unique among requests with tokens, got 1 at both {first} and {second}",
        argument="req_pool_indices",
        request=2,
        req_id=None if ids is None else "c",
        got=1,
        bound=0,
    ):
        layout_of([2, 3, 1], [1, 2, 1], req_ids=ids)


def test_empty_requests_may_share_a_row_with_anybody() -> None:
    assert layout_of([0, 2, 0, 0], [1, 1, 1, 0], padding_row=0).req_pool_indices.tolist() == [1, 1, 1, 0]


def test_everything_that_reaches_the_very_edge_of_the_pool_is_taken() -> None:
    layout = layout_of([3, 16, 0], [3, 0, 1], [13, 0, 16], pool_shape=(4, 16))
    assert (layout.max_row, layout.max_end, layout.dropped_tokens) == (3, 16, 0)


@pytest.mark.parametrize(
    ("length", "prefix_len", "dropped"), [(3, 14, 1), (2, 16, 2), (20, 0, 4), (16, 0, 0), (0, 16, 0), (6, 10, 0)]
)
def test_truncating_counts_what_does_not_fit(length: int, prefix_len: int, dropped: int) -> None:
    # Case 43, and 16 (the raw numbers: 10 tokens from column 10 of 16).
    layout = layout_of([length], [1], [prefix_len], pool_shape=(4, 16), overflow="truncate")
    assert layout.dropped_tokens == dropped
    assert layout.lengths.tolist() == [length]  # the host truth keeps all tokens


def test_truncating_drops_nothing_where_the_pool_is_not_known() -> None:
    assert layout_of([20], overflow="truncate").dropped_tokens == 0


@given(
    request_columns=columns(),
    pool_shape=st.sampled_from([None, (0, 0), (3, 4), (6, 10), (2**62, 2**62), (2**63 - 1, 2**63 - 1)]),
    overflow=st.sampled_from(Overflow),
    padding_row=st.sampled_from([None, 0, 2, 2**62]),
)
def test_the_fast_screen_agrees_with_one_request_at_a_time(
    request_columns: tuple[list[int], list[int], list[int]],
    pool_shape: tuple[int, int] | None,
    overflow: Overflow,
    padding_row: int | None,
) -> None:
    lengths, rows, prefix_lens = request_columns
    bounds = Bounds(pool_shape, overflow, padding_row)
    expected: RaggedError | None = None
    try:
        for request, (row, length, prefix_len) in enumerate(zip(rows, lengths, prefix_lens, strict=True)):
            bounds.check(request, row, length, prefix_len)
    except RaggedError as error:
        expected = error
    used = [row for row, length in zip(rows, lengths, strict=True) if length]
    try:
        layout = RaggedLayout(lengths=lengths, req_pool_indices=rows, prefix_lens=prefix_lens, bounds=bounds)
    except RaggedError as error:
        if expected is not None:
            assert (type(error), str(error), vars(error)) == (type(expected), str(expected), vars(expected))
        elif isinstance(error, RaggedOverflowError):
            assert sum(lengths) > INT64_MAX
        else:
            assert used.count(error.got) > 1
    else:
        assert expected is None
        assert len(set(used)) == len(used)
        assert sum(lengths) == layout.num_tokens
        if pool_shape is not None:
            cells = [
                max(0, prefix + length - pool_shape[1]) for prefix, length in zip(prefix_lens, lengths, strict=True)
            ]
            assert layout.dropped_tokens == sum(map(min, cells, lengths))


# Offsets.


@pytest.mark.parametrize(
    ("offsets", "text", "parts"),
    [
        # Case 6, 24: empty offsets.
        ([], "offsets length 0 must be at least 1: zero requests have offsets [0]", {"got": 0, "bound": 1}),
        # Case 29: offsets sliced from larger ones.
        ([5, 7, 12], "offsets must start at 0, got 5 at request 0", {"request": 0, "got": 5, "bound": 0}),
        ([-1, 2], "offsets must start at 0, got -1 at request 0", {"request": 0, "got": -1, "bound": 0}),
        # Case 28: valid ends and a wrong middle.
        ([0, 4, 3, 5], "offsets must not decrease, got 4 then 3 at request 1", {"request": 1, "got": 3, "bound": 4}),
        (
            [0, INT64_MAX, -(2**63)],
            f"offsets must not decrease, got {INT64_MAX} then {-(2**63)} at request 1",
            {"request": 1, "got": -(2**63), "bound": INT64_MAX},
        ),
    ],
    ids=["empty", "sliced", "negative_start", "wrong_middle", "extreme"],
)
def test_offsets_that_are_not_csr_are_refused(refused: Any, offsets: Any, text: str, parts: dict[str, Any]) -> None:
    with refused(RaggedValueError, text, argument="offsets", **parts):
        RaggedLayout.from_offsets(offsets, req_pool_indices=list(range(len(offsets))))


def test_offsets_are_int64_here_too() -> None:
    with pytest.raises(RaggedTypeError, match=r"^offsets must be int64, got int32"):
        RaggedLayout.from_offsets(np.array([0, 2], dtype=np.int32), req_pool_indices=[1])


# The columns belong together.


@pytest.mark.parametrize(
    ("fields", "text", "parts"),
    [
        (
            {"lengths": [1, 2], "rows": [1]},
            "req_pool_indices length 1 != number of requests (2)",
            {"argument": "req_pool_indices", "got": 1, "bound": 2},
        ),
        # Case 27: prefix_lens one short.
        (
            {"lengths": [1, 2], "prefix_lens": [0]},
            "prefix_lens length 1 != number of requests (2)",
            {"argument": "prefix_lens", "got": 1, "bound": 2},
        ),
        (
            {"lengths": [1, 2], "req_ids": ["a", "b", "c"]},
            "req_ids length 3 != number of requests (2)",
            {"argument": "req_ids", "got": 3, "bound": 2},
        ),
    ],
    ids=["rows", "prefix_lens", "req_ids"],
)
def test_columns_of_different_lengths_are_refused_with_both_numbers(
    refused: Any, fields: dict[str, Any], text: str, parts: dict[str, Any]
) -> None:
    with refused(RaggedValueError, text, **parts):
        layout_of(**fields)


@pytest.mark.parametrize("argument", ["lengths", "req_pool_indices", "prefix_lens"])
@pytest.mark.parametrize("value", [None, 5, "ab", {1: 2}], ids=repr)
def test_what_is_no_column_is_refused_by_name(refused: Any, argument: str, value: Any) -> None:
    if (argument, value) == ("prefix_lens", None):
        return  # not given
    fields = {"lengths": [1, 2], "req_pool_indices": [1, 2], "prefix_lens": [0, 0]} | {argument: value}
    name = type(value).__name__
    text = f"{argument} must be a list, tuple, range, array or tensor of integers, got {name}"
    with refused(RaggedTypeError, text, argument=argument, got=name):
        RaggedLayout(**fields)
    if argument == "lengths":
        del fields["prefix_lens"]
        with refused(RaggedTypeError, text, argument=argument, got=name):
            RaggedLayout(**fields)


@pytest.mark.parametrize("ids", [5, 1.5, object()], ids=lambda ids: type(ids).__name__)
def test_ids_are_a_sequence(refused: Any, ids: Any) -> None:
    text = f"req_ids must be a sequence of ids, got {type(ids).__name__}"
    with refused(RaggedTypeError, text, argument="req_ids", got=type(ids).__name__):
        layout_of([1], req_ids=ids)


@pytest.mark.parametrize(
    ("options", "kind", "text", "parts"),
    [
        ({"pool_shape": 5}, RaggedTypeError, "pool_shape must be (max_reqs, max_context_len), got 5", {"got": 5}),
        (
            {"pool_shape": (4,)},
            RaggedValueError,
            "pool_shape must be (max_reqs, max_context_len), got (4,)",
            {"got": (4,)},
        ),
        ({"pool_shape": (4, 2.5)}, RaggedTypeError, "pool_shape must be an int, got float 2.5", {"got": 2.5}),
        ({"pool_shape": (True, 2)}, RaggedTypeError, "pool_shape must be an int, got bool True", {"got": True}),
        ({"pool_shape": (4, -1)}, RaggedValueError, "pool_shape must be at least 0, got -1", {"got": -1, "bound": 0}),
        ({"padding_row": "0"}, RaggedTypeError, "padding_row must be an int, got str '0'", {"got": "0"}),
        ({"padding_row": False}, RaggedTypeError, "padding_row must be an int, got bool False", {"got": False}),
        ({"padding_row": -1}, RaggedValueError, "padding_row must be at least 0, got -1", {"got": -1, "bound": 0}),
        (
            {"padding_row": 2**70},
            RaggedOverflowError,
            f"padding_row must fit int64, got {2**70}",
            {"got": 2**70, "bound": INT64_MAX},
        ),
    ],
    ids=str,
)
def test_bounds_that_make_no_sense_are_refused(
    refused: Any, options: dict[str, Any], kind: Any, text: str, parts: dict[str, Any]
) -> None:
    with refused(kind, text, argument=next(iter(options)), **parts):
        Bounds(**options)


@pytest.mark.parametrize(
    "shape",
    [(4, 16), [4, 16], torch.empty(4, 16).shape, np.empty((4, 16)).shape, (np.int64(4), np.int32(16))],
    ids=repr,
)
def test_a_pool_shape_is_any_pair_of_integers(shape: Any) -> None:
    assert Bounds(shape) == Bounds((4, 16))
    assert Bounds(shape).pool_shape == (4, 16)


# A layout is a value.


COPIES = {
    "pickle": lambda layout: pickle.loads(pickle.dumps(layout)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_is_equal_and_as_read_only_as_the_original(copied: Any) -> None:
    layout = layout_of([3, 0, 2], [4, 1, 7], [0, 0, 5], req_ids=["a", None, 3], pool_shape=(8, 9), padding_row=0)
    other = copied(layout)
    assert other == layout
    assert (other.req_ids, other.bounds) == (layout.req_ids, layout.bounds)
    for name in COLUMNS:
        assert getattr(other, name).tolist() == getattr(layout, name).tolist()
        with pytest.raises(ValueError, match="read-only"):
            getattr(other, name)[0] = 9


@given(
    request_columns=columns(),
    others=columns(),
    pool_shape=st.sampled_from([None, (6, 10), (2**63 - 1, 2**63 - 1)]),
    overflow=st.sampled_from(Overflow),
)
def test_a_layout_that_moves_to_other_columns_is_the_one_that_starts_there(
    request_columns: tuple[list[int], list[int], list[int]],
    others: tuple[list[int], list[int], list[int]],
    pool_shape: tuple[int, int] | None,
    overflow: Overflow,
) -> None:
    lengths, rows, prefix_lens = request_columns
    moved_to = (others[2] + [0] * len(lengths))[: len(lengths)]
    ids = tuple(f"r{i}" for i in range(len(lengths)))
    bounds = Bounds(pool_shape, overflow)
    try:
        layout = RaggedLayout(lengths=lengths, req_pool_indices=rows, prefix_lens=prefix_lens, bounds=bounds)
    except RaggedError:
        return
    assert layout.has(np.array(lengths, dtype=np.int64), np.array(rows, dtype=np.int64))
    made: list[Any] = []
    for make in (
        lambda: layout.moved(np.array(moved_to, dtype=np.int64), ids),
        lambda: RaggedLayout(lengths=lengths, req_pool_indices=rows, prefix_lens=moved_to, req_ids=ids, bounds=bounds),
    ):
        try:
            made.append(make())
        except RaggedError as error:
            made.append((type(error), str(error), vars(error)))
    moved, expected = made
    assert moved == expected
    if isinstance(moved, RaggedLayout):
        for name in [*COLUMNS, "header", "tiles"]:
            assert getattr(moved, name).tolist() == getattr(expected, name).tolist()
            assert not getattr(moved, name).flags.writeable
        for name in ("num_reqs", "num_tokens", "num_empty", "max_len", "max_row", "max_prefix_len", "max_end"):
            assert getattr(moved, name) == getattr(expected, name)
        assert moved.dropped_tokens == expected.dropped_tokens


def test_a_layout_has_only_its_own_lengths_and_rows() -> None:
    layout = layout_of([3, 0, 2])
    rows = layout.req_pool_indices
    assert layout.has(np.array([3, 0, 2]), rows.copy())
    assert not layout.has(np.array([3, 1, 1]), rows)
    assert not layout.has(np.array([3, 0]), rows[:2])
    assert not layout.has(np.array([3, 0, 2]), rows[::-1].copy())


@pytest.mark.parametrize("ids", [None, ("a", "b")])
def test_columns_to_move_to_are_one_a_request(refused: Any, ids: Any) -> None:
    with refused(
        RaggedValueError, "prefix_lens length 2 != number of requests (3)", argument="prefix_lens", got=2, bound=3
    ):
        layout_of([3, 0, 2]).moved(np.zeros(2, dtype=np.int64), ids)


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_cannot_be_written(name: str) -> None:
    column = getattr(layout_of([3, 0, 2]), name)
    with pytest.raises(ValueError, match="read-only"):
        column[0] = 9
    with pytest.raises(ValueError, match="read-only"):
        column += 1


def test_fields_cannot_be_replaced() -> None:
    with pytest.raises(AttributeError):
        layout_of([3]).lengths = np.array([4])  # type: ignore[misc]


@pytest.mark.parametrize(
    "make", [np.array, torch.tensor, lambda v: array.array("q", v), list], ids=["numpy", "torch", "array", "list"]
)
def test_a_layout_keeps_nothing_of_the_callers(make: Any) -> None:
    lengths, rows, prefix_lens, ids = make([3, 0]), make([4, 1]), make([0, 5]), ["a", "b"]
    layout = RaggedLayout(lengths=lengths, req_pool_indices=rows, prefix_lens=prefix_lens, req_ids=ids)
    for values in (lengths, rows, prefix_lens):
        values[0], values[1] = 77, 78
    ids[0] = "z"
    assert layout == RaggedLayout(lengths=[3, 0], req_pool_indices=[4, 1], prefix_lens=[0, 5], req_ids=("a", "b"))


def test_layouts_compare_by_value_and_never_raise() -> None:
    # Case 69.
    layout, same = layout_of([3, 0], [4, 1]), layout_of(np.array([3, 0]), (4, 1), [0, 0])
    assert layout == layout
    assert layout == same
    assert hash(layout) == hash(same)
    assert {layout: 1}[same] == 1
    assert layout in [None, 5, same]
    for other in (
        layout_of([3, 1], [4, 1]),
        layout_of([3, 0], [4, 2]),
        layout_of([3, 0], [4, 1], [0, 1]),
        layout_of([3, 0], [4, 1], padding_row=9),
        layout_of([3, 0], [4, 1], req_ids=["a", "b"]),
        layout_of([]),
        None,
        [3, 0],
    ):
        assert layout != other


def test_a_layout_has_a_hash_whatever_its_ids_are() -> None:
    layout, same = (layout_of([1], req_ids=[["not", "hashable"]]) for _ in range(2))
    assert hash(layout) == hash(same)
    assert layout == same


def test_ids_that_cannot_be_compared_make_no_comparison_raise() -> None:
    # Case 69: numpy and torch answer `==` with an array.
    ids = [np.array([1, 2])]
    layout, same, other = layout_of([1], req_ids=ids), layout_of([1], req_ids=ids), layout_of([1], req_ids=[ids[0] + 0])
    assert layout == same
    assert layout != other
    assert layout in [None, other, same]
    assert hash(layout) == hash(other)


@pytest.mark.parametrize("bounds", [None, (8, 16), {"pool_shape": (8, 16)}], ids=repr)
def test_bounds_are_bounds(refused: Any, bounds: Any) -> None:
    got = type(bounds).__name__
    with refused(RaggedTypeError, f"bounds must be a Bounds, got {got}", argument="bounds", got=got):
        RaggedLayout(lengths=[1], req_pool_indices=[0], bounds=bounds)


# Held against a pool later.


def test_a_pool_that_turns_up_later_is_held_against_the_same_rules(refused: Any) -> None:
    layout = layout_of([1, 3], [1, 3], [0, 14], req_ids=["a", "b"])
    layout.check_pool((4, 17))
    with refused(
        RaggedValueError,
        "req_pool_indices must be below max_reqs 3, got 3 at request 1 (id 'b')",
        argument="req_pool_indices",
        request=1,
        req_id="b",
        got=3,
        bound=3,
    ):
        layout.check_pool((3, 17))
    with refused(
        RaggedValueError,
        "prefix_lens (14) plus length (3) must not exceed max_context_len 16, got 17 at request 1 (id 'b')",
        argument="prefix_lens",
        request=1,
        req_id="b",
        got=17,
        bound=16,
    ):
        layout.check_pool((4, 16))


def test_a_truncating_layout_fits_a_short_pool_but_not_one_shorter_than_its_prefix() -> None:
    layout = layout_of([3], [1], [14], overflow="truncate")
    layout.check_pool((4, 14))
    with pytest.raises(
        RaggedValueError, match=r"^prefix_lens must not exceed max_context_len 13, got 14 at request 0$"
    ):
        layout.check_pool((4, 13))


@pytest.mark.parametrize("shape", [(0, 0), (0, 16), (4, 0)], ids=str)
def test_zero_requests_fit_every_pool(shape: tuple[int, int]) -> None:
    # Case 8.
    layout_of([]).check_pool(shape)
    layout_of([], pool_shape=shape)
