"""The builder: requests in, a batch out, step after step; a refusal changes nothing."""

import array
import copy
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import Model, Request, cuts, kinds, models

from ragged import (
    RaggedBatch,
    RaggedBatchBuilder,
    RaggedError,
    RaggedOverflowError,
    RaggedTypeError,
    StagingRing,
    assembly,
)
from ragged import RaggedValueError as ValueRefusal

INT64_MAX = 2**63 - 1


def fill(builder: RaggedBatchBuilder, data: st.DataObject, model: Model) -> None:
    """Hand the requests over in one of the many ways: one by one, in groups, in parts, as any kind of sequence."""
    at = 0
    while at < len(model.requests):
        group = Model(model.requests[at : at + data.draw(st.integers(1, 4))])
        at += len(group.requests)
        if data.draw(st.booleans()):
            kind = data.draw(kinds())
            builder.extend(
                data.draw(st.sampled_from([list, tuple, np.array, torch.tensor]))(group.rows),
                [kind(tokens) for tokens in group.sequences],
                prefix_lens=group.prefix_lens,
            )
        else:
            for request in group.requests:
                parts = data.draw(cuts(request.tokens))
                builder.add(request.row, *(data.draw(kinds())(part) for part in parts), prefix_len=request.prefix_len)


@given(models(), st.data())
def test_a_builder_agrees_with_a_list_of_requests_however_they_come(agrees: Any, model: Model, data: Any) -> None:
    builder = RaggedBatchBuilder()
    fill(builder, data, model)
    assert len(builder) == len(model.requests)
    agrees(builder.build(), model)
    assert len(builder) == 0


@given(st.lists(models(max_reqs=5), min_size=2, max_size=5), st.data())
def test_batches_of_one_builder_share_nothing(agrees: Any, steps: list[Model], data: Any) -> None:
    # Case 1, 10 on the CPU: nothing of an earlier, larger batch is read, and nothing of it is overwritten.
    builder, batches = RaggedBatchBuilder(), []
    for model in steps:
        if data.draw(st.booleans()):
            builder.extend([1, 2], [[9] * 30, [9]])
            builder.clear()
        fill(builder, data, model)
        batches.append(builder.build())
    for batch, model in zip(batches, steps, strict=True):
        agrees(batch, model)


def test_memory_is_taken_back_only_when_nothing_of_the_batch_is_left() -> None:
    # Case 18 on the CPU, where the ring hands out its memory itself and takes it back later.
    builder = RaggedBatchBuilder()

    def build(token: int) -> RaggedBatch:
        builder.add(1, [token] * 5)
        return builder.build()

    kept = {
        "view": build(1).token_ids,
        "numpy": build(2).token_ids.numpy(),
        "part": build(3).unbind()[0],
        "storage": build(4).packed.untyped_storage(),
        "dlpack": np.from_dlpack(build(5).token_ids),
        "alias": build(6).token_ids[2:],
        "nested": build(7).to_nested(),
    }
    bytes_kept = bytes(kept["storage"])
    for token in range(100, 120):
        build(token)
    assert kept["view"].tolist() == [1] * 5
    assert kept["numpy"].tolist() == [2] * 5
    assert kept["part"].tolist() == [3] * 5
    assert bytes(kept["storage"]) == bytes_kept
    assert kept["dlpack"].tolist() == [5] * 5
    assert kept["alias"].tolist() == [6] * 3
    assert kept["nested"].values().tolist() == [7] * 5


def test_a_steady_state_on_the_cpu_uses_the_same_memory_again() -> None:
    builder = RaggedBatchBuilder()
    seen = set()
    for _ in range(20):
        builder.extend([1, 2], [[5] * 100, [6]])
        seen.add(builder.build().packed.data_ptr())
    assert len(seen) <= 2


def test_an_empty_builder_builds_a_batch_of_zero_requests() -> None:
    batch = RaggedBatchBuilder().build()
    assert (batch.num_reqs, batch.num_tokens, batch.offsets.tolist()) == (0, 0, [0])


