"""What a suite is, and what a run of it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import attrs
import torch

from bench.results import Row


@attrs.frozen
class Settings:
    """What a run was asked for. ``providers`` empty: all; ``cases`` are globs."""

    device: torch.device
    providers: tuple[str, ...] = ()
    cases: tuple[str, ...] = ("*",)
    quick: bool = False
    traces: Path | None = None

    @property
    def has_targets(self) -> bool:
        """Targets for device code are those of issue 3, for a GPU and the full cases."""
        return self.device.type == "cuda" and not self.quick

    def wants(self, provider: str) -> bool:
        return not self.providers or provider in self.providers

    def wants_case(self, case: str) -> bool:
        return any(fnmatchcase(case, glob) for glob in self.cases)


@attrs.frozen
class Suite:
    """A name, a line about it, the function that yields its rows, and providers that only it has."""

    name: str
    summary: str
    run: Callable[[Settings], Iterator[Row]]
    providers: tuple[str, ...] = ()
