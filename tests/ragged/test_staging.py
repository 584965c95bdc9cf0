"""Staging: who may write a slot, and when."""

import logging
from typing import Any

import numpy as np
import pytest
import torch

from ragged import (
    Capacity,
    RaggedBatch,
    RaggedBatchBuilder,
    RaggedError,
    RaggedTypeError,
    RaggedValueError,
    StagingRing,
)
from ragged.staging import resolve_device

POISON = -0x0BAD_70CE
CAPTURED = (
    "host data cannot be sent while a CUDA graph is captured: a replay would send what the staging memory holds by then"
)
HINT = "build the batch before the capture, and pass columns as tensors on the device"


@pytest.mark.parametrize("name", ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)], ids=repr)
def test_every_name_of_the_cpu_is_one_device(name: Any) -> None:
    # Case 68.
    assert resolve_device(name) == torch.device("cpu")
    batch = RaggedBatch.from_sequences([[5]], req_pool_indices=[1], device=name, mode="coerce")
    assert batch.device == torch.device("cpu")
    assert batch.to("cpu:0") is batch
    assert batch.coercions == ()


@pytest.mark.parametrize("name", ["nowhere", "", 1.5, ["cpu"]], ids=repr)
def test_what_names_no_device_is_refused_when_it_is_given(refused: Any, name: Any) -> None:
    text = f"device must name a device, got {name!r}"
    for make in (resolve_device, StagingRing, lambda device: RaggedBatchBuilder(device=device)):
        with refused(RaggedTypeError, text, argument="device", got=name):
            make(name)