def test_clear_forgets_everything_but_the_options(agrees: Any) -> None:
    builder = RaggedBatchBuilder(allow_placeholders=True, mode="coerce")
    builder.add(1, np.array([-1, 5], dtype=np.int32), req_id="gone")
    builder.extend([2], [[-1]])
    builder.clear()
    assert len(builder) == 0
    builder.add(1, [-1, 6])
    batch = builder.build()
    agrees(batch, Model([Request(1, [-1, 6])]))
    assert (batch.num_placeholders, batch.coercions, batch.layout.req_ids) == (1, (), None)


def test_a_request_in_parts_is_one_request() -> None:
    # Case 33: parts, one of them empty.
    builder = RaggedBatchBuilder()
    builder.add(3, [5, 6], np.empty(0, dtype=np.int64), (7,), array.array("q", [8]), req_id="chat")
    builder.add(4)
    builder.add(5, [], [])
    batch = builder.build()
    assert [part.tolist() for part in batch.unbind()] == [[5, 6, 7, 8], [], []]
    assert batch.layout.req_ids == ("chat", None, None)


def test_rows_and_prefixes_may_be_numpys() -> None:
    builder = RaggedBatchBuilder()
    builder.add(np.int32(3), [5], prefix_len=np.uint8(200))
    batch = builder.build()
    assert (batch.req_pool_indices.tolist(), batch.prefix_lens.tolist()) == ([3], [200])


def test_ids_stay_with_their_requests_whoever_has_one() -> None:
    builder = RaggedBatchBuilder()
    builder.add(1, [5])
    builder.add(2, [5], req_id="b")
    builder.extend([3, 4], [[5], []])
    builder.extend([5, 6], [[5], []], req_ids=iter("ef"))
    builder.add(7, [5], req_id=0)
    assert builder.build().layout.req_ids == (None, "b", None, None, "e", "f", 0)


def test_numpy_scalars_as_lengths_do_not_wrap() -> None:
    # Case 34.
    builder = RaggedBatchBuilder()
    builder.add(1, np.zeros(200, dtype=np.int64))
    builder.add(2, np.zeros(100, dtype=np.int64))
    assert builder.build().offsets.tolist() == [0, 200, 300]


@pytest.mark.parametrize("growth", [1, 70, 5000])
def test_what_was_staged_survives_the_growth_of_its_slot_and_of_its_header(agrees: Any, growth: int) -> None:
    # The header lies before the tokens; more requests than were reserved for move the tokens up.
    builder, requests = RaggedBatchBuilder(), []
    for row in range(300):
        requests.append(Request(row, [row] * (growth if row % 50 == 0 else row % 3), row % 7))
        builder.add(row, requests[-1].tokens, prefix_len=row % 7)
    builder.extend(range(300, 900), [[row] for row in range(300, 900)])
    requests += [Request(row, [row]) for row in range(300, 900)]
    agrees(builder.build(), Model(requests))


# A refusal leaves the builder exactly as it was.


class Unreadable:
    def __dlpack__(self, **_: Any) -> Any:
        raise RuntimeError("no export")

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


ROWS = list(range(20, 120))

