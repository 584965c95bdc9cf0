"""Reading a small device table without stalling: what a report and a violation log have in common."""

from __future__ import annotations

from typing import Any

import torch

from ragged.convert import Int64Array
from ragged.staging import current_stream

KEPT_LAUNCHES = 1024
"""For so many launches back a table still knows what the host knew of its batch."""


class Snapshot:
    """Copies of ``table`` on their way to the host.

    Each ``poll`` picks up what the last one asked for, and asks anew, so that a step sees the table of a step or two
    before it. On the CPU it is the table of now.
    """

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table
        self.arrived: tuple[int, Int64Array] | None = None
        """The newest copy, and the label of the poll that had asked for it."""
        self._on_its_way: tuple[int, torch.Tensor, torch.cuda.Event] | None = None

    def poll(self, label: int = 0) -> Int64Array | None:
        """The newest that has arrived, to be read at once. Never syncs."""
        if self.table.device.type == "cpu":
            self.arrived = (label, self.table.numpy())
            return self.arrived[1]
        if self._on_its_way is not None and self._on_its_way[2].query():
            self.arrived, self._on_its_way = (self._on_its_way[0], self._on_its_way[1].numpy()), None
        if self._on_its_way is None:
            target = torch.empty(self.table.shape, dtype=self.table.dtype, device="cpu", pin_memory=True)
            target.copy_(self.table, non_blocking=True)
            event = torch.cuda.Event()
            event.record(current_stream(self.table.device))
            self._on_its_way = (label, target, event)
        return None if self.arrived is None else self.arrived[1]

    def forget(self) -> None:
        """Drop what has arrived and what is on its way."""
        self.arrived = self._on_its_way = None


def lasting_ids(req_ids: tuple[object, ...] | None, device: torch.device) -> tuple[object, ...] | None:
    """The ids that a launch's findings are named by: none while a CUDA graph is captured, for a replay's are others."""
    is_captured = req_ids is not None and device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return None if is_captured else req_ids


class Launches:
    """What the host knew of the last KEPT_LAUNCHES launches, by number, so that findings are named by their own."""

    def __init__(self) -> None:
        self._kept: list[tuple[int, Any] | None] = [None] * KEPT_LAUNCHES
        self._number = 0

    def begin(self, known: Any) -> int:
        """Number a launch."""
        self._number += 1
        self._kept[self._number % KEPT_LAUNCHES] = (self._number, known)
        return self._number

    def known(self, number: int) -> Any:
        """What was known of a launch; None where it is too long ago."""
        kept = self._kept[number % KEPT_LAUNCHES]
        return None if kept is None or kept[0] != number else kept[1]

    def forget(self) -> None:
        """Forget all; numbers go on."""
        self._kept = [None] * KEPT_LAUNCHES
