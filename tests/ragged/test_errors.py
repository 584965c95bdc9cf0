"""The named errors: what they carry, and that they let go of the caller's memory."""

import array
import copy
import gc
import pickle
from typing import Any

import numpy as np
import pytest

from ragged import RaggedBatch, RaggedBatchBuilder, RaggedError, RaggedLayout, RaggedOverflowError, RaggedTypeError
from ragged import RaggedValueError as ValueRefusal
from ragged.errors import refuses, request_name

KINDS = {RaggedTypeError: TypeError, ValueRefusal: ValueError, RaggedOverflowError: OverflowError}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_is_a_ragged_error_and_the_builtin_that_callers_already_catch(kind: type[RaggedError]) -> None:
    assert issubclass(kind, RaggedError)
    assert issubclass(kind, KINDS[kind])


def test_an_error_carries_its_parts_and_its_hint_stays_out_of_the_message() -> None:
    error = ValueRefusal(
        "rows must be unique", argument="rows", request=2, req_id="chat", got=4, bound=3, hint="free it"
    )
    assert str(error) == "rows must be unique"
    assert (error.argument, error.request, error.req_id, error.got, error.bound) == ("rows", 2, "chat", 4, 3)
    assert error.__notes__ == ["free it"]


def test_parts_that_nobody_gave_are_none_and_no_hint_is_no_note() -> None:
    error = RaggedError("no")
    assert (error.argument, error.request, error.req_id, error.got, error.bound) == (None,) * 5
    assert not hasattr(error, "__notes__")


@pytest.mark.parametrize("copied", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy])
def test_an_error_survives_a_process_boundary_with_its_parts(copied: Any) -> None:
    error = ValueRefusal("no", argument="rows", request=2, req_id="chat", got=4, bound=3, hint="free it")
    other = copied(error)
    assert (type(other), str(other), vars(other)) == (ValueRefusal, "no", vars(error))


def test_a_request_is_named_by_position_and_by_its_id_where_it_has_one() -> None:
    assert request_name(2) == "request 2"
    assert request_name(2, "chat-7") == "request 2 (id 'chat-7')"
    assert request_name(0, 0) == "request 0 (id 0)"  # an id that is false is an id


def test_an_error_leaves_a_public_entry_without_its_inner_frames_and_with_its_cause() -> None:
    cause = BufferError("no export")

    def inner() -> None:
        try:
            raise cause
        except BufferError as error:
            raise ValueRefusal("no") from error

    @refuses
    def entry() -> None:
        """Says what it does."""
        inner()

    assert (entry.__name__, entry.__doc__) == ("entry", "Says what it does.")
    with pytest.raises(ValueRefusal) as caught:
        entry()
    names = [frame.name for frame in caught.traceback]
    assert "inner" not in names
    assert caught.value.__cause__ is cause
    assert cause.__traceback__ is None


def _refusals(tokens: Any) -> dict[str, Any]:
    """Calls that refuse ``tokens``, an array('q') of [5, -3]."""
    builder = RaggedBatchBuilder(pool_shape=(4, 4))
    return {
        "add": lambda: builder.add(1, tokens),
        "add_parts": lambda: builder.add(1, [5], tokens),
        "extend": lambda: builder.extend([1, 2], [tokens, tokens]),
        "extend_mixed": lambda: builder.extend([1, 2], [[5], tokens]),
        "from_sequences": lambda: RaggedBatch.from_sequences([tokens], req_pool_indices=[1]),
        "from_lengths": lambda: RaggedBatch.from_lengths(tokens, [2], req_pool_indices=[1]),
        "from_offsets": lambda: RaggedBatch.from_offsets([5], tokens, req_pool_indices=[1]),
        "rows": lambda: builder.extend(tokens, [[1], [2]]),
        "prefix_lens": lambda: builder.extend([1, 2], [[1], [2]], prefix_lens=tokens),
        "layout": lambda: RaggedLayout(lengths=tokens, req_pool_indices=[1, 2]),
        "select": lambda: RaggedBatch.from_sequences([[1]], req_pool_indices=[1]).select(tokens),
    }


@pytest.mark.parametrize("call", _refusals(None))
def test_a_refusal_that_is_kept_holds_no_view_of_the_callers_memory(call: str) -> None:
    # Case 54: array.append raises BufferError while anybody holds a view.
    tokens = array.array("q", [5, -3])
    with pytest.raises(RaggedError) as caught:
        _refusals(tokens)[call]()
    kept = caught.value
    tokens.append(7)
    assert kept.argument is not None
    assert tokens.tolist() == [5, -3, 7]


@pytest.mark.parametrize("number", [1, 3, 20_000])
def test_an_array_that_was_taken_can_grow_at_once(number: int) -> None:
    # Case 54, also above the size up to which small arrays are joined as bytes.
    tokens = array.array("q", range(number))
    builder = RaggedBatchBuilder()
    builder.add(1, tokens)
    tokens.append(7)
    builder.extend([2, 3], [tokens, tokens])
    tokens.extend([8, 9])
    tokens[0] = 55
    batch = builder.build()
    gc.collect()
    expected = list(range(number))
    assert batch.token_ids.tolist() == expected + 2 * [*expected, 7]


def test_a_bytearray_that_was_taken_can_be_resized_at_once() -> None:
    memory = bytearray(np.array([5, 6], dtype=np.int64).tobytes())
    view = memoryview(memory).cast("q")
    batch = RaggedBatch.from_sequences([view], req_pool_indices=[1])
    view.release()
    memory.clear()
    assert batch.token_ids.tolist() == [5, 6]