REFUSED: dict[str, Any] = {
    "add_row_of_another_type": lambda b: b.add("5", [1]),
    "add_row_bool": lambda b: b.add(True, [1]),
    "add_row_negative": lambda b: b.add(-1, [1]),
    "add_row_beyond_int64": lambda b: b.add(2**63, [1]),
    "add_row_beyond_the_pool": lambda b: b.add(128, [1]),
    "add_row_taken": lambda b: b.add(4, [1]),
    "add_row_taken_in_a_group": lambda b: b.add(6, [1]),
    "add_padding_row": lambda b: b.add(0, [1]),
    "add_prefix_of_another_type": lambda b: b.add(9, [1], prefix_len=1.0),
    "add_prefix_negative": lambda b: b.add(9, [1], prefix_len=-1),
    "add_prefix_beyond_the_row": lambda b: b.add(9, [], prefix_len=65),
    "add_end_beyond_the_row": lambda b: b.add(9, [1, 2], prefix_len=63),
    "add_end_beyond_int64": lambda b: b.add(9, [1], prefix_len=INT64_MAX),
    "add_no_sequence": lambda b: b.add(9, 5),
    "add_dimensions": lambda b: b.add(9, np.zeros((2, 2), dtype=np.int64)),
    "add_dtype": lambda b: b.add(9, [1], np.zeros(2, dtype=np.int32)),
    "add_strided": lambda b: b.add(9, [1], np.arange(6)[::2]),
    "add_second_part_bad": lambda b: b.add(9, [1, 2, 3], [4, "5"]),
    "add_too_large": lambda b: b.add(9, [2**63]),
    "add_token_negative": lambda b: b.add(9, [1, 2], [-2]),
    "add_token_beyond_the_vocabulary": lambda b: b.add(9, [1000]),
    "add_token_wide": lambda b: b.add(9, [2**31]),
    "add_many_tokens_the_last_bad": lambda b: b.add(9, [1] * 60, [-5]),
    "add_unreadable": lambda b: b.add(9, [1], Unreadable()),
    "add_meta": lambda b: b.add(9, torch.empty(2, dtype=torch.int64, device="meta")),
    "add_sparse": lambda b: b.add(9, torch.tensor([1, 2]).to_sparse()),
    "extend_rows_no_sequence": lambda b: b.extend(5, [[1]]),
    "extend_rows_dtype": lambda b: b.extend(np.array([9], dtype=np.int32), [[1]]),
    "extend_row_bad": lambda b: b.extend([9, "x"], [[1], [2]]),
    "extend_row_negative": lambda b: b.extend([9, -1], [[1], [2]]),
    "extend_row_beyond_the_pool": lambda b: b.extend([9, 128], [[1], [2]]),
    "extend_row_taken": lambda b: b.extend([9, 4], [[1], [2]]),
    "extend_row_twice": lambda b: b.extend([9, 9], [[1], [2]]),
    "extend_padding_row": lambda b: b.extend([9, 0], [[1], [2]]),
    "extend_no_sequences": lambda b: b.extend([9], 5),
    "extend_none": lambda b: b.extend([9], None),
    "extend_fewer_sequences": lambda b: b.extend([9, 10], [[1]]),
    "extend_no_dimension": lambda b: b.extend([9], np.array(5)),
    "extend_prefixes_short": lambda b: b.extend([9, 10], [[1], [2]], prefix_lens=[0]),
    "extend_prefix_negative": lambda b: b.extend([9, 10], [[1], [2]], prefix_lens=[0, -1]),
    "extend_end_beyond_the_row": lambda b: b.extend([9, 10], [[1], [2]], prefix_lens=[0, 64]),
    "extend_end_beyond_int64": lambda b: b.extend([9, 10], [[1], [2]], prefix_lens=[0, INT64_MAX]),
    "extend_ids_short": lambda b: b.extend([9, 10], [[1], [2]], req_ids=["a"]),
    "extend_ids_no_sequence": lambda b: b.extend([9], [[1]], req_ids=5),
    "extend_token_bad": lambda b: b.extend([9, 10], [[1], [None]]),
    "extend_token_negative": lambda b: b.extend([9, 10], [[1], [-2]]),
    "extend_many_the_last_bad": lambda b: b.extend(ROWS, [[1] * 60] * 99 + [[-2]]),
    "extend_dtype": lambda b: b.extend([9, 10], [np.array([1]), np.array([2], dtype=np.int32)]),
    "extend_unreadable": lambda b: b.extend([9, 10], [[1], Unreadable()]),
    "extend_table_strided": lambda b: b.extend([9, 10], np.arange(4).reshape(2, 2).T),
    "extend_sparse": lambda b: b.extend([9], torch.tensor([[1]]).to_sparse()),
}

COERCED = {
    "coerced_then_bad_part": lambda b: b.add(9, np.array([1], dtype=np.int32), [-2]),
    "coerced_then_bad_row": lambda b: b.extend(np.array([9, 4], dtype=np.int32), [[1], [2]]),
    "uint64_too_large": lambda b: b.add(9, np.array([2**63], dtype=np.uint64)),
}

STATES = {
    "empty": lambda b: None,
    "one_by_one": lambda b: (b.add(4, [7, 8], prefix_len=3, req_id="a"), b.add(6, [], [9]), b.add(0)),
    "in_a_group": lambda b: b.extend([4, 6, 0], [[7, 8], [9], []], prefix_lens=[3, 0, 0], req_ids="abc"),
    "both": lambda b: (b.add(4, [7, 8], req_id="a"), b.extend([6, 0], [[9], []]), b.add(7, [-1])),
}