def test_a_device_of_another_kind_is_refused(refused: Any) -> None:
    with refused(RaggedValueError, "device must be cpu or cuda, got meta", argument="device", got="meta"):
        RaggedBatchBuilder(device="meta")


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:7"])
def test_cuda_without_cuda_is_one_clear_error_at_construction(
    refused: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # Case 22: not at the first build.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = f"device {name} is not available: this process sees no CUDA device"
    with refused(RaggedValueError, text, argument="device", got=name):
        RaggedBatchBuilder(device=name)
    with refused(RaggedValueError, text, argument="device", got=name):
        RaggedBatch.from_sequences([[5]], req_pool_indices=[1]).to(name)


@pytest.mark.parametrize("num_slots", [0, -1])
def test_a_ring_has_at_least_one_slot(refused: Any, num_slots: int) -> None:
    text = f"num_slots must be at least 1, got {num_slots}"
    with refused(RaggedValueError, text, argument="num_slots", got=num_slots, bound=1):
        StagingRing("cpu", num_slots=num_slots)


def test_on_the_cpu_the_ring_hands_out_the_memory_itself() -> None:
    ring = StagingRing("cpu")
    slot = ring.acquire(64)
    slot.array[:] = range(len(slot.array))
    sent = ring.send(slot, 16, 48)
    assert sent.data_ptr() == slot.array.ctypes.data + 16 * 8
    assert sent.tolist() == list(range(16, 48))


def test_on_the_cpu_a_built_batch_is_the_staged_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = []
    acquire = StagingRing.acquire

    def remember(self: StagingRing, num_elements: int) -> Any:
        slots.append(acquire(self, num_elements))
        return slots[-1]

    monkeypatch.setattr(StagingRing, "acquire", remember)
    batch = RaggedBatch.from_sequences([[5, 6], [7]], req_pool_indices=[1, 2])
    (slot,) = slots
    first, last = slot.array.ctypes.data, slot.array.ctypes.data + slot.array.nbytes
    assert first <= batch.packed.data_ptr() < last
    assert batch.packed.data_ptr() + batch.packed.nbytes <= last


def test_on_the_cpu_memory_comes_back_only_when_no_tensor_over_it_is_left() -> None:
    ring = StagingRing("cpu", num_slots=1)
    slot = ring.acquire(32)
    slot.array[:] = 5
    view = ring.send(slot, 0, 32)[4:6].view(2, 1)  # a view of a view, and the tensors before it are gone
    address = slot.array.ctypes.data
    del slot
    for _ in range(3):
        other = ring.acquire(32)
        assert other.array.ctypes.data != address
        other.array[:] = POISON
    assert view.flatten().tolist() == [5, 5]
    array = view.numpy()
    del view
    ring.acquire(32).array[:] = POISON
    assert array.flatten().tolist() == [5, 5]


def test_on_the_cpu_a_steady_state_reuses_its_memory() -> None:
    builder = RaggedBatchBuilder()
    addresses = set()
    for step in range(20):
        builder.extend([1, 2], [[step], [step, step]])
        addresses.add(builder.build().packed.data_ptr())
    assert len(addresses) <= 2


@pytest.mark.parametrize("num_elements", [0, 1, 15, 16, 17, 1000])
def test_a_slot_is_large_enough(num_elements: int) -> None:
    slot = StagingRing("cpu").acquire(num_elements)
    assert len(slot.array) >= num_elements
    assert slot.array.dtype == np.int64


def test_a_slot_that_grows_keeps_what_it_holds() -> None:
    ring = StagingRing("cpu")
    slot = ring.acquire(16)
    slot.array[:16] = range(16)
    ring.grow(slot, 100)
    assert len(slot.array) >= 100
    assert slot.array[:16].tolist() == list(range(16))


def test_the_cpu_is_silent_about_pinning(caplog: pytest.LogCaptureFixture) -> None:
    # Case 22.
    with caplog.at_level(logging.DEBUG, logger="ragged"):
        RaggedBatch.from_sequences([[5]], req_pool_indices=[1])
    assert caplog.records == []
    assert not torch.cuda.is_initialized() or torch.cuda.is_available()


class FakeEvent:
    """An event of a device that is simulated: done when somebody has waited for it."""

    log: list[str]

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def record(self, _stream: Any = None) -> None:
        self.log.append(f"record {self.name}")

    def synchronize(self) -> None:
        self.log.append(f"wait {self.name}")


@pytest.fixture
def device_ring(monkeypatch: pytest.MonkeyPatch) -> tuple[StagingRing, list[str]]:
    """A ring for the meta device, with events that say who waits for what: the logic of the slots without a GPU."""
    log: list[str] = []
    names = iter("abcdefgh")
    monkeypatch.setattr(torch.cuda, "Event", lambda: FakeEvent(next(names), log))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr("ragged.staging.resolve_device", lambda _device: torch.device("meta"))
    ring = StagingRing("meta", num_slots=2)
    return ring, log


def test_nothing_is_staged_while_a_graph_is_captured(
    device_ring: Any, monkeypatch: pytest.MonkeyPatch, refused: Any
) -> None:
    ring, log = device_ring
    slot = ring.acquire(16)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for call in (lambda: ring.acquire(16), lambda: ring.send(slot, 0, 16)):
        with refused(RaggedError, CAPTURED, note=HINT):
            call()
    assert log == []


def test_a_slot_is_waited_for_before_it_is_handed_out_again(device_ring: Any) -> None:
    # Case 1 and 18 without a device: each slot waits for its own last copy and for no other.
    ring, log = device_ring
    for number in range(5):
        slot = ring.acquire(16)
        log.append(f"write {number}")
        ring.send(slot, 0, 16)
    assert [line for line in log if not line.startswith("record")] == [
        "write 0",
        "write 1",
        "wait a",
        "write 2",
        "wait b",
        "write 3",
        "wait a",
        "write 4",
    ]


def test_a_slot_that_is_replaced_by_a_larger_one_is_waited_for_first(device_ring: Any) -> None:
    # Case 18: memory that a copy still reads is not freed.
    ring, log = device_ring
    ring.send(ring.acquire(16), 0, 16)
    ring.send(ring.acquire(16), 0, 16)
    larger = ring.acquire(1000)
    assert log[-1] == "wait a"
    assert len(larger.array) >= 1000


def test_a_steady_state_allocates_no_host_memory(device_ring: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ring, _ = device_ring
    seen = set()
    for number in range(20):
        slot = ring.acquire(900 + 5 * number)
        seen.add(slot.array.ctypes.data)
        ring.send(slot, 0, 16)
    assert len(seen) == 2


def test_slots_grow_geometrically(device_ring: Any) -> None:
    # Case 52 without a device: at most twice the largest batch a slot, in few steps.
    ring, _ = device_ring
    size, sizes = 1000, set()
    while size < 5_000_000:
        slot = ring.acquire(size)
        assert size <= len(slot.array) <= 2 * size + 16
        sizes.add(len(slot.array))
        size = size * 107 // 100
    assert len(sizes) <= 14


def test_where_pinning_fails_it_is_said_once_and_staging_goes_on(
    device_ring: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ring, _ = device_ring
    empty = torch.empty

    def unpinned_only(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("no pinned memory here")
        return empty(*args, **options)

    monkeypatch.setattr(torch, "empty", unpinned_only)
    with caplog.at_level(logging.DEBUG, logger="ragged"):
        slots = [ring.acquire(size) for size in (16, 16, 1000)]
    assert [len(slot.array) >= size for slot, size in zip(slots, (16, 16, 1000), strict=True)] == [True] * 3
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.WARNING, "pinning host memory failed, going on unpinned and slower: no pinned memory here")
    ]


# On a GPU.


@pytest.mark.gpu
def test_fifty_batches_in_a_row_each_keep_their_own_data(busy: Any) -> None:
    # Case 1.
    builder = RaggedBatchBuilder(device="cuda")
    busy()
    batches = []
    for step in range(50):
        builder.extend([step, step + 100, step + 200], [[step] * 40, [], [step + 1000] * 3], prefix_lens=[step, 0, 1])
        batches.append(builder.build())
    for step, batch in enumerate(batches):
        assert batch.token_ids.tolist() == [step] * 40 + [step + 1000] * 3
        assert batch.offsets.tolist() == [0, 40, 40, 43]
        assert batch.req_pool_indices.tolist() == [step, step + 100, step + 200]
        assert batch.prefix_lens.tolist() == [step, 0, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("waits", [True, False], ids=["our_ring", "a_naive_ring"])
def test_a_ring_that_does_not_wait_would_send_another_steps_tokens(
    busy: Any, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    # Issue 5: the device lags 50 steps behind a ring of two slots. Without the wait the test above is no test.
    if not waits:
        monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda event: None)
    builder = RaggedBatchBuilder(device="cuda")
    for _ in range(2):  # both slots exist
        builder.add(1, [7] * 500)
        builder.build()
    torch.cuda.synchronize()
    busy()
    batches = []
    for step in range(50):
        builder.add(1, [step] * 500)
        batches.append(builder.build())
    own = [batch.token_ids.tolist() == [step] * 500 for step, batch in enumerate(batches)]
    assert all(own) is waits


@pytest.mark.gpu
def test_a_batch_whose_copy_is_in_flight_survives_everything_that_its_builder_does_next(busy: Any) -> None:
    # Case 18.
    builder = RaggedBatchBuilder(device="cuda")
    for _ in range(3):  # warm: both slots exist
        builder.extend([1, 2], [list(range(100)), list(range(50))])
        builder.build()
    torch.cuda.synchronize()
    busy()
    builder.extend([1, 2], [list(range(100)), list(range(50))])
    first = builder.build()
    builder.add(7, [9] * 30)
    builder.extend([8, 9], [[9] * 40, [9] * 60])
    builder.clear()
    for _ in range(3):
        builder.extend([1, 2], [[9] * 20_000, [9] * 30_000])  # slots grow
        builder.build()
    assert first.token_ids.tolist() == [*range(100), *range(50)]
    assert first.offsets.tolist() == [0, 100, 150]
    assert first.req_pool_indices.tolist() == [1, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["coerced", "builder_dropped"])
def test_memory_that_a_copy_still_reads_is_not_given_to_others(busy: Any, how: str) -> None:
    # Case 19.
    expected = list(range(2000))
    for _ in range(100):
        torch.cuda._sleep(2_000_000)
        if how == "coerced":
            batch = RaggedBatch.from_sequences(
                [torch.arange(2000, dtype=torch.int32).numpy()], req_pool_indices=[1], device="cuda", mode="coerce"
            )
        else:
            builder = RaggedBatchBuilder(device="cuda")
            builder.add(1, expected)
            batch = builder.build()
            del builder
        # The ring is gone: blocks of the same size would be its memory.
        others = [torch.full((4096,), -99, dtype=torch.int64, pin_memory=True) for _ in range(2)]
        assert batch.token_ids.tolist() == expected
        del others
    busy()
    batches = []
    for number in range(20):
        batch = RaggedBatch.from_sequences([[number] * 500], req_pool_indices=[1], device="cuda")
        batches.append(batch)
    blocks = [torch.full((1024,), -99, dtype=torch.int64, pin_memory=True) for _ in range(200)]
    assert [batch.token_ids.tolist() for batch in batches] == [[number] * 500 for number in range(20)]
    assert len(blocks) == 200


@pytest.mark.gpu
def test_pinned_memory_is_bounded_and_a_steady_state_pins_nothing_new() -> None:
    # Case 52.
    if not hasattr(torch.cuda, "host_memory_stats"):
        pytest.skip("this torch has no statistics of pinned memory")

    def pinned(name: str) -> int:
        return int(torch.cuda.host_memory_stats()[name])

    before = pinned("allocated_bytes.current")
    builder = RaggedBatchBuilder(device="cuda")
    size = 1000
    while size < 5_000_000:
        largest = 8 * (size + 200)
        builder.add(1, torch.zeros(size, dtype=torch.int64))
        builder.build()
        size = size * 107 // 100
    slots = [slot for slot in builder._assembly.ring._slots if slot is not None]
    assert sum(slot.array.nbytes for slot in slots) <= 2 * 2 * largest
    # The blocks that were outgrown stay in torch's cache, for the next of their size: half as much again and again.
    assert pinned("allocated_bytes.current") - before <= 2 * sum(slot.array.nbytes for slot in slots)
    small = torch.zeros(1000, dtype=torch.int64)
    builder.add(1, small)
    builder.build()
    allocations, steady = pinned("num_host_alloc"), pinned("allocated_bytes.current")
    for _ in range(10_000):
        builder.add(1, small)
        builder.build()
    assert (pinned("num_host_alloc"), pinned("allocated_bytes.current")) == (allocations, steady)


@pytest.mark.gpu
def test_slots_are_pinned_and_the_index_of_the_device_is_fixed() -> None:
    # Case 2 (the source of the copy) and 68.
    ring = StagingRing("cuda")
    current = torch.device("cuda", torch.cuda.current_device())
    assert ring.device == resolve_device("cuda") == current
    pinned = ring.acquire(100).pinned
    assert pinned is not None and pinned.is_pinned()


@pytest.mark.gpu
def test_a_device_that_is_not_there_is_named(refused: Any) -> None:
    count = torch.cuda.device_count()
    text = f"device cuda:{count} is not available: there are {count}"
    with refused(RaggedValueError, text, argument="device", got=f"cuda:{count}", bound=count):
        RaggedBatchBuilder(device=f"cuda:{count}")


@pytest.mark.gpu
def test_what_comes_from_the_host_is_refused_while_a_graph_is_captured(refused: Any) -> None:
    # The graph would hold a copy from the slot, and send whatever a later batch had put there.
    builder = RaggedBatchBuilder(device="cuda", capacity=Capacity(4, 10), padding_row=0)
    builder.build()
    builder.extend([1], [[5, 6]])
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()), refused(RaggedError, CAPTURED, note=HINT):
        builder.build()
    assert builder.build().token_ids.tolist() == [5, 6]
