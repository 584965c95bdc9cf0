"""Rules as values: what they hold against, and what they say."""

from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import torch

from ragged import RaggedError, RaggedOverflowError, RaggedTypeError, RaggedValueError
from ragged.integers import as_int
from ragged.rules import (
    HasDtype,
    HasLength,
    HasNDim,
    HasOwnRows,
    IsContiguous,
    NoOverlap,
    OnDevice,
    apply,
    extent_of,
    is_integer,
)

CPU = torch.device("cpu")
META = torch.device("meta")
BIG = torch.full((9, 12), -7, dtype=torch.int32)

HOLDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "one_dimension": (HasNDim("offsets", 1), {"offsets": np.zeros(3)}),
    "one_dimension_of_nothing": (HasNDim("offsets", 1), {"offsets": torch.empty(0)}),
    "two_dimensions": (HasNDim("pool_out", 2), {"pool_out": torch.zeros(2, 0)}),
    "numpy_int64": (HasDtype("offsets"), {"offsets": np.zeros(3, dtype=np.int64)}),
    "torch_int64": (HasDtype("offsets"), {"offsets": torch.zeros(3, dtype=torch.int64)}),
    "int32_where_it_belongs": (HasDtype("pool_out", "int32"), {"pool_out": BIG}),
    "length": (HasLength("offsets", "bs+1", lambda _: 3), {"offsets": np.zeros(3)}),
    "device": (OnDevice("offsets", "pool_out", lambda _: CPU), {"offsets": torch.zeros(1)}),
    "numpy_is_on_the_cpu": (OnDevice("offsets", "pool_out", lambda _: CPU), {"offsets": np.zeros(1)}),
    "contiguous": (IsContiguous("offsets"), {"offsets": np.zeros(4)}),
    "one_element_has_any_stride": (IsContiguous("offsets"), {"offsets": torch.zeros(9)[::9]}),
    "nothing_has_any_stride": (IsContiguous("offsets"), {"offsets": np.zeros(9)[:0:2]}),
    "row_slice": (HasOwnRows("pool_out"), {"pool_out": BIG[1:5]}),
    "column_slice": (HasOwnRows("pool_out"), {"pool_out": BIG[1:-1, 2:10]}),
    "every_fourth_row": (HasOwnRows("pool_out"), {"pool_out": BIG[::4, 2:10]}),
    "one_column_has_any_column_stride": (HasOwnRows("pool_out"), {"pool_out": BIG[:, ::12]}),
    "one_row_expanded_is_one_row": (HasOwnRows("pool_out"), {"pool_out": BIG[0].expand(1, 12)}),
    "no_rows": (HasOwnRows("pool_out"), {"pool_out": BIG[:0]}),
    "neighbours": (NoOverlap("a", "b"), {"a": BIG[0], "b": BIG[1]}),
    "empty_inside_the_other": (NoOverlap("a", "b"), {"a": BIG[2, 3:3], "b": BIG}),
}


@pytest.mark.parametrize(("rule", "arrays"), HOLDS.values(), ids=HOLDS)
def test_a_rule_that_holds_says_nothing(rule: Any, arrays: dict[str, Any]) -> None:
    assert rule.broken(arrays) is None
    apply([rule], arrays)


INT64_HINT = "make it int64 where it is made, or pass mode='coerce'"
COPY_HINT = "pass the table itself: a copy of pool_out would swallow the write"