def prepared(state: str, mode: str) -> RaggedBatchBuilder:
    builder = RaggedBatchBuilder(
        mode=mode, pool_shape=(128, 64), vocab_size=1000, padding_row=0, allow_placeholders=True
    )
    STATES[state](builder)
    return builder


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(
    ("refuse", "mode"),
    [pytest.param(call, "strict", id=name) for name, call in REFUSED.items()]
    + [pytest.param(call, "coerce", id=name) for name, call in COERCED.items()],
)
def test_a_refusal_leaves_the_builder_as_it_was(contents: Any, refuse: Any, mode: str, state: str) -> None:
    builder, twin = prepared(state, mode), prepared(state, mode)
    if state == "empty" and refuse in (REFUSED["add_row_taken"], REFUSED["add_row_taken_in_a_group"]):
        return  # nothing is taken
    if state == "empty" and refuse in (REFUSED["extend_row_taken"], COERCED["coerced_then_bad_row"]):
        return
    for _ in range(2):  # a second time, since the first could have moved something
        with pytest.raises(RaggedError):
            refuse(builder)
        assert len(builder) == len(twin)
    for one in (builder, twin):  # and it goes on as if nothing had been
        one.extend([101, 102], [[11, 12], []])
        one.add(103, [13], req_id="last")
    built, other = builder.build(), twin.build()
    assert contents(built) == contents(other)
    assert torch.equal(built.packed, other.packed)


@given(models(max_row=20), models(max_row=20), st.data())
def test_a_group_that_is_refused_as_a_whole_leaves_nothing_behind(
    agrees: Any, first: Model, second: Model, data: Any
) -> None:
    builder = RaggedBatchBuilder()
    fill(builder, data, first)
    spoiled = [list(tokens) for tokens in second.sequences] + [[1, -7]]
    with pytest.raises(RaggedError):
        builder.extend([*second.rows, 99], spoiled)
    agrees(builder.build(), first)


FAILS: dict[str, tuple[Any, str, type[Exception], list[str]]] = {
    "no_memory_for_a_larger_slot": (StagingRing, "grow", MemoryError, ["add", "extend"]),
    "no_memory_while_joining": (assembly, "join", MemoryError, ["add", "extend"]),
    "no_memory_for_a_layout": (assembly, "RaggedLayout", MemoryError, ["extend", "build"]),
    "no_memory_on_the_device": (StagingRing, "send", RuntimeError, ["build"]),
}
"""What the machine, not the input, may be short of: where, what it raises, and the steps that need it."""

MANY = list(range(500))  # much more than a new slot holds

STEPS: dict[str, Any] = {
    "add": lambda b: b.add(9, MANY, prefix_len=2),
    "extend": lambda b: b.extend([9, 8], [MANY, []], prefix_lens=[2, 0]),
    "build": lambda b: b.build(),
}


