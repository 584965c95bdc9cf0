"""What a batch does itself: new batches from old ones, copies of every kind, what it says of itself."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import torch
import torch.multiprocessing
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import Model, Request, models

from ragged import (
    RaggedBatch,
    RaggedBatchBuilder,
    RaggedLayout,
    RaggedOverflowError,
    RaggedTypeError,
    RaggedValueError,
)

INT32_MAX = 2**31 - 1
WIDE = 2**40


def batch_of(model: Model, **options: Any) -> RaggedBatch:
    return RaggedBatch.from_sequences(
        model.sequences, req_pool_indices=model.rows, prefix_lens=model.prefix_lens, **options
    )


def plain(*lengths: int, **options: Any) -> RaggedBatch:
    return batch_of(Model.of_lengths(list(lengths)), **options)


# New batches from old ones. The arithmetic of layouts is test_rearrange's; here the tokens move with it.

INDEX_KINDS = {
    "list": list,
    "tuple": tuple,
    "numpy": lambda indices: np.array(indices, dtype=np.int64),
    "tensor": lambda indices: torch.tensor(indices, dtype=torch.int64),
    "numpy_scalars": lambda indices: [np.int32(index) for index in indices],
}


@given(models(), st.data())
def test_select_is_the_requests_asked_for_in_the_order_asked_for(agrees: Any, model: Model, data: Any) -> None:
    everything = list(range(len(model.requests)))
    indices = data.draw(st.lists(st.sampled_from(everything), unique=True) if everything else st.just([]))
    kind = INDEX_KINDS[data.draw(st.sampled_from(list(INDEX_KINDS)))]
    agrees(batch_of(model).select(kind(indices)), model.select(indices))


def test_select_takes_a_range_in_any_direction(agrees: Any) -> None:
    model = Model.of_lengths([2, 0, 3])
    agrees(batch_of(model).select(range(2, -1, -1)), model.select([2, 1, 0]))


@pytest.mark.parametrize(
    ("indices", "kind"),
    [
        ([True, False], RaggedTypeError),  # a mask is no list of indices: [1, 0] would be taken for one
        (np.array([True, False]), RaggedTypeError),
        (torch.tensor([0, 1], dtype=torch.int32), RaggedTypeError),
        (np.array([0.0]), RaggedTypeError),
        (slice(0, 1), RaggedTypeError),
        (0, RaggedTypeError),
        (None, RaggedTypeError),
        (np.array([[0, 1]]), RaggedValueError),
        ([0, -1], RaggedValueError),
        ([2], RaggedValueError),
        ([2**63], RaggedOverflowError),
    ],
    ids=repr,
)
def test_select_by_anything_else_is_refused(indices: Any, kind: Any) -> None:
    with pytest.raises(kind) as caught:
        plain(2, 3).select(indices)
    assert caught.value.argument == "indices"


@given(st.lists(models(max_reqs=4, max_row=10**9), min_size=1, max_size=4))
def test_concat_is_one_list_of_requests_after_the_other(agrees: Any, parts: list[Model]) -> None:
    taken = [request.row for part in parts for request in part.requests if request.tokens]
    assume(len(set(taken)) == len(taken))
    agrees(RaggedBatch.concat([batch_of(part) for part in parts]), Model([r for part in parts for r in part.requests]))


@pytest.mark.parametrize(
    ("make", "got"),
    [
        (lambda batch: [batch, batch.layout], "RaggedLayout"),
        (lambda batch: [None], "NoneType"),
        (lambda batch: (batch, [[5]]), "list"),
        (lambda batch: batch, "RaggedBatch"),
        (lambda batch: (part for part in [batch]), "generator"),
        (lambda batch: None, "NoneType"),
        (lambda batch: {batch: 1}, "dict"),
    ],
    ids=["a_layout", "none_in_a_list", "a_list_in_a_tuple", "one_batch", "a_generator", "none", "a_dict"],
)
def test_concat_of_what_is_no_list_of_batches_is_refused(refused: Any, make: Callable[[Any], Any], got: str) -> None:
    text = f"batches must be a list of RaggedBatch, got {got}"
    with refused(RaggedTypeError, text, argument="batches", got=got):
        RaggedBatch.concat(make(plain(2)))


def test_concat_names_both_requests_that_claim_one_row(refused: Any) -> None:
    one = RaggedBatch.from_sequences([[1], [2]], req_pool_indices=[3, 4], req_ids=["a", "b"])
    other = RaggedBatch.from_sequences([[], [5]], req_pool_indices=[3, 4], req_ids=["c", "d"])
    with refused(
        RaggedValueError,
        "req_pool_indices must be unique among requests with tokens, got 4 at both request 1 (id 'b') and "
        "request 3 (id 'd')",
        argument="req_pool_indices",
        request=3,
        req_id="d",
        got=4,
        bound=1,
    ):
        RaggedBatch.concat([one, other])


@given(models(), st.integers(1, 12))
def test_split_deals_the_tokens_in_order(agrees: Any, model: Model, max_tokens: int) -> None:
    pieces = batch_of(model).split(max_tokens)
    expected = model.split(max_tokens)
    assert len(pieces) == len(expected)
    for piece, part in zip(pieces, expected, strict=True):
        agrees(piece, part)


def test_split_of_three_prompts() -> None:
    # Case 25.
    batch = plain(4, 5, 6)
    pieces = batch.split(6)
    assert [piece.layout.lengths.tolist() for piece in pieces] == [[4, 2], [3, 3], [3]]
    assert [piece.prefix_lens.tolist() for piece in pieces] == [[0, 0], [2, 0], [3]]
    assert [piece.req_pool_indices.tolist() for piece in pieces] == [[1, 2], [2, 3], [3]]
    for max_tokens, number in ((6, 3), (15, 1), (1, 15), (100, 1)):
        pieces = batch.split(max_tokens)
        assert len(pieces) == number
        assert [token for piece in pieces for token in piece.token_ids.tolist()] == list(range(15))
    with pytest.raises(RaggedValueError, match=r"^max_tokens must be at least 1, got 0$"):
        batch.split(0)


@given(models(), st.integers(0, 5))
def test_pad_to_appends_empty_requests_on_row_0(agrees: Any, model: Model, more: int) -> None:
    padded = Model(model.requests + [Request(0, [])] * more)
    agrees(batch_of(model).pad_to(len(padded.requests)), padded)


def test_pad_to_the_number_there_is_keeps_the_offsets() -> None:
    # Case 25.
    assert plain(1, 2, 3).pad_to(3).offsets.tolist() == [0, 1, 3, 6]


OPERATIONS: dict[str, Callable[[RaggedBatch], RaggedBatch]] = {
    "select": lambda batch: batch.select([0, 1, 2]),
    "concat": lambda batch: RaggedBatch.concat([batch]),
    "split": lambda batch: batch.split(100)[0],
    "pad_to": lambda batch: batch.pad_to(3),
}
"""Each gives a batch with the same requests."""


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_a_new_batch_shares_no_memory_with_the_old_one(contents: Any, operation: Any) -> None:
    batch = plain(2, 0, 3)
    made = operation(batch)
    before = contents(batch)
    assert contents(made) == before
    made.packed.fill_(-77)
    assert contents(batch) == before
    made = operation(batch)
    batch.packed.fill_(-77)
    assert contents(made) == before


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_ids_rows_prefixes_and_bounds_go_with_their_requests(operation: Any) -> None:
    # Case 53.
    batch = RaggedBatch.from_sequences(
        [[5, 6], [], [7]],
        req_pool_indices=[4, 1, 7],
        prefix_lens=[1, 0, 3],
        req_ids=["a", "b", "c"],
        pool_shape=(8, 9),
        padding_row=0,
    )
    assert operation(batch).layout == batch.layout


def test_a_selected_batch_has_the_names_of_its_own_requests() -> None:
    batch = RaggedBatch.from_sequences([[5], [6]], req_pool_indices=[4, 1], prefix_lens=[8, 9], req_ids=["a", "b"])
    chosen = batch.select([1])
    assert (chosen.layout.req_ids, chosen.prefix_lens.tolist(), chosen.token_ids.tolist()) == (("b",), [9], [6])


@pytest.mark.parametrize(
    ("operation", "counted"),
    [("select", False), ("split", False), ("concat", True), ("pad_to", True)],
)
def test_special_tokens_are_counted_as_far_as_the_host_knows(operation: str, counted: bool) -> None:
    # A part may have any share of them: the host has not looked, and says so.
    special = RaggedBatch.from_sequences(
        [[5, -1], [], [WIDE]], req_pool_indices=[1, 2, 3], allow_placeholders=True, wide_tokens="opaque"
    )
    made = OPERATIONS[operation](special)
    assert (made.num_placeholders, made.num_wide_tokens) == ((1, 1) if counted else (None, None))
    ordinary = OPERATIONS[operation](plain(2, 0, 1))
    assert (ordinary.num_placeholders, ordinary.num_wide_tokens) == (0, 0)


def test_concat_adds_the_counts_up() -> None:
    options = {"allow_placeholders": True, "wide_tokens": "opaque"}
    one = RaggedBatch.from_sequences([[-1, -1, WIDE]], req_pool_indices=[1], **options)
    other = RaggedBatch.from_sequences([[-1, WIDE]], req_pool_indices=[2], **options)
    both = RaggedBatch.concat([one, other])
    assert (both.num_placeholders, both.num_wide_tokens) == (3, 2)
    unknown = RaggedBatch.concat([one, RaggedBatch.concat([other]).select([0])])
    assert (unknown.num_placeholders, unknown.num_wide_tokens) == (None, None)


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_dropped_tokens_stay_counted(operation: Any) -> None:
    # Case 43.
    batch = RaggedBatch.from_sequences(
        [range(20), [], range(3)],
        req_pool_indices=[0, 1, 2],
        prefix_lens=[0, 16, 14],
        pool_shape=(4, 16),
        overflow="truncate",
    )
    assert batch.dropped_tokens == 5
    assert operation(batch).dropped_tokens == 5


def test_conversions_were_paid_for_once() -> None:
    batch = RaggedBatch.from_sequences([np.array([1, 2], dtype=np.int32)], req_pool_indices=[1], mode="coerce")
    assert len(batch.coercions) == 1
    assert batch.to("cpu").coercions == batch.coercions
    for made in (batch.select([0]), batch.pad_to(2), RaggedBatch.concat([batch, plain()])):
        assert made.coercions == ()


EMPTY: dict[str, tuple[list[int], list[list[int]], list[int]]] = {
    "zero_requests": ([], [], []),
    "only_empty_requests": ([0, 0], [[], []], [-1, -1]),
}
"""Lengths, padded table, last tokens."""


@pytest.mark.parametrize(("lengths", "table", "last"), EMPTY.values(), ids=EMPTY)
def test_nothing_has_the_right_shapes_also_after_something(lengths: list[int], table: Any, last: list[int]) -> None:
    # Case 24, 8: memory of an earlier batch is there, and nothing of it is read.
    builder = RaggedBatchBuilder()
    for _ in range(3):
        builder.extend([1, 2, 3], [[5] * 40, [6], [7] * 100], prefix_lens=[1, 2, 3])
        builder.build()
    builder.extend(range(len(lengths)), [[] for _ in lengths])
    batch = builder.build()
    padded = batch.to_padded(9)
    assert (tuple(padded.shape), padded.tolist()) == ((len(lengths), 0), table)
    assert [part.tolist() for part in batch.unbind()] == [[] for _ in lengths]
    for derived in (batch.token_ids, batch.positions, batch.req_ids):
        assert (tuple(derived.shape), derived.dtype) == ((0,), torch.int64)
    assert batch.last_token_indices.tolist() == last
    assert batch.cu_seqlens.tolist() == [0] * (len(lengths) + 1)
    assert batch.req_pool_indices.tolist() == list(range(len(lengths)))
    assert (batch.max_len, batch.num_placeholders, batch.num_wide_tokens) == (0, 0, 0)
    for made in (batch.select([]), *batch.split(5), RaggedBatch.concat([batch]), batch.pad_to(4)):
        assert (made.num_tokens, made.token_ids.tolist()) == (0, [])


# What consumers take.


def test_what_a_consumer_of_int32_cumulative_lengths_takes() -> None:
    # Case 17.
    batch = plain(3, 0, 2)
    assert (batch.cu_seqlens.dtype, batch.cu_seqlens.tolist()) == (torch.int32, [0, 3, 3, 5])
    assert (type(batch.max_len), batch.max_len) == (int, 3)
    assert (type(batch.num_reqs), type(batch.num_tokens), type(batch.dropped_tokens)) == (int, int, int)
    assert {tensor.dtype for tensor in (batch.positions, batch.req_ids, batch.last_token_indices)} == {torch.int64}
    assert plain().max_len == 0


def test_cumulative_lengths_beyond_int32_are_an_overflow_and_the_offsets_are_right(refused: Any) -> None:
    # Case 5: a meta tensor has the size of the tokens and none of their memory.
    layout = RaggedLayout(lengths=[INT32_MAX, 2], req_pool_indices=[1, 2])
    packed = torch.empty(len(layout.header) + layout.num_tokens, dtype=torch.int64, device="meta")
    batch = RaggedBatch(layout, packed)
    assert batch.layout.offsets.tolist() == [0, INT32_MAX, INT32_MAX + 2]
    with refused(
        RaggedOverflowError,
        f"cu_seqlens must fit int32, got num_tokens {INT32_MAX + 2}",
        argument="cu_seqlens",
        got=INT32_MAX + 2,
        bound=INT32_MAX,
        note="use offsets, which are int64, or split the batch",
    ):
        _ = batch.cu_seqlens


def test_what_is_derived_is_made_once() -> None:
    batch = plain(3, 0, 2)
    for name in ("cu_seqlens", "positions", "req_ids", "last_token_indices"):
        assert getattr(batch, name) is getattr(batch, name)


# What a batch says of itself.


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: plain(), "RaggedBatch(num_reqs=0, num_tokens=0, lengths=[], rows=[], device=cpu)"),
        (lambda: plain(3, 0), "RaggedBatch(num_reqs=2, num_tokens=3, lengths=[3, 0], rows=[1, 2], device=cpu)"),
        (
            lambda: plain(1, 2, 3, 4, 5, 6, 7),
            "RaggedBatch(num_reqs=7, num_tokens=28, lengths=[1, 2, 3, 4, 5, 6, ...], rows=[1, 2, 3, 4, 5, 6, ...], "
            "device=cpu)",
        ),
        (
            lambda: RaggedBatch.from_sequences(
                [[-1, 2, WIDE]],
                req_pool_indices=[1],
                allow_placeholders=True,
                wide_tokens="opaque",
                pool_shape=(2, 2),
                overflow="truncate",
            ),
            "RaggedBatch(num_reqs=1, num_tokens=3, lengths=[3], rows=[1], num_placeholders=1, num_wide_tokens=1, "
            "dropped_tokens=1, device=cpu)",
        ),
    ],
    ids=["nothing", "few", "more_than_six", "special"],
)
def test_a_repr_says_counts_first_lengths_rows_and_device(make: Callable[[], RaggedBatch], text: str) -> None:
    assert repr(make()) == text


def test_a_repr_fits_on_a_line_however_large_the_batch() -> None:
    batch = RaggedBatch.from_sequences([[7] * 1000] * 500, req_pool_indices=range(99_000, 99_500))
    assert len(repr(batch)) < 200
    assert "\n" not in repr(batch)


def test_batches_compare_by_identity() -> None:
    # Case 69: nothing here raises, and nothing compares elements.
    batch, equal = plain(3, 0, 2), plain(3, 0, 2)
    assert batch == batch
    assert batch != equal
    assert batch != None  # noqa: E711 - the operator is what is tested
    assert batch.layout == equal.layout
    assert hash(batch) == hash(batch)
    assert {batch: "kept"}[batch] == "kept"
    assert batch in [None, equal, batch]
    assert batch not in [None, equal, batch.layout]


def test_a_batch_cannot_be_changed() -> None:
    batch = plain(2)
    for name in ("layout", "packed", "counts", "token_ids", "num_tokens"):
        with pytest.raises(AttributeError):
            setattr(batch, name, None)


# Copies.


def _saved(batch: RaggedBatch) -> RaggedBatch:
    file = io.BytesIO()
    torch.save(batch, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert isinstance(loaded, RaggedBatch)
    return loaded


COPIES: dict[str, Callable[[RaggedBatch], RaggedBatch]] = {
    "pickle": lambda batch: pickle.loads(pickle.dumps(batch)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "torch_save": _saved,
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("inference", [False, True], ids=["eager", "made_in_inference_mode"])
def test_a_copy_is_equal_packed_and_checked(contents: Any, copied: Any, inference: bool) -> None:
    # Case 70, 65.
    with torch.inference_mode(inference):
        batch = RaggedBatch.from_sequences(
            [np.array([5, -1], dtype=np.int16), [], [WIDE]],
            req_pool_indices=[4, 1, 7],
            prefix_lens=[1, 0, 3],
            req_ids=["a", "b", "c"],
            pool_shape=(8, 9),
            allow_placeholders=True,
            wide_tokens="opaque",
            mode="coerce",
        )
    other = copied(batch)
    assert other is not batch
    assert contents(other) == contents(batch)
    assert other.packed.untyped_storage().nbytes() == other.packed.nbytes
    assert other.token_ids.untyped_storage().data_ptr() == other.packed.untyped_storage().data_ptr()
    assert not other.layout.lengths.flags.writeable


def small_out_of_a_large_slot() -> RaggedBatch:
    builder = RaggedBatchBuilder()
    for _ in range(2):  # every slot of the ring has been this large
        builder.add(1, np.zeros(10**6, dtype=np.int64))
        builder.build()
    builder.extend([1, 2, 3], [[5], [], [6, 7]])
    return builder.build()


SMALL: dict[str, Callable[[], RaggedBatch]] = {
    "of_a_large_capacity": small_out_of_a_large_slot,
    "selected_from_a_large_batch": lambda: plain(3, 100_000, 100_000).select([0]),
    "split_from_a_large_batch": lambda: plain(3, 100_000).split(100_000)[1],
    "moved": lambda: small_out_of_a_large_slot().to("cpu:0"),
}


@pytest.mark.parametrize("make", SMALL.values(), ids=SMALL)
def test_a_small_batch_is_small_on_its_way(contents: Any, make: Callable[[], RaggedBatch]) -> None:
    # Case 70: no stale tail of the staging memory is shipped.
    batch = make()
    file = io.BytesIO()
    torch.save(batch, file)
    assert len(file.getvalue()) < 10_000
    assert len(pickle.dumps(batch)) < 10_000
    assert copy.deepcopy(batch).packed.untyped_storage().nbytes() < 10_000


def _echo(received: Any, sent: Any) -> None:
    for batch in iter(received.get, None):
        sent.put((batch.packed.untyped_storage().nbytes(), batch.layout.req_pool_indices.tolist(), batch.token_ids))


def test_a_batch_goes_through_a_queue_to_another_process() -> None:
    # Case 70. The other process must have taken it before this one drops it: torch hands over shared memory.
    context = torch.multiprocessing.get_context("spawn")
    to, back = context.Queue(), context.Queue()
    process = context.Process(target=_echo, args=(to, back))
    process.start()
    try:
        batch = small_out_of_a_large_slot()
        to.put(batch)
        nbytes, rows, token_ids = back.get(timeout=60)
        assert (rows, token_ids.tolist()) == ([1, 2, 3], [5, 6, 7])
        assert nbytes < 10_000
        assert batch.token_ids.tolist() == [5, 6, 7]
        del token_ids
    finally:
        to.put(None)
        process.join(60)
        process.kill()
    assert process.exitcode == 0


# Devices.


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)], ids=repr)
def test_a_batch_that_is_there_already_is_itself(device: Any) -> None:
    # Case 68.
    batch = plain(2)
    assert batch.to(device) is batch
    assert batch.device == torch.device("cpu")


def test_a_batch_goes_to_no_device_that_cannot_hold_it(refused: Any) -> None:
    with refused(RaggedValueError, "device must be cpu or cuda, got meta", argument="device", got="meta"):
        plain(2).to("meta")


@pytest.mark.parametrize("device", [None, "nowhere", 2**63, 2**64], ids=repr)
def test_what_names_no_device_is_refused(refused: Any, device: Any) -> None:
    with refused(RaggedTypeError, f"device must name a device, got {device!r}", argument="device", got=device):
        plain(2).to(device)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens_from", ["host", "device"])
def test_to_a_gpu_and_back_is_the_same_batch(contents: Any, agrees: Any, tokens_from: str) -> None:
    model = Model([Request(4, [5, 6], 3), Request(1, []), Request(7, [7])])
    if tokens_from == "host":
        batch = batch_of(model, device="cuda")
    else:
        flat = torch.tensor(model.token_ids, device="cuda")
        batch = RaggedBatch.from_lengths(
            flat, model.lengths, req_pool_indices=model.rows, prefix_lens=model.prefix_lens, device="cuda"
        )
    agrees(batch, model)
    back = batch.to("cpu")
    agrees(back, model)
    assert contents(back) == contents(batch)
    assert back.device == torch.device("cpu")
    there = back.to("cuda")
    assert there.device == torch.device("cuda", torch.cuda.current_device())
    agrees(there, model)
    assert there.to("cuda") is there
    for operation in OPERATIONS.values():
        agrees(operation(batch), model)


@pytest.mark.gpu
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("tokens_from", ["host", "device"])
def test_a_copy_of_a_batch_on_a_gpu_is_equal_and_stays_there(contents: Any, copied: Any, tokens_from: str) -> None:
    # Case 70.
    large = torch.arange(10**6, device="cuda")
    tokens = large[5:8] if tokens_from == "device" else [5, 6, 7]
    batch = RaggedBatch.from_lengths(tokens, [1, 0, 2], req_pool_indices=[1, 2, 3], device="cuda")
    other = copied(batch)
    assert contents(other) == contents(batch)
    assert other.device == batch.device
    assert len(pickle.dumps(batch)) < 10_000


@pytest.mark.gpu
def test_batches_of_two_devices_do_not_go_together(refused: Any) -> None:
    here, there = plain(2), RaggedBatch.from_sequences([[5]], req_pool_indices=[9], device="cuda")
    with refused(
        RaggedValueError,
        f"batches must share one device, got {there.device} at 1 after cpu",
        argument="batches",
        got=str(there.device),
        bound="cpu",
    ):
        RaggedBatch.concat([here, there])


# A batch made by hand, field by field: what a kernel will follow by address is checked too.


def _by_hand(batch: RaggedBatch, **fields: Any) -> RaggedBatch:
    return attrs.evolve(batch, **fields)


@pytest.mark.parametrize(
    ("make", "kind", "text", "argument"),
    [
        (lambda p: p[:-1], RaggedValueError, "packed length 50 != length of its layout (51)", "packed"),
        (lambda p: p.to(torch.int32), RaggedTypeError, "packed must be int64, got torch.int32", "packed"),
        (lambda p: p.view(torch.float64), RaggedTypeError, "packed must be int64, got torch.float64", "packed"),
        (lambda p: p[:, None], RaggedValueError, "packed must be 1-D, got shape (51, 1)", "packed"),
        (
            lambda p: p.repeat_interleave(2)[::2],
            RaggedValueError,
            "packed must be contiguous, got strides (2,)",
            "packed",
        ),
        (lambda p: p.numpy(), RaggedTypeError, "packed must be a tensor, got ndarray", "packed"),
        (lambda p: None, RaggedTypeError, "packed must be a tensor, got NoneType", "packed"),
    ],
    ids=["short", "int32", "float64", "a_table", "strided", "numpy", "none"],
)
def test_a_buffer_that_is_not_what_its_layout_says_is_refused(make: Any, kind: Any, text: str, argument: str) -> None:
    batch = plain(2, 1)
    with pytest.raises(kind) as caught:
        _by_hand(batch, packed=make(batch.packed))
    assert (type(caught.value), str(caught.value), caught.value.argument) == (kind, text, argument)


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda t: t[:-1], RaggedValueError, "device_tokens length 2 != num_tokens of its layout (3)"),
        (lambda t: t.to(torch.int32), RaggedTypeError, "device_tokens must be int64, got torch.int32"),
        (lambda t: t[:, None], RaggedValueError, "device_tokens must be 1-D, got shape (3, 1)"),
        (
            lambda t: t[:1].expand(3),
            RaggedValueError,
            "device_tokens must be contiguous, got strides (0,)",
        ),
        (lambda t: t.to("meta"), RaggedValueError, "device_tokens is on meta, packed is on cpu"),
        (lambda t: t.tolist(), RaggedTypeError, "device_tokens must be a tensor, got list"),
    ],
    ids=["short", "int32", "a_table", "expanded", "elsewhere", "a_list"],
)
def test_tokens_that_are_not_what_the_layout_says_are_refused(make: Any, kind: Any, text: str) -> None:
    batch = plain(2, 1)
    header = batch.packed[: len(batch.layout.header)]
    with pytest.raises(kind) as caught:
        RaggedBatch(batch.layout, header, make(batch.token_ids))
    assert (type(caught.value), str(caught.value), caught.value.argument) == (kind, text, "device_tokens")


@pytest.mark.parametrize("layout", [None, {"lengths": [2, 1]}], ids=repr)
def test_a_batch_has_a_layout(refused: Any, layout: Any) -> None:
    got = type(layout).__name__
    with refused(RaggedTypeError, f"layout must be a RaggedLayout, got {got}", argument="layout", got=got):
        RaggedBatch(layout, plain(2, 1).packed)


def test_a_batch_by_hand_of_sound_parts_is_a_batch(agrees: Any) -> None:
    model = Model([Request(4, [5, 6], 3), Request(1, []), Request(7, [7])])
    batch = batch_of(model)
    agrees(RaggedBatch(batch.layout, batch.packed), model)
    header = batch.packed[: len(batch.layout.header)]
    agrees(RaggedBatch(batch.layout, header, batch.token_ids.clone()), model)


# Names of requests.


@pytest.mark.parametrize(
    "make",
    [list, tuple, dict.fromkeys, iter, lambda ids: (name for name in ids)],
    ids=["list", "tuple", "dict", "iterator", "generator"],
)
@pytest.mark.parametrize("way", ["from_sequences", "from_lengths", "from_offsets"])
def test_ids_may_come_from_anything_that_can_be_walked_once(make: Any, way: str) -> None:
    tokens = {
        "from_sequences": ([[5], [6]],),
        "from_lengths": ([5, 6], [1, 1]),
        "from_offsets": ([5, 6], [0, 1, 2]),
    }[way]
    batch = getattr(RaggedBatch, way)(*tokens, req_pool_indices=[1, 2], req_ids=make(["a", "b"]))
    assert batch.layout.req_ids == ("a", "b")


@pytest.mark.parametrize("way", ["from_lengths", "from_offsets"])
def test_too_few_ids_do_not_hide_what_is_wrong_with_the_tokens(refused: Any, way: str) -> None:
    sizes = [1, 2] if way == "from_lengths" else [0, 1, 3]
    with refused(
        RaggedTypeError,
        "token_ids must be integers, got str 'a' at request 1, position 1",
        argument="token_ids",
        request=1,
        got="a",
        bound="int64",
    ):
        getattr(RaggedBatch, way)([5, 6, "a"], sizes, req_pool_indices=[1, 2], req_ids=["x"])