BROKEN: dict[str, tuple[Any, Any, type[RaggedError], str, dict[str, Any]]] = {
    "two_dimensions": (
        HasNDim("flat_in", 1),
        torch.zeros(2, 3),
        RaggedValueError,
        "flat_in must be 1-D, got shape (2, 3)",
        {"got": (2, 3), "bound": 1},
    ),
    "no_dimension": (
        HasNDim("flat_in", 1),
        np.array(5),
        RaggedValueError,
        "flat_in must be 1-D, got shape ()",
        {"got": (), "bound": 1},
    ),
    "torch_int32": (
        HasDtype("offsets"),
        torch.zeros(3, dtype=torch.int32),
        RaggedTypeError,
        "offsets must be int64, got torch.int32",  # the form that operators search their logs for
        {"got": "torch.int32", "bound": "int64", "note": INT64_HINT},
    ),
    "numpy_big_endian": (
        HasDtype("offsets"),
        np.zeros(3, dtype=">i8"),
        RaggedTypeError,
        "offsets must be int64, got >i8",
        {"got": ">i8", "bound": "int64", "note": INT64_HINT},
    ),
    "int64_pool": (
        HasDtype("pool_out", "int32"),
        torch.zeros(3, dtype=torch.int64),
        RaggedTypeError,
        "pool_out must be int32, got torch.int64",
        {"got": "torch.int64", "bound": "int32"},
    ),
    "length": (
        HasLength("offsets", "bs+1", lambda _: 4),
        np.zeros(3),
        RaggedValueError,
        "offsets length 3 != bs+1 (4)",
        {"got": 3, "bound": 4},
    ),
    "device": (
        OnDevice("offsets", "pool_out", lambda _: META),
        np.zeros(3),
        RaggedValueError,
        "offsets is on cpu, pool_out is on meta",
        {"got": "cpu", "bound": "meta", "note": "move offsets to meta, or pass mode='coerce'"},
    ),
    "every_other": (
        IsContiguous("offsets"),
        np.zeros(8, dtype=np.int64)[::2],
        RaggedValueError,
        "offsets must be contiguous, got strides (2,)",
        {"got": (2,), "bound": (1,), "note": "call .contiguous() on offsets, or pass mode='coerce'"},
    ),
    "backwards": (
        IsContiguous("offsets"),
        np.arange(6)[::-1],
        RaggedValueError,
        "offsets must be contiguous, got strides (-1,)",
        {"got": (-1,), "bound": (1,), "note": "call .contiguous() on offsets, or pass mode='coerce'"},
    ),
    "expanded": (
        IsContiguous("offsets"),
        torch.zeros(1).expand(3),
        RaggedValueError,
        "offsets must be contiguous, got strides (0,)",
        {"got": (0,), "bound": (1,), "note": "call .contiguous() on offsets, or pass mode='coerce'"},
    ),
    # Case 37: a transposed or an expanded pool.
    "transposed_pool": (
        HasOwnRows("pool_out"),
        BIG.T,
        RaggedValueError,
        "pool_out must have a last stride of 1 and a row stride of at least 9, got strides (1, 12)",
        {"got": (1, 12), "bound": (9, 1), "note": COPY_HINT},
    ),
    "expanded_pool": (
        HasOwnRows("pool_out"),
        BIG[0].expand(4, 12),
        RaggedValueError,
        "pool_out must have a last stride of 1 and a row stride of at least 12, got strides (0, 1)",
        {"got": (0, 1), "bound": (12, 1), "note": COPY_HINT},
    ),
    "overlapping_rows": (
        HasOwnRows("pool_out"),
        torch.zeros(20).as_strided((3, 8), (4, 1)),
        RaggedValueError,
        "pool_out must have a last stride of 1 and a row stride of at least 8, got strides (4, 1)",
        {"got": (4, 1), "bound": (8, 1), "note": COPY_HINT},
    ),
}


@pytest.mark.parametrize(("rule", "array", "kind", "text", "parts"), BROKEN.values(), ids=BROKEN)
def test_a_broken_rule_says_what_was_expected_and_what_was_got(
    refused: Any, rule: Any, array: Any, kind: Any, text: str, parts: dict[str, Any]
) -> None:
    with refused(kind, text, argument=rule.argument, **parts):
        apply([rule], {rule.argument: array})


def test_the_place_goes_before_the_message(refused: Any) -> None:
    text = "kv-canary: scatter_req_token_ids flat_in must be 1-D, got shape (2, 3)"
    with refused(RaggedValueError, text, argument="flat_in", got=(2, 3), bound=1):
        apply([HasNDim("flat_in", 1)], {"flat_in": torch.zeros(2, 3)}, where="kv-canary: scatter_req_token_ids ")