@pytest.mark.parametrize(
    ("step", "where", "name", "error"),
    [
        pytest.param(step, where, name, error, id=f"{step}_{reason}")
        for reason, (where, name, error, steps) in FAILS.items()
        for step in steps
    ],
)
def test_a_step_that_the_machine_cannot_do_can_be_done_again(
    contents: Any, monkeypatch: pytest.MonkeyPatch, step: str, where: Any, name: str, error: Any
) -> None:
    builder, twin = RaggedBatchBuilder(), RaggedBatchBuilder()
    for each in (builder, twin):
        each.add(4, [7, 8], req_id="a")
        each.extend([6, 0], [[9], []], prefix_lens=[3, 0])
        each.add(7, [5])

    def fail(*_: Any, **__: Any) -> None:
        raise error("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(where, name, fail)
        with pytest.raises(error, match=r"^out of memory$"):
            STEPS[step](builder)
    assert len(builder) == len(twin) == 4
    batches = [STEPS[step](each) or each.build() for each in (builder, twin)]
    assert contents(batches[0]) == contents(batches[1])


def test_a_row_that_was_refused_is_free_again() -> None:
    builder = RaggedBatchBuilder()
    with pytest.raises(ValueRefusal):
        builder.add(4, [-1])
    builder.add(4, [1])
    with pytest.raises(ValueRefusal, match=r"got 4 at both request 0 and request 1$"):
        builder.add(4, [2])
    builder.build()
    builder.add(4, [3])  # and after a build


def test_a_row_taken_by_an_empty_request_is_nobodys() -> None:
    builder = RaggedBatchBuilder(padding_row=0)
    for row in (0, 0, 4, 4):
        builder.add(row)
    builder.add(4, [1])
    builder.add(4)
    assert builder.build().req_pool_indices.tolist() == [0, 0, 4, 4, 4, 4]


# What a refusal says.


@pytest.mark.parametrize("value", [True, 1.0, "4", None, [4], torch.tensor(4)], ids=repr)
@pytest.mark.parametrize("argument", ["req_pool_index", "prefix_len"])
def test_a_row_and_a_prefix_are_integers(refused: Any, argument: str, value: Any) -> None:
    builder = RaggedBatchBuilder()
    builder.add(1, [5])
    arguments = {"req_pool_index": 4, "prefix_len": 0} | {argument: value}
    text = f"{argument} must be an int, got {type(value).__name__} {value!r} at request 1 (id 'b')"
    with refused(RaggedTypeError, text, argument=argument, request=1, req_id="b", got=value):
        builder.add(arguments["req_pool_index"], [6], prefix_len=arguments["prefix_len"], req_id="b")


def test_a_row_fits_int64(refused: Any) -> None:
    with refused(
        RaggedOverflowError,
        f"req_pool_index must fit int64, got {2**63} at request 0",
        argument="req_pool_index",
        request=0,
        got=2**63,
        bound=INT64_MAX,
    ):
        RaggedBatchBuilder().add(2**63, [5])


def test_a_group_is_numbered_after_the_requests_that_are_there(refused: Any) -> None:
    builder = RaggedBatchBuilder()
    builder.add(1, [5])
    builder.add(2, [5])
    with refused(
        RaggedTypeError,
        "req_pool_indices must be integers, got str 'x' at request 3 (id 'd')",
        argument="req_pool_indices",
        request=3,
        req_id="d",
        got="x",
        bound="int64",
    ):
        builder.extend([3, "x"], [[5], [6]], req_ids="cd")
    with refused(
        ValueRefusal,
        "token_ids must not be negative, got -2 at request 3 (id 'd'), position 1",
        argument="token_ids",
        request=3,
        req_id="d",
        got=-2,
        bound=0,
    ):
        builder.extend([3, 4], [[5], [6, -2]], req_ids="cd")
    with refused(
        ValueRefusal,
        "req_pool_indices must be unique among requests with tokens, got 2 at both request 1 and request 3 (id 'd')",
        argument="req_pool_indices",
        request=3,
        req_id="d",
        got=2,
        bound=1,
    ):
        builder.extend([3, 2], [[5], [6]], req_ids="cd")


def test_the_end_beyond_the_row_names_both_numbers(refused: Any) -> None:
    # Case 43, 16.
    builder = RaggedBatchBuilder(pool_shape=(4, 16))
    with refused(
        ValueRefusal,
        "prefix_lens (14) plus length (3) must not exceed max_context_len 16, got 17 at request 0",
        argument="prefix_lens",
        request=0,
        got=17,
        bound=16,
    ):
        builder.add(1, [5, 6], [7], prefix_len=14)


@pytest.mark.parametrize("how", ["add", "extend"])
@pytest.mark.parametrize(
    ("prefix_len", "length", "dropped"), [(14, 3, 1), (16, 2, 2), (0, 20, 4), (10, 10, 4), (16, 0, 0)]
)
def test_truncating_takes_what_is_too_long_and_counts_it(how: str, prefix_len: int, length: int, dropped: int) -> None:
    # Case 43, 16.
    builder = RaggedBatchBuilder(pool_shape=(4, 16), overflow="truncate")
    if how == "add":
        builder.add(1, range(length), prefix_len=prefix_len)
    else:
        builder.extend([1], [range(length)], prefix_lens=[prefix_len])
    batch = builder.build()
    assert batch.dropped_tokens == dropped
    assert batch.token_ids.tolist() == list(range(length))


def test_options_that_nobody_knows_are_pythons_to_refuse() -> None:
    with pytest.raises(TypeError, match="vocabulary"):
        RaggedBatchBuilder(vocabulary=5)  # type: ignore[call-arg]


# The process around.


def test_builders_in_threads_do_not_disturb_each_other() -> None:
    # Case 38 on the host.
    wrong: list[Any] = []

    def work(seed: int) -> None:
        rng, builder = random.Random(seed), RaggedBatchBuilder()
        for _ in range(50):
            sequences = [[seed] * rng.randrange(20) for _ in range(rng.randrange(1, 20))]
            builder.extend(range(len(sequences)), sequences)
            batch = builder.build()
            if [part.tolist() for part in batch.unbind()] != sequences:
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("inside_first", [True, False], ids=["inside_then_outside", "outside_then_inside"])
def test_inference_mode_around_one_build_and_not_the_next(agrees: Any, inside_first: bool) -> None:
    # Case 65.
    builder = RaggedBatchBuilder()
    model = Model([Request(1, [5, 6], 3), Request(2, []), Request(4, [7])])
    for inside in (inside_first, not inside_first, inside_first):
        with torch.inference_mode(inside):
            builder.extend(model.rows, model.sequences, prefix_lens=model.prefix_lens)
            batch = builder.build()
        with torch.inference_mode(not inside):
            agrees(batch, model)
            agrees(batch.select([2, 0]), model.select([2, 0]))
            assert batch.to_padded(0).tolist() == model.padded(0)


def test_the_defaults_of_torch_change_nothing(agrees: Any) -> None:
    # Case 64.
    model = Model([Request(1, [5, 6], 3), Request(2, []), Request(4, [7])])
    try:
        torch.set_default_device("meta")
        torch.set_default_dtype(torch.float64)
        builder = RaggedBatchBuilder(pool_shape=(8, 16))
        builder.add(1, [5], [6], prefix_len=3)
        builder.extend([2, 4], [[], [7]])
        batch = builder.build()
        agrees(batch, model)
        agrees(batch.select([2, 0]), model.select([2, 0]))
        agrees(RaggedBatch.concat([batch.select([0]), batch.select([1, 2])]), model)
        assert [piece.token_ids.tolist() for piece in batch.split(2)] == [[5, 6], [7]]
        assert batch.to_padded(0).tolist() == model.padded(0)
        assert [part.tolist() for part in batch.to_nested().unbind()] == model.sequences
        assert copy.deepcopy(batch).packed.tolist() == batch.packed.tolist()
        assert batch.pad_to(5).offsets.tolist() == [0, 2, 2, 3, 3, 3]
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def test_deterministic_algorithms_change_nothing(agrees: Any) -> None:
    # Case 66.
    model = Model([Request(1, [5, 6], 3), Request(2, []), Request(4, [7])])
    try:
        torch.use_deterministic_algorithms(True)
        batch = RaggedBatch.from_sequences(model.sequences, req_pool_indices=model.rows, prefix_lens=model.prefix_lens)
        agrees(batch, model)
        assert batch.to_padded(0).tolist() == model.padded(0)
        agrees(batch.select([2, 0]), model.select([2, 0]))
    finally:
        torch.use_deterministic_algorithms(False)


# On a GPU.


@pytest.mark.gpu
@given(models(), st.data())
def test_a_builder_for_a_gpu_agrees_with_a_list_of_requests(agrees: Any, model: Model, data: Any) -> None:
    builder = RaggedBatchBuilder(device="cuda")
    fill(builder, data, model)
    batch = builder.build()
    assert batch.device == torch.device("cuda", torch.cuda.current_device())
    assert batch.token_ids.device == batch.device
    agrees(batch, model)


@pytest.mark.gpu
@given(models())
def test_tokens_that_are_on_the_gpu_stay_there(agrees: Any, model: Model) -> None:
    builder = RaggedBatchBuilder(device="cuda")
    half = len(model.requests) // 2
    builder.extend(
        model.rows[:half],
        [torch.tensor(tokens, dtype=torch.int64, device="cuda") for tokens in model.sequences[:half]],
        prefix_lens=model.prefix_lens[:half],
    )
    for request in model.requests[half:]:
        builder.add(
            request.row,
            torch.tensor(request.tokens, dtype=torch.int64, device="cuda"),
            [],
            prefix_len=request.prefix_len,
        )
    batch = builder.build()
    agrees(batch, model)
    if batch.num_tokens:
        assert (batch.counts, batch.num_placeholders, batch.num_wide_tokens) == (None, None, None)


@pytest.mark.gpu
def test_a_batch_owns_tokens_that_came_in_on_the_gpu() -> None:
    tokens = torch.tensor([5, 6, 7], device="cuda")
    batches = [
        RaggedBatch.from_sequences([tokens], req_pool_indices=[1], device="cuda"),
        RaggedBatch.from_lengths(tokens, [2, 1], req_pool_indices=[1, 2], device="cuda"),
        RaggedBatch.from_offsets(tokens, [0, 1, 3], req_pool_indices=[1, 2], device="cuda"),
    ]
    tokens.fill_(-99)
    assert [batch.token_ids.tolist() for batch in batches] == [[5, 6, 7]] * 3


@pytest.mark.gpu
def test_empty_requests_of_the_host_go_with_tokens_of_the_gpu_and_the_other_way_round() -> None:
    there, nothing_there = torch.tensor([5, 6], device="cuda"), torch.empty(0, dtype=torch.int64, device="cuda")
    for sequences in ([there, []], [[], there], [[7], nothing_there], [nothing_there, [7]], [there, nothing_there]):
        builder = RaggedBatchBuilder(device="cuda")
        for row, tokens in enumerate(sequences):
            builder.extend([row], [tokens])
        one_by_one = RaggedBatchBuilder(device="cuda")
        for row, tokens in enumerate(sequences):
            one_by_one.add(row, tokens, [], nothing_there)
        expected = [list(map(int, tokens)) for tokens in sequences]
        for batch in (
            builder.build(),
            one_by_one.build(),
            RaggedBatch.from_sequences(sequences, req_pool_indices=[0, 1], device="cuda"),
        ):
            assert [part.tolist() for part in batch.unbind()] == expected


@pytest.mark.gpu
def test_tokens_of_the_host_and_of_the_gpu_do_not_mix_and_the_builder_stays_as_it_was(refused: Any) -> None:
    builder = RaggedBatchBuilder(device="cuda")
    builder.add(1, torch.tensor([5], device="cuda"))
    device = torch.device("cuda", torch.cuda.current_device())
    with refused(
        ValueRefusal,
        f"token_ids of one batch must all come from the host or all from {device}, got both at request 1",
        argument="token_ids",
        request=1,
        note=f"move them to {device} first, or all of them to the host",
    ):
        builder.add(2, [6])
    assert len(builder) == 1
    assert builder.build().token_ids.tolist() == [5]


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["host_list", "host_numpy", "device"])
def test_a_step_waits_for_nothing_and_copies_once(no_sync: Any, how: str) -> None:
    # Case 21, case 2: one host-to-device copy, from pinned memory, and no synchronise.
    builder = RaggedBatchBuilder(device="cuda", pool_shape=(64, 128))
    tokens: Any = {
        "host_list": [[5, 6], [], [7]],
        "host_numpy": [np.array([5, 6]), np.empty(0, dtype=np.int64), np.array([7])],
        "device": [torch.tensor([5, 6], device="cuda"), [], torch.tensor([7], device="cuda")],
    }[how]

    def step() -> RaggedBatch:
        builder.extend([4, 5, 6], tokens, prefix_lens=[1, 2, 3], req_ids="abc")
        builder.add(9, req_id="empty")
        return builder.build()

    for _ in range(4):
        step()
    with no_sync():
        batch = step()
        derived = [batch.cu_seqlens, batch.req_ids, batch.positions, batch.last_token_indices]
        sizes = (batch.num_reqs, batch.num_tokens, batch.max_len, batch.device, batch.dropped_tokens)
        shown = repr(batch)
        padded = batch.pad_to(8)
        others = [batch.select([2, 0]), batch.split(2)[1], RaggedBatch.concat([batch.select([0]), batch.select([2])])]
        nested, table, parts = batch.to_nested(), batch.to_padded(0), batch.unbind()
        same = batch == batch, hash(batch), batch in [batch], batch.layout == batch.layout, hash(batch.layout)
    assert [tensor.tolist() for tensor in derived] == [[0, 2, 2, 3, 3], [0, 0, 2], [1, 2, 3], [1, -1, 2, -1]]
    assert sizes == (4, 3, 2, torch.device("cuda", torch.cuda.current_device()), 0)
    assert "num_reqs=4" in shown
    assert padded.offsets.tolist() == [0, 2, 2, 3, 3, 3, 3, 3, 3]
    assert [other.token_ids.tolist() for other in others] == [[7, 5, 6], [7], [5, 6, 7]]
    assert nested.is_nested
    assert table.tolist() == [[5, 6], [0, 0], [7, 0], [0, 0]]
    assert len(parts) == 4
    assert same[0]
    assert same[2:4] == (True, True)

    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    names = [event.name for event in profiler.events()]
    copies = [name for name in names if "Memcpy HtoD" in name]
    assert len(copies) == 1
    assert "Pinned" in copies[0]
    assert not [name for name in names if name in ("cudaStreamSynchronize", "cudaMemcpy")]


