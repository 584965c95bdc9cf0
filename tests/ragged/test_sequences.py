"""Many sequences at once: the fast ways agree with reading them one by one."""

import array
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import KINDS, Model, kinds, models

from ragged import Coercion, Mode, RaggedBatch, RaggedOverflowError, RaggedTypeError, RaggedValueError
from ragged.convert import Converter
from ragged.sequences import SMALL_JOIN, Sequences, count, mixed_devices, read_flat, read_sequences

CPU, META = torch.device("cpu"), torch.device("meta")


def read(sequences: Any, mode: Mode = Mode.STRICT, **options: Any) -> Sequences:
    return read_sequences(sequences, Converter(mode), CPU, **options)


def flat(found: Sequences) -> list[int]:
    return [token for part in found.parts for token in part.tolist()]


@given(models(), kinds(), st.sampled_from([list, tuple]))
def test_sequences_of_one_kind_are_read_whole(model: Model, kind: Any, outer: Any) -> None:
    found = read(outer(kind(tokens) for tokens in model.sequences))
    assert found.lengths.tolist() == model.lengths
    assert found.lengths.dtype == np.int64
    assert flat(found) == model.token_ids


@given(models(), st.data())
def test_sequences_of_mixed_kinds_are_read_whole(model: Model, data: st.DataObject) -> None:
    found = read([data.draw(kinds())(tokens) for tokens in model.sequences])
    assert found.lengths.tolist() == model.lengths
    assert flat(found) == model.token_ids


def test_empties_of_every_kind_are_empty_requests() -> None:
    # Case 32.
    batch = RaggedBatch.from_sequences([[5], [], (), range(0), array.array("q")], req_pool_indices=[1, 2, 3, 4, 5])
    assert batch.offsets.tolist() == [0, 1, 1, 1, 1, 1]


def test_an_empty_tensor_is_a_float_and_is_refused_by_request(refused: Any) -> None:
    # Case 32.
    with refused(
        RaggedTypeError,
        "token_ids of request 1 must be int64, got torch.float32",
        argument="token_ids",
        request=1,
        got="torch.float32",
        bound="int64",
    ):
        read([torch.tensor([5]), torch.tensor([])])


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_but_empty_sequences_of_one_kind(kind: str) -> None:
    found = read([KINDS[kind]([]) for _ in range(3)])
    assert found.lengths.tolist() == [0, 0, 0]
    assert flat(found) == []


@pytest.mark.parametrize("number", [0, 1, SMALL_JOIN // 8 - 1, SMALL_JOIN // 8, SMALL_JOIN // 8 + 1])
def test_arrays_are_joined_alike_below_and_above_the_size_at_which_the_way_changes(number: int) -> None:
    found = read([array.array("q", range(number)), array.array("q"), array.array("q", [7])])
    assert found.lengths.tolist() == [number, 0, 1]
    assert flat(found) == [*range(number), 7]


def test_arrays_of_long_are_int64_too_and_others_are_not() -> None:
    assert flat(read([array.array("l", [5]), array.array("q", [6])])) == [5, 6]
    with pytest.raises(RaggedTypeError, match=r"^token_ids of request 1 must be int64, got int32"):
        read([array.array("q", [5]), array.array("i", [6])])


FAST = {
    "lists": [[5, 6], [7, "x"]],
    "tuples": [(5, 6), (7, "x")],
    "bools": [[5, 6], [7, True]],
    "floats": [[5, 6], [7, 1.0]],
}


@pytest.mark.parametrize("sequences", FAST.values(), ids=FAST)
def test_the_fast_way_leaves_the_naming_of_a_culprit_to_the_slow_one(sequences: Any) -> None:
    # A bool or a float among integers is still found.
    with pytest.raises(RaggedTypeError, match=r"at request 1 \(id 'b'\), position 1$") as caught:
        read(sequences, req_ids=("a", "b"))
    assert (caught.value.request, caught.value.req_id, caught.value.got) == (1, "b", sequences[1][1])


def test_an_integer_too_large_is_named_by_the_slow_way(refused: Any) -> None:
    with refused(
        RaggedOverflowError,
        f"token_ids must fit int64, got {2**63} at request 6, position 0",
        argument="token_ids",
        request=6,
        got=2**63,
        bound=2**63 - 1,
    ):
        read([[5], [2**63]], first_request=5)


# A 2-D array.


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0), (1, 1), (2, 3)], ids=str)
def test_a_table_is_as_many_sequences_as_it_has_rows(library: str, shape: tuple[int, int]) -> None:
    values = np.arange(shape[0] * shape[1]).reshape(shape)
    found = read(torch.from_numpy(values) if library == "torch" else values)
    assert found.lengths.tolist() == [shape[1]] * shape[0]
    assert flat(found) == values.flatten().tolist()


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_rows_that_lie_apart_are_taken_as_they_are(library: str) -> None:
    # Each row is contiguous: nothing is copied but into the batch.
    values: Any = np.arange(24).reshape(4, 6)
    values = torch.from_numpy(values) if library == "torch" else values
    assert flat(read(values[:, 1:3])) == [1, 2, 7, 8, 13, 14, 19, 20]
    assert flat(read(values[::2, 1:3])) == [1, 2, 13, 14]


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_transposed_table_is_refused_strictly_and_copied_on_the_record(refused: Any, library: str) -> None:
    values: Any = np.arange(6).reshape(2, 3)
    values = torch.from_numpy(values).T if library == "torch" else values.T
    with refused(
        RaggedValueError,
        "token_ids of request 0 must be contiguous, got strides (3,)",
        argument="token_ids",
        request=0,
        got=(3,),
        bound=(1,),
        note="call .contiguous() on token_ids of request 0, or pass mode='coerce'",
    ):
        read(values)
    convert = Converter(Mode.COERCE)
    found = read_sequences(values, convert, CPU)
    assert flat(found) == [0, 3, 1, 4, 2, 5]
    assert convert.coercions == [Coercion("token_ids", "strided", "contiguous", 16)] * 3


