"""How each kind of input becomes int64, and the record of what was paid for it."""

import array
import ctypes
import logging
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from strategies import KINDS, DLPackOnly

from ragged import Coercion, Mode, RaggedBatch, RaggedBatchBuilder, RaggedOverflowError, RaggedTypeError, WideTokens
from ragged import Overflow as OverflowPolicy
from ragged import RaggedValueError as ValueRefusal
from ragged.convert import Converter
from ragged.sequences import read_part

STRICT, COERCE = Mode.STRICT, Mode.COERCE
INT64_HINT = "make it int64 where it is made, or pass mode='coerce'"
META = torch.device("meta")


@pytest.mark.parametrize(
    ("choices", "argument", "names"),
    [
        (Mode, "mode", "'strict', 'coerce'"),
        (OverflowPolicy, "overflow", "'raise', 'truncate'"),
        (WideTokens, "wide_tokens", "'refuse', 'opaque'"),
    ],
    ids=["mode", "overflow", "wide_tokens"],
)
def test_a_choice_is_taken_by_name_in_any_case_and_refused_by_its_arguments_name(
    refused: Any, choices: Any, argument: str, names: str
) -> None:
    for choice in choices:
        assert (
            choices(choice) is choices(choice.value) is choices(choice.name) is choices(choice.value.title()) is choice
        )
    for wrong in ("lenient", None, 0, True):
        text = f"{argument} must be one of {names}, got {wrong!r}"
        with refused(ValueRefusal, text, argument=argument, got=wrong, bound=names):
            choices(wrong)
        with refused(ValueRefusal, text, argument=argument, got=wrong, bound=names):
            RaggedBatchBuilder(**{argument: wrong})


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [[], [5], [5, 6, 7]], ids=["none", "one", "three"])
def test_strict_and_coerce_take_int64_of_every_kind_unchanged(mode: Mode, kind: str, tokens: list[int]) -> None:
    convert = Converter(mode)
    taken = convert.host(KINDS[kind](tokens), "token_ids")
    assert (taken.dtype, taken.ndim, taken.tolist()) == (np.int64, 1, tokens)
    assert convert.coercions == []


def test_what_is_int64_already_is_not_copied() -> None:
    values = np.array([5, 6], dtype=np.int64)
    assert Converter(STRICT).host(values, "token_ids") is values
    tensor = torch.tensor([5, 6])
    assert Converter(STRICT).host(tensor, "token_ids").ctypes.data == tensor.data_ptr()
    items = array.array("q", [5, 6])
    assert np.shares_memory(Converter(STRICT).host(items, "token_ids"), np.frombuffer(items, dtype=np.int64))


@pytest.mark.parametrize(
    "values", [range(0), range(4), range(5, 0, -2), range(-3, 3), range(2**63 - 2, 2**63 - 1)], ids=repr
)
def test_a_range_is_taken_in_any_direction(values: range) -> None:
    assert Converter(STRICT).host(values, "lengths").tolist() == list(values)


@pytest.mark.parametrize(
    "values", [range(2**63, 2**63 + 2), range(2**63 - 1, 2**63 + 1), range(-(2**63) - 1, -(2**63) + 1)]
)
def test_a_range_beyond_int64_is_an_overflow_that_names_the_value(refused: Any, values: range) -> None:
    got = next(value for value in values if not -(2**63) <= value < 2**63)
    where = f"request 1, position {values.index(got)}"
    with refused(
        RaggedOverflowError,
        f"token_ids must fit int64, got {got} at {where}",
        argument="token_ids",
        request=1,
        got=got,
        bound=2**63 - 1,
    ):
        Converter(STRICT).host(values, "token_ids", 1)


@pytest.mark.parametrize("make", [list, tuple], ids=["list", "tuple"])
@pytest.mark.parametrize(
    "wrong", [True, np.True_, 1.0, np.float32(1), 1j, "7", None, [7], torch.tensor(7), np.timedelta64(7, "s")], ids=repr
)
@pytest.mark.parametrize("mode", Mode)
def test_what_is_no_integer_inside_a_list_is_refused_in_both_modes(
    refused: Any, make: Any, wrong: Any, mode: Mode
) -> None:
    text = f"token_ids must be integers, got {type(wrong).__name__} {wrong!r} at request 3 (id 'a'), position 1"
    with refused(RaggedTypeError, text, argument="token_ids", request=3, req_id="a", got=wrong, bound="int64"):
        Converter(mode).host(make([5, wrong, 6]), "token_ids", 3, "a")


