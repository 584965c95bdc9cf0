"""The input table of DESIGN section 4: every row, in both modes, through every way in."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from strategies import KINDS

from ragged import (
    Coercion,
    Mode,
    RaggedBatch,
    RaggedBatchBuilder,
    RaggedError,
    RaggedOverflowError,
    RaggedTypeError,
    RaggedValueError,
)

INT64_HINT = "make it int64 where it is made, or pass mode='coerce'"
INT64_MAX = 2**63 - 1
BEYOND = 2**63 + 7


@dataclass(frozen=True)
class Way:
    """One argument of one way to make a batch: its name, what messages call it, and the call.

    ``call(value, options)`` makes a batch in which ``value`` is that argument, with legal others; ``values`` are the
    numbers that fit there. ``request`` is the request whose tokens the argument is; None for a column or flat tokens.
    """

    argument: str
    subject: str
    values: list[int]
    call: Callable[[Any, dict[str, Any]], RaggedBatch]
    request: int | None = None


def _built(options: dict[str, Any], fill: Callable[[RaggedBatchBuilder], None]) -> RaggedBatch:
    builder = RaggedBatchBuilder(**options)
    builder.add(9, [4])
    fill(builder)
    return builder.build()


def _sequences(seqs: Any, options: dict[str, Any], rows: Any = (1, 2, 3), **more: Any) -> RaggedBatch:
    return RaggedBatch.from_sequences(seqs, req_pool_indices=rows, **more, **options)


def _lengths(tokens: Any, lengths: Any, options: dict[str, Any], rows: Any = (1, 2), **more: Any) -> RaggedBatch:
    return RaggedBatch.from_lengths(tokens, lengths, req_pool_indices=rows, **more, **options)


def _offsets(tokens: Any, offsets: Any, options: dict[str, Any], rows: Any = (1, 2), **more: Any) -> RaggedBatch:
    return RaggedBatch.from_offsets(tokens, offsets, req_pool_indices=rows, **more, **options)


TOKENS, COLUMN, OFFSETS = [7, 8], [1, 2], [0, 1, 2]

SEQUENCE_WAYS = {
    "from_sequences": Way(
        "token_ids", "token_ids of request 1", TOKENS, lambda v, options: _sequences([[5], v, []], options), 1
    ),
    "add": Way(
        "token_ids", "token_ids of request 1", TOKENS, lambda v, options: _built(options, lambda b: b.add(2, v)), 1
    ),
    "add_parts": Way(
        "token_ids", "token_ids of request 1", TOKENS, lambda v, options: _built(options, lambda b: b.add(2, [5], v)), 1
    ),
    "extend": Way(
        "token_ids",
        "token_ids of request 2",
        TOKENS,
        lambda v, options: _built(options, lambda b: b.extend([1, 2], [[5], v])),
        2,
    ),
}
FLAT_WAYS = {
    "from_lengths": Way("token_ids", "token_ids", TOKENS, lambda v, options: _lengths(v, [1, 1], options)),
    "from_offsets": Way("token_ids", "token_ids", TOKENS, lambda v, options: _offsets(v, [0, 1, 2], options)),
}
COLUMN_WAYS = {
    "rows_of_from_sequences": Way(
        "req_pool_indices", "req_pool_indices", COLUMN, lambda v, options: _sequences([[5], [6]], options, v)
    ),
    "rows_of_from_lengths": Way(
        "req_pool_indices", "req_pool_indices", COLUMN, lambda v, options: _lengths([5, 6], [1, 1], options, v)
    ),
    "rows_of_from_offsets": Way(
        "req_pool_indices", "req_pool_indices", COLUMN, lambda v, options: _offsets([5, 6], [0, 1, 2], options, v)
    ),
    "rows_of_extend": Way(
        "req_pool_indices",
        "req_pool_indices",
        COLUMN,
        lambda v, options: _built(options, lambda b: b.extend(v, [[5], [6]])),
    ),
    "prefix_lens_of_from_sequences": Way(
        "prefix_lens",
        "prefix_lens",
        COLUMN,
        lambda v, options: _sequences([[5], [6]], options, [1, 2], prefix_lens=v),
    ),
    "prefix_lens_of_from_lengths": Way(
        "prefix_lens", "prefix_lens", COLUMN, lambda v, options: _lengths([5, 6], [1, 1], options, prefix_lens=v)
    ),
    "prefix_lens_of_from_offsets": Way(
        "prefix_lens", "prefix_lens", COLUMN, lambda v, options: _offsets([5, 6], [0, 1, 2], options, prefix_lens=v)
    ),
    "prefix_lens_of_extend": Way(
        "prefix_lens",
        "prefix_lens",
        COLUMN,
        lambda v, options: _built(options, lambda b: b.extend([1, 2], [[5], [6]], prefix_lens=v)),
    ),
    "lengths": Way("lengths", "lengths", COLUMN, lambda v, options: _lengths([5, 6, 7], v, options)),
    "offsets": Way("offsets", "offsets", OFFSETS, lambda v, options: _offsets([5, 6], v, options)),
}
WAYS = SEQUENCE_WAYS | FLAT_WAYS | COLUMN_WAYS


def offered(batch: RaggedBatch, way: Way, count: int) -> list[int]:
    """The numbers that arrived through that argument."""
    column = {
        "token_ids": batch.token_ids.tolist(),
        "req_pool_indices": batch.req_pool_indices.tolist(),
        "prefix_lens": batch.prefix_lens.tolist(),
        "lengths": batch.layout.lengths.tolist(),
        "offsets": batch.offsets.tolist(),
    }[way.argument]
    return column[len(column) - count :]


every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
every_mode = pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.value)


# Row 1: int64, 1-D, contiguous; Python ints in a list, tuple or range. Taken in both modes.

PLAIN = KINDS | {"range": lambda values: range(values[0], values[-1] + 1)}


@every_mode
@every_way
@pytest.mark.parametrize("kind", PLAIN)
def test_int64_and_python_integers_are_taken(kind: str, way: Way, mode: Mode) -> None:
    batch = way.call(PLAIN[kind](way.values), {"mode": mode})
    assert offered(batch, way, len(way.values)) == way.values
    assert batch.coercions == ()


# Rows 2, 3, 6: another integer dtype, uint64, not contiguous. Refused strictly; converted and recorded.


@dataclass(frozen=True)
class Convertible:
    make: Callable[[list[int]], Any]
    refusal: Callable[[Way, Any], tuple[type[RaggedError], str, dict[str, Any]]]
    source: str
    target: str = "int64"


def _wrong_dtype(way: Way, value: Any) -> tuple[type[RaggedError], str, dict[str, Any]]:
    parts = {"got": str(value.dtype), "bound": "int64", "note": INT64_HINT}
    return RaggedTypeError, f"{way.subject} must be int64, got {value.dtype}", parts


def _strided(way: Way, value: Any) -> tuple[type[RaggedError], str, dict[str, Any]]:
    strides = value.stride() if isinstance(value, torch.Tensor) else tuple(step // 8 for step in value.strides)
    note = f"call .contiguous() on {way.subject}, or pass mode='coerce'"
    return (
        RaggedValueError,
        f"{way.subject} must be contiguous, got strides {strides}",
        {"got": strides, "bound": (1,), "note": note},
    )


def _numpy(dtype: str) -> Convertible:
    return Convertible(lambda values: np.array(values, dtype=dtype), _wrong_dtype, dtype)


def _torch(dtype: torch.dtype) -> Convertible:
    name = str(dtype).removeprefix("torch.")
    return Convertible(lambda values: torch.tensor(values).to(dtype), _wrong_dtype, name)


def _every_other(values: list[int]) -> Any:
    return np.repeat(np.array(values, dtype=np.int64), 2)[::2]


CONVERTIBLE = {
    **{dtype: _numpy(dtype) for dtype in ("int8", "int16", "int32", "uint8", "uint16", "uint32", "uint64", ">i8")},
    **{
        f"torch_{dtype}".replace("torch.", ""): _torch(dtype)
        for dtype in (torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
    },
    "every_other": Convertible(_every_other, _strided, "strided", "contiguous"),
    "backwards": Convertible(lambda values: np.array(values[::-1])[::-1], _strided, "strided", "contiguous"),
    "a_column": Convertible(
        lambda values: torch.tensor([values, values]).T.contiguous()[:, 1], _strided, "strided", "contiguous"
    ),
}


@every_way
@pytest.mark.parametrize("row", CONVERTIBLE.values(), ids=CONVERTIBLE)
def test_what_could_be_converted_is_refused_strictly(refused: Any, row: Convertible, way: Way) -> None:
    value = row.make(way.values)
    kind, text, parts = row.refusal(way, value)
    with refused(kind, text, argument=way.argument, request=way.request, **parts):
        way.call(value, {})


@every_way
@pytest.mark.parametrize("row", CONVERTIBLE.values(), ids=CONVERTIBLE)
def test_what_could_be_converted_is_converted_exactly_and_recorded(row: Convertible, way: Way) -> None:
    batch = way.call(row.make(way.values), {"mode": "coerce"})
    assert offered(batch, way, len(way.values)) == way.values
    assert batch.coercions == (Coercion(way.argument, row.source, row.target, 8 * len(way.values)),)


@every_mode
@every_way
def test_uint64_beyond_int64_is_refused_in_both_modes(refused: Any, way: Way, mode: Mode) -> None:
    value = np.array([*way.values[:-1], BEYOND], dtype=np.uint64)
    if mode is Mode.STRICT:
        kind, text, parts = _wrong_dtype(way, value)
    else:
        text = f"{way.subject} must fit int64, got {BEYOND} at position {len(way.values) - 1}"
        kind, parts = RaggedOverflowError, {"got": BEYOND, "bound": INT64_MAX}
    with refused(kind, text, argument=way.argument, request=way.request, **parts):
        way.call(value, {"mode": mode})


# Row 4: bool, float, complex, str, None, also inside a list. The same TypeError in both modes.

NOT_INTEGERS = {
    "bool": lambda n: np.ones(n, dtype=bool),
    "float": lambda n: np.ones(n),
    "complex": lambda n: np.ones(n, dtype=complex),
    "text": lambda n: np.full(n, "1"),
    "object": lambda n: np.ones(n, dtype=object),
    "bool_tensor": lambda n: torch.ones(n, dtype=torch.bool),
    "float_tensor": lambda n: torch.ones(n),
    "half_tensor": lambda n: torch.ones(n, dtype=torch.bfloat16),
    "complex_tensor": lambda n: torch.ones(n, dtype=torch.complex64),
}


@every_mode
@every_way
@pytest.mark.parametrize("make", NOT_INTEGERS.values(), ids=NOT_INTEGERS)
def test_an_array_of_what_is_no_integer_is_refused(refused: Any, make: Any, way: Way, mode: Mode) -> None:
    value = make(len(way.values))
    text = f"{way.subject} must be int64, got {value.dtype}"
    parts = {"got": str(value.dtype), "bound": "int64"}
    with refused(RaggedTypeError, text, argument=way.argument, request=way.request, **parts):
        way.call(value, {"mode": mode})


@every_mode
@every_way
@pytest.mark.parametrize("value", [None, "12", 5, 5.0, {1, 2}], ids=lambda value: type(value).__name__)
def test_what_is_no_sequence_is_refused(refused: Any, value: Any, way: Way, mode: Mode) -> None:
    if value is None and way.argument == "prefix_lens":
        return  # not given
    name = type(value).__name__
    text = f"{way.subject} must be a list, tuple, range, array or tensor of integers, got {name}"
    with refused(RaggedTypeError, text, argument=way.argument, request=way.request, got=name):
        way.call(value, {"mode": mode})


ELEMENTS = {"bool": True, "float": 1.0, "complex": 1j, "text": "1", "None": None, "numpy_bool": np.True_, "list": [1]}


def _named(way: Way, name: str, position: int, says: str) -> tuple[str, int | None]:
    """The message about one element of a list, and the request that it names."""
    if way.request is not None:
        return f"{way.argument} {says} at request {way.request}, position {position}", way.request
    if way.argument == "token_ids":  # flat, one token a request here
        return f"{way.argument} {says} at request {position}, position 0", position
    request = position + (1 if name.endswith("_of_extend") else 0)  # one request was there already
    return f"{way.argument} {says} at request {request}", request


@every_mode
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("element", ELEMENTS.values(), ids=ELEMENTS)
def test_what_is_no_integer_in_a_list_is_refused_by_request_and_position(
    refused: Any, element: Any, name: str, mode: Mode
) -> None:
    way = WAYS[name]
    says = f"must be integers, got {type(element).__name__} {element!r}"
    text, request = _named(way, name, 1, says)
    values = [*way.values]
    values[1] = element
    with refused(RaggedTypeError, text, argument=way.argument, request=request, got=element, bound="int64"):
        way.call(values, {"mode": mode})


@every_mode
@pytest.mark.parametrize("name", WAYS)
def test_a_number_in_a_list_beyond_int64_is_an_overflow_by_request_and_position(
    refused: Any, name: str, mode: Mode
) -> None:
    way = WAYS[name]
    text, request = _named(way, name, 1, f"must fit int64, got {BEYOND}")
    values = [*way.values]
    values[1] = BEYOND
    with refused(RaggedOverflowError, text, argument=way.argument, request=request, got=BEYOND, bound=INT64_MAX):
        way.call(values, {"mode": mode})


# Row 5: the right dtype on the wrong device. The meta device stands for one that is not the host.


@every_mode
@every_way
def test_another_device_is_named_with_the_hosts(refused: Any, way: Way, mode: Mode) -> None:
    value = torch.empty(len(way.values), dtype=torch.int64, device="meta")
    parts: dict[str, Any] = {"got": "meta"}
    if mode is Mode.STRICT:
        text = f"{way.subject} is on meta, host data is on cpu"
        parts |= {"bound": "cpu", "note": f"move {way.subject} to cpu, or pass mode='coerce'"}
    else:
        text = f"{way.subject} is on meta, which holds no data"  # a device with data would be read
    with refused(RaggedValueError, text, argument=way.argument, request=way.request, **parts):
        way.call(value, {"mode": mode})


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*FLAT_WAYS, *COLUMN_WAYS, *SEQUENCE_WAYS])
def test_data_on_a_gpu_is_moved_to_a_batch_on_the_cpu_only_in_coerce_mode(refused: Any, name: str) -> None:
    way = WAYS[name]
    value = torch.tensor(way.values, device="cuda")
    device = str(value.device)
    with refused(
        RaggedValueError,
        f"{way.subject} is on {device}, host data is on cpu",
        argument=way.argument,
        request=way.request,
        got=device,
        bound="cpu",
        note=f"move {way.subject} to cpu, or pass mode='coerce'",
    ):
        way.call(value, {})
    batch = way.call(value, {"mode": "coerce"})
    assert offered(batch, way, len(way.values)) == way.values
    assert batch.coercions == (Coercion(way.argument, device, "cpu", 8 * len(way.values)),)


# Row 7: dimensions and lengths. ValueError in both modes, before the dtype.


@every_mode
@every_way
@pytest.mark.parametrize("dtype", ["int64", "int32", "float64"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_the_wrong_number_of_dimensions_is_refused_first(
    refused: Any, library: str, dtype: str, way: Way, mode: Mode
) -> None:
    # Case 26: a wrong dtype at once changes nothing.
    value: Any = np.zeros((len(way.values), 1), dtype=dtype)
    value = torch.from_numpy(value) if library == "torch" else value
    text = f"{way.subject} must be 1-D, got shape {tuple(value.shape)}"
    with refused(RaggedValueError, text, argument=way.argument, request=way.request, got=tuple(value.shape), bound=1):
        way.call(value, {"mode": mode})


LENGTHS: dict[str, tuple[Callable[[dict[str, Any]], Any], str, str, int, int]] = {
    "sequences_without_rows": (
        lambda o: _sequences([[1], [2], [3]], o, [1, 2]),
        "sequences",
        "number of req_pool_indices",
        3,
        2,
    ),
    "prefix_lens_of_sequences": (
        lambda o: _sequences([[1], [2]], o, [1, 2], prefix_lens=[0]),
        "prefix_lens",
        "number of requests",
        1,
        2,
    ),
    "ids_of_sequences": (
        lambda o: _sequences([[1], [2]], o, [1, 2], req_ids=["a"]),
        "req_ids",
        "number of req_pool_indices",
        1,
        2,
    ),
    # Case 29: a flat of 8 with offsets [0, 2, 5].
    "tokens_of_offsets": (lambda o: _offsets(range(8), [0, 2, 5], o), "token_ids", "last of offsets", 8, 5),
    "tokens_of_lengths": (lambda o: _lengths(range(8), [2, 3], o), "token_ids", "sum of lengths", 8, 5),
    "rows_of_lengths": (
        lambda o: _lengths(range(5), [2, 3], o, [1]),
        "req_pool_indices",
        "number of requests",
        1,
        2,
    ),
    "prefix_lens_of_lengths": (
        lambda o: _lengths(range(5), [2, 3], o, prefix_lens=[0, 0, 0]),
        "prefix_lens",
        "number of requests",
        3,
        2,
    ),
    "ids_of_lengths": (
        lambda o: _lengths(range(5), [2, 3], o, req_ids=["a"]),
        "req_ids",
        "number of requests",
        1,
        2,
    ),
    # Case 6 and 27: 2 rows with 0, 1, 2, 4 offsets.
    **{
        f"{len(offsets)}_offsets": (
            lambda o, offsets=offsets: _offsets(range(5), offsets, o),
            "offsets",
            "number of req_pool_indices + 1",
            len(offsets),
            3,
        )
        for offsets in ([], [0], [0, 5], [0, 2, 4, 5])
    },
    "no_offsets_for_no_rows": (lambda o: _offsets([], [], o, []), "offsets", "number of req_pool_indices + 1", 0, 1),
    "rows_of_extend": (
        lambda o: _built(o, lambda b: b.extend([1, 2], [[5]])),
        "sequences",
        "number of req_pool_indices",
        1,
        2,
    ),
    "prefix_lens_of_extend": (
        lambda o: _built(o, lambda b: b.extend([1, 2], [[5], [6]], prefix_lens=[0])),
        "prefix_lens",
        "number of requests",
        1,
        2,
    ),
    "ids_of_extend": (
        lambda o: _built(o, lambda b: b.extend([1, 2], [[5], [6]], req_ids=["a", "b", "c"])),
        "req_ids",
        "number of req_pool_indices",
        3,
        2,
    ),
}


@every_mode
@pytest.mark.parametrize(("call", "argument", "meaning", "got", "bound"), LENGTHS.values(), ids=LENGTHS)
def test_a_wrong_length_is_refused_with_both_numbers(
    refused: Any, call: Any, argument: str, meaning: str, got: int, bound: int, mode: Mode
) -> None:
    text = f"{argument} length {got} != {meaning} ({bound})"
    with refused(RaggedValueError, text, argument=argument, got=got, bound=bound):
        call({"mode": mode})


# Row 8: token ids beyond the vocabulary, negative, wide.

TOKEN_ROWS: dict[str, tuple[dict[str, Any], int, str, int, str | None]] = {
    "beyond_the_vocabulary": ({"vocab_size": 100}, 100, "must be below vocab_size 100", 100, None),
    "negative": ({}, -2, "must not be negative", 0, None),
    "placeholder": (
        {},
        -1,
        "must not be negative",
        0,
        "pass allow_placeholders=True where -1 means 'not known yet'",
    ),
    "wide": (
        {},
        2**31,
        "must be at most 2147483647",
        2**31 - 1,
        "pass wide_tokens='opaque' where wider ids are meant",
    ),
}


@every_mode
@pytest.mark.parametrize(
    "make", [list, lambda v: np.array(v), lambda v: torch.tensor(v)], ids=["list", "numpy", "torch"]
)
@pytest.mark.parametrize("name", [*SEQUENCE_WAYS, *FLAT_WAYS])
@pytest.mark.parametrize(("options", "token", "says", "bound", "note"), TOKEN_ROWS.values(), ids=TOKEN_ROWS)
def test_a_token_that_is_not_allowed_is_named_by_request_position_and_value(
    refused: Any,
    options: dict[str, Any],
    token: int,
    says: str,
    bound: int,
    note: str | None,
    name: str,
    make: Any,
    mode: Mode,
) -> None:
    way = WAYS[name]
    request = 1 if way.request is None else way.request
    position = {"add_parts": 2}.get(name, 1 if way.request is not None else 0)
    text = f"token_ids {says}, got {token} at request {request}, position {position}"
    with refused(RaggedValueError, text, argument="token_ids", request=request, got=token, bound=bound, note=note):
        way.call(make([7, token]), {"mode": mode} | options)


@every_mode
@pytest.mark.parametrize("name", [*SEQUENCE_WAYS, *FLAT_WAYS])
def test_special_tokens_that_the_caller_allows_are_kept_and_counted(name: str, mode: Mode) -> None:
    # Case 12, 49, 57.
    way, wide = WAYS[name], 1_000_000 + 2**61
    batch = way.call([-1, wide], {"mode": mode, "allow_placeholders": True, "wide_tokens": "opaque", "vocab_size": 9})
    assert offered(batch, way, 2) == [-1, wide]
    assert (batch.num_placeholders, batch.num_wide_tokens) == (1, 1)


# Row 9: duplicate rows, rows out of range, decreasing offsets.

POOL = {"pool_shape": (4, 16)}


@every_mode
@pytest.mark.parametrize("name", [name for name in COLUMN_WAYS if name.startswith("rows")])
@pytest.mark.parametrize(
    ("rows", "says", "got", "bound"),
    [
        ([1, 1], "must be unique among requests with tokens, got 1 at both request {0} and request {1}", 1, None),
        ([1, 10], "must be below max_reqs 10, got 10 at request {1}", 10, 10),
        ([1, -1], "must not be negative, got -1 at request {1}", -1, 0),
    ],
    ids=["duplicate", "row_is_max_reqs", "negative"],
)
def test_wrong_rows_are_refused(
    refused: Any, rows: list[int], says: str, got: int, bound: int | None, name: str, mode: Mode
) -> None:
    first = 1 if name.endswith("_of_extend") else 0  # one request was there already
    text = f"req_pool_indices {says.format(first, first + 1)}"
    bound = first if bound is None else bound
    with refused(RaggedValueError, text, argument="req_pool_indices", request=first + 1, got=got, bound=bound):
        WAYS[name].call(rows, {"mode": mode, "pool_shape": (10, 16)})


@every_mode
@pytest.mark.parametrize("row", [10, -1, 9], ids=["row_is_max_reqs", "negative", "duplicate"])
def test_wrong_rows_are_refused_one_by_one_too(refused: Any, row: int, mode: Mode) -> None:
    text, bound = {
        10: ("must be below max_reqs 10, got 10 at request 1 (id 'b')", 10),
        -1: ("must not be negative, got -1 at request 1 (id 'b')", 0),
        9: ("must be unique among requests with tokens, got 9 at both request 0 (id 'a') and request 1 (id 'b')", 0),
    }[row]
    builder = RaggedBatchBuilder(mode=mode, pool_shape=(10, 16))
    builder.add(9, [4], req_id="a")
    with refused(
        RaggedValueError,
        f"req_pool_indices {text}",
        argument="req_pool_indices",
        request=1,
        req_id="b",
        got=row,
        bound=bound,
    ):
        builder.add(row, [5], req_id="b")


@every_mode
@pytest.mark.parametrize(
    ("offsets", "says", "culprit", "got", "bound"),
    [
        ([0, 3, 2], "must not decrease, got 3 then 2 at request 1", 1, 2, 3),
        ([1, 2, 2], "must start at 0, got 1 at request 0", 0, 1, 0),
    ],
    ids=["decreasing", "not_from_zero"],
)
def test_wrong_offsets_are_refused(
    refused: Any, offsets: list[int], says: str, culprit: int, got: int, bound: int, mode: Mode
) -> None:
    with refused(RaggedValueError, f"offsets {says}", argument="offsets", request=culprit, got=got, bound=bound):
        _offsets([5, 6], offsets, {"mode": mode})


@every_mode
def test_negative_lengths_are_refused_by_name_whatever_they_sum_to(refused: Any, mode: Mode) -> None:
    for lengths in ([3, -1], [4, -3]):
        text = f"lengths must not be negative, got {lengths[1]} at request 1"
        with refused(RaggedValueError, text, argument="lengths", request=1, got=lengths[1], bound=0):
            _lengths([5, 6], lengths, {"mode": mode})


@every_mode
def test_the_checks_still_run_where_there_is_nothing_to_do(refused: Any, mode: Mode) -> None:
    # Case 24: int32 offsets [0].
    offsets = np.array([0], dtype=np.int32)
    if mode is Mode.COERCE:
        assert _offsets([], offsets, {"mode": mode}, []).coercions == (Coercion("offsets", "int32", "int64", 8),)
        return
    parts = {"got": "int32", "bound": "int64", "note": INT64_HINT}
    with refused(RaggedTypeError, "offsets must be int64, got int32", argument="offsets", **parts):
        _offsets([], offsets, {"mode": mode}, [])
