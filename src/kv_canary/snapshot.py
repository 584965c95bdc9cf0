"""Reading a small device table without stalling: what a report and a violation log have in common."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

KEPT_LAUNCHES = 1024
"""For so many launches back a table still knows what the host knew of its batch."""


class Snapshot:
    """Copies of ``table`` on their way to the host.

    Each ``poll`` picks up what the last one asked for, and asks anew, so that a step sees the table of a step or two
    before it. On the CPU it is the table of now.
    """

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table
        self._arrived: tuple[list[list[int]], Any] | None = None
        self._on_its_way: tuple[torch.Tensor, torch.cuda.Event, Any] | None = None

    def poll(self, note: Hashable = None) -> tuple[list[list[int]], Any] | None:
        """The newest lines that have arrived, and the ``note`` of the call that asked for them. Never syncs."""
        if self.table.device.type == "cpu":
            return self.table.tolist(), note
        if self._on_its_way is not None and self._on_its_way[1].query():
            target, _, asked = self._on_its_way
            self._arrived, self._on_its_way = (target.tolist(), asked), None
        if self._on_its_way is None:
            target = torch.empty(self.table.shape, dtype=self.table.dtype, device="cpu", pin_memory=True)
            target.copy_(self.table, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.table.device))
            self._on_its_way = (target, event, note)
        return self._arrived

    def forget(self) -> None:
        """Drop what has arrived and what is on its way."""
        self._arrived = self._on_its_way = None


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