@pytest.mark.parametrize("wrong", [2**63, -(2**63) - 1, np.uint64(2**63 + 5)])
def test_a_number_in_a_list_that_does_not_fit_int64_is_an_overflow(refused: Any, wrong: int) -> None:
    with refused(
        RaggedOverflowError,
        f"token_ids must fit int64, got {wrong} at request 3, position 1",
        argument="token_ids",
        request=3,
        got=wrong,
        bound=2**63 - 1,
    ):
        Converter(COERCE).host([5, wrong], "token_ids", 3)


def test_numpy_scalars_in_a_list_carry_their_own_width() -> None:
    # Case 34: uint8 200 and 100 make 300, not 44.
    batch = RaggedBatch.from_lengths(
        np.zeros(300, dtype=np.int64), [np.uint8(200), np.uint8(100)], req_pool_indices=[1, 2]
    )
    assert batch.offsets.tolist() == [0, 200, 300]


DTYPES = ("int8", "int16", "int32", "uint8", "uint16", "uint32", "uint64")


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_another_integer_dtype_is_refused_strictly_and_widened_exactly(refused: Any, library: str, dtype: str) -> None:
    info = np.iinfo(dtype)
    values = [0, 1, min(info.max, 2**63 - 1), max(info.min, -(2**63))]
    made = np.array(values, dtype=dtype)
    value = torch.from_numpy(made.copy()) if library == "torch" else made
    name = f"torch.{dtype}" if library == "torch" else dtype
    with refused(
        RaggedTypeError,
        f"lengths must be int64, got {name}",
        argument="lengths",
        got=name,
        bound="int64",
        note=INT64_HINT,
    ):
        Converter(STRICT).host(value, "lengths")
    convert = Converter(COERCE)
    assert convert.host(value, "lengths").tolist() == values
    assert convert.coercions == [Coercion("lengths", dtype, "int64", 32)]


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_uint64_beyond_int64_is_an_overflow_and_not_recorded(refused: Any, library: str) -> None:
    value: Any = np.array([5, 2**63, 6], dtype=np.uint64)
    value = torch.from_numpy(value) if library == "torch" else value
    convert = Converter(COERCE)
    with refused(
        RaggedOverflowError,
        f"token_ids of request 2 must fit int64, got {2**63} at position 1",
        argument="token_ids",
        request=2,
        got=2**63,
        bound=2**63 - 1,
    ):
        convert.host(value, "token_ids", 2)
    assert convert.coercions == []


def test_a_big_endian_array_is_swapped_and_recorded() -> None:
    # Case 33.
    convert = Converter(COERCE)
    assert convert.host(np.array([5, 2**40], dtype=">i8"), "token_ids").tolist() == [5, 2**40]
    assert convert.coercions == [Coercion("token_ids", ">i8", "int64", 16)]


def test_the_dtype_is_judged_before_its_values_are_widened() -> None:
    # Case 57: 36917 in an int16 array reads as -28619; widening keeps the sign, and the token rules refuse it.
    wrapped = np.array([36917], dtype=np.uint16).view(np.int16)
    with pytest.raises(ValueRefusal, match=r"^token_ids must not be negative, got -28619 at request 0, position 0$"):
        RaggedBatch.from_sequences([wrapped], req_pool_indices=[1], mode="coerce")


STRIDED = {
    "every_other": lambda: np.arange(12)[::2],
    "backwards": lambda: np.arange(6)[::-1],
    "a_column": lambda: torch.arange(12).reshape(4, 3)[:, 1],
    "expanded": lambda: torch.tensor([5]).expand(3),
}