def test_the_first_broken_rule_in_the_list_is_the_one_that_speaks() -> None:
    # Case 26: a wrong dtype and a wrong dimension at once.
    array = torch.zeros(2, 3, dtype=torch.int32)
    with pytest.raises(RaggedValueError, match=r"^a must be 1-D"):
        apply([HasNDim("a", 1), HasDtype("a")], {"a": array})
    with pytest.raises(RaggedTypeError, match=r"^a must be int64"):
        apply([HasDtype("a"), HasNDim("a", 1)], {"a": array})


@pytest.mark.parametrize(
    ("first", "second"),
    [(BIG, BIG), (BIG[2:4], BIG[3:5]), (BIG[1:5, 2:6], BIG[2]), (BIG.view(torch.int64)[1], BIG[1])],
    ids=["same", "rows", "inside", "other_dtype"],
)
def test_tensors_that_share_memory_are_told_apart_from_neighbours(refused: Any, first: Any, second: Any) -> None:
    hint = "copy flat_in first: the write would change what is still being read"
    for one, other in [(first, second), (second, first)]:
        with refused(
            RaggedValueError,
            "flat_in shares memory with pool_out",
            argument="flat_in",
            got=extent_of(one),
            bound=extent_of(other),
            note=hint,
        ):
            apply([NoOverlap("flat_in", "pool_out")], {"flat_in": one, "pool_out": other})


def test_the_extent_of_a_tensor_ends_behind_its_last_element() -> None:
    base = BIG.data_ptr()
    assert extent_of(BIG[1:3, 2:5]) == (base + 4 * 14, base + 4 * (2 * 12 + 4 + 1))
    assert extent_of(BIG[:0]) == (0, 0)


@pytest.mark.parametrize(
    "array",
    [np.zeros(1, dtype=dtype) for dtype in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">i8", ">u2")]
    + [torch.zeros(1, dtype=dtype) for dtype in (torch.int8, torch.int64, torch.uint8, torch.uint16, torch.uint64)],
    ids=lambda array: str(array.dtype),
)
def test_signed_and_unsigned_integers_are_integers(array: Any) -> None:
    assert is_integer(array)


@pytest.mark.parametrize(
    "array",
    [np.zeros(1, dtype=dtype) for dtype in ("?", "f4", "f8", "c16", "S1", "U1", "O", "M8[s]", "m8[s]")]
    + [torch.zeros(1, dtype=dtype) for dtype in (torch.bool, torch.float32, torch.bfloat16, torch.complex64)],
    ids=lambda array: str(array.dtype),
)
def test_bools_floats_and_times_are_no_integers(array: Any) -> None:
    assert not is_integer(array)


@pytest.mark.parametrize("value", [5, np.int64(5), np.uint8(5), np.int32(5)], ids=lambda v: type(v).__name__)
def test_an_integer_argument_is_pythons_or_numpys(value: Any) -> None:
    assert as_int(value, "num_reqs", least=5) == 5
    assert type(as_int(value, "num_reqs")) is int


@pytest.mark.parametrize(
    "value",
    [True, np.True_, 5.0, np.float64(5), "5", None, [5], np.array([5]), torch.tensor(5), np.timedelta64(5, "s")],
    ids=lambda value: type(value).__name__,
)
def test_nothing_else_is_an_integer_argument(refused: Any, value: Any) -> None:
    text = f"num_reqs must be an int, got {type(value).__name__} {value!r}"
    with refused(RaggedTypeError, text, argument="num_reqs", got=ANY):
        as_int(value, "num_reqs")


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, np.uint64(2**63)])
def test_an_integer_argument_fits_int64(refused: Any, value: int) -> None:
    text = f"num_reqs must fit int64, got {int(value)}"
    with refused(RaggedOverflowError, text, argument="num_reqs", got=int(value), bound=2**63 - 1):
        as_int(value, "num_reqs")


def test_an_integer_argument_below_its_least_is_named_with_its_request(refused: Any) -> None:
    with refused(
        RaggedValueError,
        "num_reqs must be at least 3, got 2 at request 4 (id 'a')",
        argument="num_reqs",
        request=4,
        req_id="a",
        got=2,
        bound=3,
    ):
        as_int(2, "num_reqs", least=3, request=4, req_id="a")