def test_a_narrow_table_is_refused_strictly_and_widened_at_once() -> None:
    values = np.arange(6, dtype=np.int32).reshape(2, 3)
    with pytest.raises(RaggedTypeError, match=r"^token_ids must be int64, got int32"):
        read(values)
    convert = Converter(Mode.COERCE)
    assert flat(read_sequences(values, convert, CPU)) == [0, 1, 2, 3, 4, 5]
    assert convert.coercions == [Coercion("token_ids", "int32", "int64", 48)]


NOT_SEQUENCES: dict[str, tuple[Any, type[Exception], str, dict[str, Any]]] = {
    **{
        type(value).__name__: (
            value,
            RaggedTypeError,
            f"sequences must be a sequence of sequences, got {type(value).__name__}",
            {"argument": "sequences", "got": type(value).__name__},
        )
        for value in (None, 5, "ab", b"ab", {5}, {5: 6}, (i for i in ()), object())
    },
    "array_of_no_dimension": (
        np.array(5),
        RaggedValueError,
        "sequences must be a sequence of sequences, got shape ()",
        {"argument": "sequences", "got": (), "bound": 2},
    ),
    "tensor_of_no_dimension": (
        torch.tensor(5),
        RaggedValueError,
        "sequences must be a sequence of sequences, got shape ()",
        {"argument": "sequences", "got": (), "bound": 2},
    ),
    "three_dimensions": (
        np.zeros((1, 2, 2), dtype=np.int64),
        RaggedValueError,
        "token_ids of request 0 must be 1-D, got shape (2, 2)",
        {"argument": "token_ids", "request": 0, "got": (2, 2), "bound": 1},
    ),
    "flat_tensor": (
        torch.tensor([5]),
        RaggedValueError,
        "token_ids of request 0 must be 1-D, got shape ()",
        {"argument": "token_ids", "request": 0, "got": (), "bound": 1},
    ),
    "flat_array": (
        np.array([5]),
        RaggedTypeError,
        "token_ids of request 0 must be a list, tuple, range, array or tensor of integers, got int64",
        {"argument": "token_ids", "request": 0, "got": "int64"},
    ),
    "flat_list": (
        [5],
        RaggedTypeError,
        "token_ids of request 0 must be a list, tuple, range, array or tensor of integers, got int",
        {"argument": "token_ids", "request": 0, "got": "int"},
    ),
    "sparse": (
        torch.tensor([[5]]).to_sparse(),
        RaggedTypeError,
        "sequences must be a dense tensor, got layout torch.sparse_coo",
        {"argument": "sequences", "got": "torch.sparse_coo", "bound": "torch.strided"},
    ),
    "jagged": (
        torch.nested.nested_tensor_from_jagged(torch.arange(1), torch.tensor([0, 1])),
        RaggedTypeError,
        "sequences must be a dense tensor, got layout torch.jagged",
        {"argument": "sequences", "got": "torch.jagged", "bound": "torch.strided"},
    ),
}


@pytest.mark.parametrize("way", ["read", "from_sequences"])
@pytest.mark.parametrize(("value", "kind", "text", "parts"), NOT_SEQUENCES.values(), ids=NOT_SEQUENCES)
def test_what_is_no_sequence_of_sequences_is_refused(
    refused: Any, value: Any, kind: Any, text: str, parts: dict[str, Any], way: str
) -> None:
    with refused(kind, text, **parts):
        if way == "read":
            count(value)
            read(value)
        else:
            RaggedBatch.from_sequences(value, req_pool_indices=[1])


# From a device: the meta device has the same metadata and needs no GPU.


def test_tokens_of_a_device_stay_there() -> None:
    parts = [torch.empty(3, dtype=torch.int64, device=META), torch.empty(0, dtype=torch.int64, device=META)]
    found = read_sequences([*parts, []], Converter(Mode.STRICT), META)
    assert found.lengths.tolist() == [3, 0, 0]
    assert (found.parts, len(found.device_parts)) == ([], 1)
    assert read_flat(parts[0], Converter(Mode.STRICT), META).device_parts[0] is parts[0]


def test_tokens_of_the_host_and_of_a_device_do_not_mix(refused: Any) -> None:
    with refused(
        RaggedValueError,
        "token_ids of one batch must all come from the host or all from meta, got both at request 2 (id 'c')",
        argument="token_ids",
        request=2,
        req_id="c",
        note="move them to meta first, or all of them to the host",
    ):
        read_sequences(
            [torch.empty(3, dtype=torch.int64, device=META), [], [5]], Converter(Mode.STRICT), META, ("a", "b", "c")
        )
    assert mixed_devices(1, None, CPU).request == 1


def test_an_empty_sequence_comes_from_nowhere() -> None:
    # It is neither the host's nor the device's, so it goes with both.
    nothing = torch.empty(0, dtype=torch.int64, device=META)
    found = read_sequences([[5], nothing, [6]], Converter(Mode.STRICT), META)
    assert found.lengths.tolist() == [1, 0, 1]
    assert (flat(found), found.device_parts) == ([5, 6], [])