@pytest.mark.parametrize("make", STRIDED.values(), ids=STRIDED)
def test_a_strided_array_is_refused_strictly_and_copied_exactly(refused: Any, make: Any) -> None:
    # Case 33, case 37: offsets that are a column of a 2-D tensor.
    value = make()
    strides = value.stride() if isinstance(value, torch.Tensor) else tuple(s // 8 for s in value.strides)
    with refused(
        ValueRefusal,
        f"offsets must be contiguous, got strides {strides}",
        argument="offsets",
        got=strides,
        bound=(1,),
        note="call .contiguous() on offsets, or pass mode='coerce'",
    ):
        Converter(STRICT).host(value, "offsets")
    convert = Converter(COERCE)
    taken = convert.host(value, "offsets")
    assert taken.tolist() == value.tolist()
    assert taken.flags.c_contiguous
    assert convert.coercions == [Coercion("offsets", "strided", "contiguous", taken.nbytes)]


def test_a_strided_narrow_array_is_converted_once() -> None:
    convert = Converter(COERCE)
    assert convert.host(np.arange(12, dtype=np.int16)[::3], "offsets").tolist() == [0, 3, 6, 9]
    assert [coercion.argument for coercion in convert.coercions] == ["offsets"] * len(convert.coercions)
    assert convert.coercions[0] == Coercion("offsets", "int16", "int64", 32)


def test_read_only_and_empty_arrays_are_taken_without_a_warning() -> None:
    # Case 33: torch.from_numpy warns about read-only memory.
    read_only = np.array([5, 6], dtype=np.int64)
    read_only.setflags(write=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = RaggedBatch.from_sequences(
            [read_only, np.empty(0, dtype=np.int64), memoryview(b"").cast("q"), [7]], req_pool_indices=[1, 2, 3, 4]
        )
        builder = RaggedBatchBuilder()
        builder.add(1, read_only, np.empty(0, dtype=np.int64))
        other = builder.build()
    batch.token_ids.fill_(0)
    other.token_ids.fill_(0)
    assert read_only.tolist() == [5, 6]


NOT_INTEGERS = {
    "bool": np.array([True]),
    "float": np.array([1.0]),
    "complex": np.array([1j]),
    "text": np.array(["a"]),
    "object": np.array([5], dtype=object),
    "time": np.array([5], dtype="m8[s]"),
    "record": np.zeros(1, dtype=[("a", "i8")]),
    "tensor_bool": torch.tensor([True]),
    "tensor_float": torch.tensor([1.0]),
    "empty_tensor_is_float": torch.tensor([]),
    "empty_numpy_is_float": np.array([]),
}


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("value", NOT_INTEGERS.values(), ids=NOT_INTEGERS)
def test_an_array_of_what_is_no_integer_is_refused_in_both_modes(refused: Any, value: Any, mode: Mode) -> None:
    # Case 32: an empty tensor is float32.
    text = f"token_ids of request 1 (id 7) must be int64, got {value.dtype}"
    with refused(RaggedTypeError, text, argument="token_ids", request=1, req_id=7, got=str(value.dtype), bound="int64"):
        Converter(mode).host(value, "token_ids", 1, 7)


NOT_SEQUENCES = {
    "None": None,
    "str": "567",
    "int": 5,
    "float": 5.0,
    "numpy_scalar": np.int64(5),
    "set": {5, 6},
    "dict": {5: 6},
    "generator": (i for i in range(3)),
    "object": object(),
    "masked": np.ma.array([5, 6], mask=[False, True]),
}


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("value", NOT_SEQUENCES.values(), ids=NOT_SEQUENCES)
def test_what_is_no_sequence_of_integers_is_refused_in_both_modes(refused: Any, value: Any, mode: Mode) -> None:
    name = type(value).__name__
    text = f"token_ids of request 1 must be a list, tuple, range, array or tensor of integers, got {name}"
    with refused(RaggedTypeError, text, argument="token_ids", request=1, got=name):
        Converter(mode).host(value, "token_ids", 1)


NOT_DENSE = {
    "sparse": (torch.tensor([5, 6]).to_sparse(), "torch.sparse_coo"),
    "sparse_rows": (torch.tensor([[5, 6]]).to_sparse_csr(), "torch.sparse_csr"),
    "jagged": (torch.nested.nested_tensor_from_jagged(torch.arange(3), torch.tensor([0, 1, 3])), "torch.jagged"),
}


@pytest.mark.parametrize(("value", "layout"), NOT_DENSE.values(), ids=NOT_DENSE)
@pytest.mark.parametrize("mode", Mode)
def test_a_tensor_that_is_not_dense_is_refused_in_both_modes(refused: Any, value: Any, layout: str, mode: Mode) -> None:
    with refused(
        RaggedTypeError,
        f"token_ids of request 1 must be a dense tensor, got layout {layout}",
        argument="token_ids",
        request=1,
        got=layout,
        bound="torch.strided",
    ):
        Converter(mode).host(value, "token_ids", 1)


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("value", [np.zeros((2, 3), dtype=np.int32), torch.zeros(2, 3)], ids=["numpy", "torch"])
def test_the_dimensions_are_judged_first(refused: Any, value: Any, mode: Mode) -> None:
    # Case 26.
    with refused(ValueRefusal, "lengths must be 1-D, got shape (2, 3)", argument="lengths", got=(2, 3), bound=1):
        Converter(mode).host(value, "lengths")


def test_buffers_of_other_widths_are_integers_of_another_dtype() -> None:
    with pytest.raises(RaggedTypeError, match=r"^lengths must be int64, got uint8"):
        Converter(STRICT).host(b"\x05\x06", "lengths")
    assert Converter(COERCE).host(b"\x05\x06", "lengths").tolist() == [5, 6]
    assert Converter(COERCE).host(array.array("h", [5, -6]), "lengths").tolist() == [5, -6]
    assert Converter(STRICT).host((ctypes.c_int64 * 2)(5, 6), "lengths").tolist() == [5, 6]


def test_a_buffer_that_cannot_be_read_is_refused_with_its_cause(refused: Any) -> None:
    released = memoryview(bytearray(8))
    released.release()
    with refused(
        ValueRefusal,
        "token_ids of request 1 could not be read as a buffer: operation forbidden on released memoryview object",
        argument="token_ids",
        request=1,
        got="memoryview",
    ):
        Converter(STRICT).host(released, "token_ids", 1)


class Refusing:
    """An exporter that raises."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __dlpack__(self, **_: Any) -> Any:
        raise self.error

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


@pytest.mark.parametrize("cause", [BufferError("no"), TypeError("no"), RuntimeError("no"), ValueError("no")], ids=repr)
@pytest.mark.parametrize("mode", Mode)
def test_a_failing_dlpack_export_is_one_refusal_with_the_cause_chained(
    refused: Any, contents: Any, cause: Exception, mode: Mode
) -> None:
    # Case 55.
    builder = RaggedBatchBuilder(mode=mode)
    builder.add(1, [5])
    with refused(
        ValueRefusal,
        "token_ids of request 1 could not be read through __dlpack__: no",
        argument="token_ids",
        request=1,
        got="Refusing",
    ) as caught:
        builder.add(2, Refusing(cause))
    assert caught.value.__cause__ is cause
    assert contents(builder.build())["token_ids"] == [5]


def test_a_dlpack_tensor_that_requires_grad_is_refused_with_the_cause_chained() -> None:
    # Case 55: torch refuses that export itself.
    value = DLPackOnly(torch.zeros(2, requires_grad=True))
    with pytest.raises(ValueRefusal, match=r"^token_ids of request 0 could not be read through __dlpack__: ") as caught:
        RaggedBatch.from_sequences([value], req_pool_indices=[1])
    assert caught.value.__cause__ is not None


@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) < "2.1.0", reason="older ones export no read-only array through DLPack"
)
def test_a_read_only_dlpack_export_is_taken_exactly_and_never_written_to() -> None:
    # Case 55.
    memory = np.array([5, 6], dtype=np.int64)
    memory.setflags(write=False)
    batch = RaggedBatch.from_sequences([DLPackOnly(memory)], req_pool_indices=[1])
    batch.token_ids.fill_(0)
    assert memory.tolist() == [5, 6]


@pytest.mark.parametrize("dtype", ["bool", "float32", "int32"])
def test_a_dlpack_export_of_another_dtype_is_refused_by_name(refused: Any, dtype: str) -> None:
    # Case 55.
    hint = INT64_HINT if dtype == "int32" else None
    text = f"token_ids of request 0 must be int64, got {dtype}"
    with refused(RaggedTypeError, text, argument="token_ids", request=0, got=dtype, bound="int64", note=hint):
        RaggedBatch.from_sequences([DLPackOnly(np.zeros(2, dtype=dtype))], req_pool_indices=[1])


def test_a_coerced_dlpack_export_is_recorded() -> None:
    value = DLPackOnly(np.array([5, 6], dtype=np.int32))
    batch = RaggedBatch.from_sequences([value], req_pool_indices=[1], mode="coerce")
    assert batch.token_ids.tolist() == [5, 6]
    assert batch.coercions == (Coercion("token_ids", "int32", "int64", 16),)


@pytest.mark.parametrize("mode", Mode)
def test_host_data_on_another_device_names_both_and_meta_holds_no_data(refused: Any, mode: Mode) -> None:
    value = torch.empty(2, dtype=torch.int64, device="meta")
    parts = {"argument": "token_ids", "request": 1, "got": "meta"}
    if mode is STRICT:
        text = "token_ids of request 1 is on meta, host data is on cpu"
        parts |= {"bound": "cpu", "note": "move token_ids of request 1 to cpu, or pass mode='coerce'"}
    else:
        text = "token_ids of request 1 is on meta, which holds no data"
    with refused(ValueRefusal, text, **parts):
        Converter(mode).host(value, "token_ids", 1)


# A device's tokens never come to the host. The meta device has the same metadata and needs no GPU.

DEVICE_TOKENS = {
    "two_dimensions": (
        torch.empty(2, 3, dtype=torch.int64, device=META),
        ValueRefusal,
        "must be 1-D, got shape (2, 3)",
        {"got": (2, 3), "bound": 1},
    ),
    "float": (
        torch.empty(2, device=META),
        RaggedTypeError,
        "must be int64, got torch.float32",
        {"got": "torch.float32", "bound": "int64"},
    ),
    "int32": (
        torch.empty(2, dtype=torch.int32, device=META),
        RaggedTypeError,
        "must be int64, got torch.int32",
        {"got": "torch.int32", "bound": "int64", "note": INT64_HINT},
    ),
    "strided": (
        torch.empty(4, dtype=torch.int64, device=META)[::2],
        ValueRefusal,
        "must be contiguous, got strides (2,)",
        {
            "got": (2,),
            "bound": (1,),
            "note": "call .contiguous() on token_ids of request 2 (id 'a'), or pass mode='coerce'",
        },
    ),
}


@pytest.mark.parametrize(("value", "kind", "text", "parts"), DEVICE_TOKENS.values(), ids=DEVICE_TOKENS)
def test_a_devices_tokens_are_refused_with_the_same_parts_as_the_hosts(
    refused: Any, value: Any, kind: Any, text: str, parts: dict[str, Any]
) -> None:
    text = f"token_ids of request 2 (id 'a') {text}"
    with refused(kind, text, argument="token_ids", request=2, req_id="a", **parts):
        read_part(value, Converter(STRICT), META, 2, "a")


def test_a_devices_tokens_are_converted_where_they_are() -> None:
    convert = Converter(COERCE)
    taken = read_part(torch.empty(6, dtype=torch.int32, device=META), convert, META, 2)
    assert isinstance(taken, torch.Tensor)
    assert (taken.device, taken.dtype, taken.shape) == (META, torch.int64, (6,))
    assert convert.coercions == [Coercion("token_ids", "int32", "int64", 48)]


# The record.


def test_coercions_are_values() -> None:
    # Case 69.
    one, same = Coercion("offsets", "int32", "int64", 24), Coercion("offsets", "int32", "int64", 24)
    assert one == same
    assert one != Coercion("offsets", "int32", "int64", 32)
    assert one != None  # noqa: E711 - the comparison itself is what is tested
    assert len({one, same}) == 1
    assert pickle.loads(pickle.dumps(one)) == one


def test_a_batch_carries_every_conversion_that_was_paid_for_in_order() -> None:
    batch = RaggedBatch.from_offsets(
        np.arange(10, dtype=np.uint16)[::2],
        torch.tensor([0, 2, 5], dtype=torch.int32),
        req_pool_indices=np.array([1, 2], dtype=np.int8),
        prefix_lens=np.array([3, 4]),
        mode="coerce",
    )
    assert batch.token_ids.tolist() == [0, 2, 4, 6, 8]
    by_argument = {coercion.argument: coercion for coercion in batch.coercions}
    assert by_argument["offsets"] == Coercion("offsets", "int32", "int64", 24)
    assert by_argument["req_pool_indices"] == Coercion("req_pool_indices", "int8", "int64", 16)
    assert Coercion("token_ids", "uint16", "int64", 40) in batch.coercions
    assert "prefix_lens" not in by_argument


def test_a_conversion_is_logged_once_for_a_kind_and_call_site(caplog: pytest.LogCaptureFixture) -> None:
    narrow, narrower = np.array([5], dtype=np.int32), np.array([5], dtype=np.int16)

    def build(tokens: Any) -> None:
        RaggedBatch.from_sequences([tokens], req_pool_indices=[1], mode="coerce")

    def build_elsewhere(tokens: Any) -> None:
        RaggedBatch.from_sequences([tokens], req_pool_indices=[1], mode="coerce")

    with caplog.at_level(logging.DEBUG, logger="ragged"):
        for _ in range(3):
            build(narrow)
            build(narrower)
            build_elsewhere(narrow)
    lines = [record.getMessage() for record in caplog.records]
    site, elsewhere = build.__code__.co_firstlineno + 1, build_elsewhere.__code__.co_firstlineno + 1
    assert lines == [
        f"token_ids converted from int32 to int64 at every call of {__file__}:{site}",
        f"token_ids converted from int16 to int64 at every call of {__file__}:{site}",
        f"token_ids converted from int32 to int64 at every call of {__file__}:{elsewhere}",
    ]
    assert {(record.name, record.levelno) for record in caplog.records} == {("ragged.convert", logging.DEBUG)}


def test_nothing_is_logged_above_debug_and_nothing_in_strict_mode(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="ragged"):
        RaggedBatch.from_sequences([np.array([5], dtype=np.int32)], req_pool_indices=[1], mode="coerce")
    with caplog.at_level(logging.DEBUG, logger="ragged"):
        RaggedBatch.from_sequences([np.array([5])], req_pool_indices=[1])
    assert caplog.records == []
