"""Pinned host slots, guarded by events: a slot is never rewritten while its copy is in flight."""

from __future__ import annotations

import logging
import sys

import attrs
import numpy as np
import torch

from ragged.convert import Int64Array
from ragged.errors import RaggedError, RaggedTypeError, RaggedValueError
from ragged.integers import as_int

logger = logging.getLogger(__name__)


@attrs.define(eq=False)
class Slot:
    """Host memory, int64 ``[capacity]``, as an array and, in ``send``, as a tensor; ``copied`` ends its last copy."""

    array: Int64Array
    pinned: torch.Tensor | None = None
    copied: torch.cuda.Event | None = None


def resolve_device(device: object) -> torch.device:
    """The device with its index fixed, so that ``cuda`` and ``cuda:0`` compare equal.

    Raises: RaggedTypeError for what names no device; RaggedValueError for one that cannot be used here.
    """
    try:
        resolved = torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError, ValueError) as cause:
        raise RaggedTypeError(f"device must name a device, got {device!r}", argument="device", got=device) from cause
    if resolved.type == "cpu":
        return torch.device("cpu")
    if resolved.type != "cuda":
        raise RaggedValueError(f"device must be cpu or cuda, got {resolved}", argument="device", got=str(resolved))
    if not torch.cuda.is_available():
        raise RaggedValueError(
            f"device {resolved} is not available: this process sees no CUDA device",
            argument="device",
            got=str(resolved),
        )
    index = torch.cuda.current_device() if resolved.index is None else resolved.index
    if index >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise RaggedValueError(
            f"device {resolved} is not available: there are {count}", argument="device", got=str(resolved), bound=count
        )
    return torch.device("cuda", index)


_streams: dict[tuple[int, int], torch.cuda.Stream] = {}
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """``torch.cuda.current_stream``, which makes a new object at every call (2.9 us; kept ones 0.4, H200 host)."""
    if _raw_stream is None:
        return torch.cuda.current_stream(device)
    key = (device.index, _raw_stream(device.index))
    stream = _streams.get(key)
    if stream is None:
        stream = _streams[key] = torch.cuda.current_stream(device)
    return stream


class StagingRing:
    """A few host slots for one device, reused in turn.

    ``acquire`` is the only thing that makes a slot writable, and waits for that slot's own event first. ``send`` copies
    on the current stream of the ring's device and records the event behind the copy. On the CPU ``send`` hands the
    memory itself to the batch, and ``acquire`` takes it back once no tensor over it is left.

    Args:
        device: where the copies go.
        num_slots: how many copies may be in flight before ``acquire`` waits; on the CPU, how many slots are kept.
    """

    def __init__(self, device: torch.device | str, num_slots: int = 2) -> None:
        self.device = resolve_device(device)
        self._on_host = self.device.type == "cpu"
        self._slots: list[Slot | None] = [None] * as_int(num_slots, "num_slots", least=1)
        self._next = 0
        self._pin = not self._on_host

    def acquire(self, num_elements: int) -> Slot:
        """A writable slot of at least ``num_elements``; waits while its last copy is in flight."""
        self._refuse_capture()
        index, self._next = self._next, (self._next + 1) % len(self._slots)
        slot = self._slots[index]
        if slot is not None and slot.copied is not None:
            slot.copied.synchronize()
        if slot is None or len(slot.array) < num_elements or (self._on_host and _is_shared(slot)):
            slot = self._slots[index] = self._allocate(num_elements)
        return slot

    def grow(self, slot: Slot, num_elements: int) -> None:
        """Give an acquired slot more memory, keeping what it holds."""
        larger = self._allocate(num_elements)
        larger.array[: len(slot.array)] = slot.array
        slot.array, slot.pinned = larger.array, larger.pinned

    def send(self, slot: Slot, start: int, stop: int, into: torch.Tensor | None = None) -> torch.Tensor:
        """Elements ``[start, stop)`` of a slot as a tensor on the device, int64; one copy, no sync.

        ``into``: memory on the device that takes them, instead of new one.
        """
        if self._on_host and into is not None:
            return into[: stop - start].copy_(torch.from_numpy(slot.array[start:stop]))
        self._refuse_capture()
        if self._on_host:
            # The tensor's storage holds the array, so the array's reference count tells when the last view is gone.
            return torch.from_numpy(slot.array)[start:stop]
        host = torch.from_numpy(slot.array) if slot.pinned is None else slot.pinned
        if into is None:
            target = host[start:stop].to(self.device, non_blocking=True)
        else:
            target = into[: stop - start].copy_(host[start:stop], non_blocking=True)
        if slot.copied is None:
            slot.copied = torch.cuda.Event()
        slot.copied.record(current_stream(self.device))
        return target

    def _refuse_capture(self) -> None:
        """A copy in a CUDA graph would, at each replay, send what its slot holds by then."""
        if not self._on_host and torch.cuda.is_current_stream_capturing():
            raise RaggedError(
                "host data cannot be sent while a CUDA graph is captured: a replay would send what the staging memory "
                "holds by then",
                hint="build the batch before the capture, and pass columns as tensors on the device",
            )

    def _allocate(self, num_elements: int) -> Slot:
        """A power of two, so that batches that grow slowly do not reallocate at every step."""
        capacity = 1 << (max(num_elements, 1) - 1).bit_length()
        if self._pin:
            try:
                with torch.inference_mode(False):  # our own memory stays writable whichever mode the caller is in
                    pinned = torch.empty(capacity, dtype=torch.int64, device="cpu", pin_memory=True)
                return Slot(pinned.numpy(), pinned)
            except RuntimeError as error:
                self._pin = False
                logger.warning("pinning host memory failed, going on unpinned and slower: %s", error)
        return Slot(np.empty(capacity, dtype=np.int64))


def _references(slot: Slot) -> int:
    return sys.getrefcount(slot.array)


_UNSHARED = _references(Slot(np.empty(0, dtype=np.int64)))  # counted, since it differs between Python versions


def _is_shared(slot: Slot) -> bool:
    """Whether anything but its slot still holds its array: a tensor that a batch or a caller kept."""
    return _references(slot) > _UNSHARED