@pytest.mark.gpu
def test_copies_run_on_the_current_stream(busy: Any) -> None:
    builder, stream = RaggedBatchBuilder(device="cuda"), torch.cuda.Stream()
    builder.add(1, [0])
    builder.build().token_ids.sum()  # what is loaded at first use waits for the device
    busy()  # the default stream; nothing of ours waits for it
    with torch.cuda.stream(stream):
        builder.add(1, [5, 6])
        batch = builder.build()
        total = batch.token_ids.sum()
    stream.synchronize()
    assert not torch.cuda.default_stream().query()
    torch.cuda.synchronize()
    assert int(total) == 11


@pytest.mark.gpu
def test_batches_built_on_one_stream_are_read_on_another(busy: Any) -> None:
    # Case 39, the part of ragged: what a caller of streams must do is to wait for an event, and no more.
    builder, producer, consumer = RaggedBatchBuilder(device="cuda"), torch.cuda.Stream(), torch.cuda.Stream()
    for number in range(50):
        with torch.cuda.stream(producer):
            torch.cuda._sleep(1_000_000)
            builder.add(1, [number] * 100)
            batch = builder.build()
            built = producer.record_event()
        with torch.cuda.stream(consumer):
            built.wait(consumer)
            copy_there = batch.token_ids.clone()
        consumer.synchronize()
        assert copy_there.tolist() == [number] * 100


@pytest.mark.gpu
def test_every_name_of_the_current_gpu_is_one_device() -> None:
    # Case 68.
    index = torch.cuda.current_device()
    here = torch.device("cuda", index)
    for name in ("cuda", f"cuda:{index}", here, torch.device("cuda")):
        builder = RaggedBatchBuilder(device=name, mode="coerce")
        builder.add(1, torch.tensor([5], device=here))
        batch = builder.build()
        assert batch.device == here
        assert batch.coercions == ()
        assert batch.to("cuda") is batch


@pytest.mark.gpu
def test_the_device_of_a_builder_is_the_one_that_was_current_when_it_was_made() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    builder = RaggedBatchBuilder(device="cuda")
    with torch.cuda.device(1):
        builder.add(1, [5])
        batch = builder.build()
    assert batch.device == torch.device("cuda", 0)
    other = RaggedBatchBuilder(device="cuda:1")
    other.add(1, [6])
    assert other.build().token_ids.tolist() == [6]
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu
def test_the_defaults_of_torch_change_nothing_on_a_gpu(agrees: Any) -> None:
    # Case 64, 66.
    model = Model([Request(1, [5, 6], 3), Request(2, []), Request(4, [7])])
    try:
        torch.set_default_device("cuda")
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        for device in ("cpu", "cuda"):
            builder = RaggedBatchBuilder(device=device)
            builder.extend(model.rows, model.sequences, prefix_lens=model.prefix_lens)
            batch = builder.build()
            assert batch.device.type == device
            agrees(batch, model)
            agrees(batch.select([2, 0]), model.select([2, 0]))
            assert batch.to_padded(0).tolist() == model.padded(0)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


@pytest.mark.gpu
def test_a_steady_state_allocates_nothing_but_the_batch() -> None:
    builder = RaggedBatchBuilder(device="cuda")
    allocated = []
    allocate = StagingRing._allocate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StagingRing, "_allocate", lambda self, n: allocated.append(n) or allocate(self, n))
        for step in range(30):
            builder.extend(range(100), [[step]] * 100)
            batch = builder.build()
            if step == 5:
                allocated.clear()
                before = torch.cuda.memory_stats()["allocation.all.allocated"]
        after = torch.cuda.memory_stats()["allocation.all.allocated"]
    assert allocated == []
    assert after - before == 24  # one packed buffer a step
    assert batch.token_ids.tolist() == [29] * 100
