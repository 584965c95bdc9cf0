"""What a canary takes: columns from the host or from the device, tables, and how many slots a call looks at."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kv_canary import kinds
from kv_canary.guards import POOL
from ragged import Mode, RaggedLayout, RaggedTypeError, RaggedValueError, StagingRing
from ragged.convert import Converter, Int64Array
from ragged.errors import request_name
from ragged.rules import HasDtype, HasLength, HasNDim, IsContiguous, IsDense, OnDevice, Rule, apply


class Intake:
    """Checks inputs, and brings those of the host to ``device`` through a staging ring of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._ring = StagingRing(device)

    def column(self, value: Any, name: str, length: int | None, meaning: str) -> torch.Tensor:
        """int64 ``[n]`` on the device, from there or from host integers; ``length`` None for any.

        Raises: RaggedTypeError, RaggedValueError.
        """
        if isinstance(value, torch.Tensor) and value.device == self.device:
            self.check(value, IsContiguous(name), "int64", ndim=1)
        else:
            array: Int64Array = Converter(Mode.STRICT).host(value, name)
            slot = self._ring.acquire(len(array))
            slot.array[: len(array)] = array
            value = self._ring.send(slot, 0, len(array))
        if length is not None:
            apply([HasLength(name, meaning, lambda _: length)], {name: value}, where=POOL)
        return value  # type: ignore[no-any-return]

    def optional(self, value: Any, name: str, length: int, meaning: str) -> torch.Tensor | None:
        """The same, or None for None."""
        return None if value is None else self.column(value, name, length, meaning)

    def check(self, tensor: Any, strides: Rule, dtype: str, ndim: int) -> None:
        """A dense tensor of this kind on the canary's device; ``strides`` names it."""
        name = strides.argument
        if not isinstance(tensor, torch.Tensor):
            got = type(tensor).__name__
            raise RaggedTypeError(f"{POOL}{name} must be a tensor, got {got}", argument=name, got=got)
        on_device = OnDevice(name, "the canary", lambda _: self.device)
        rules: list[Rule] = [IsDense(name), HasNDim(name, ndim), HasDtype(name, dtype), on_device, strides]
        apply(rules, {name: tensor}, where=POOL)


def refuse_continuing(layout: RaggedLayout) -> None:
    """Raise RaggedValueError where a request with tokens has a prefix: its chain needs a seed."""
    if layout.max_prefix_len == 0:
        return
    continuing = (layout.prefix_lens > 0) & (layout.lengths > 0)
    if continuing.any():
        request = int(continuing.argmax())
        req_id, prefix_len = layout.req_id(request), int(layout.prefix_lens[request])
        says = f"must be given where a request continues: prefix_len is {prefix_len}"
        raise RaggedValueError(
            f"{POOL}seed_slots {says} at {request_name(request, req_id)}",
            argument="seed_slots",
            request=request,
            req_id=req_id,
            bound=prefix_len,
        )


def period_of(bounds: Int64Array, budget: int | None) -> tuple[int, int]:
    """Every how manieth position is looked at, a power of two, and at most how many that makes.

    ``bounds``: int64 ``[num_reqs]``, positions of each request. Raises: RaggedValueError where no period will do.
    """
    if budget is None:
        return 1, int(bounds.sum(dtype=np.int64))
    period = 1
    while (most := int((-(-bounds // period)).sum(dtype=np.int64))) > budget:
        if period == kinds.PHASES:
            raise RaggedValueError(
                f"{POOL}budget must be at least {most} for these requests, got {budget}",
                argument="budget",
                got=budget,
                bound=most,
            )
        period *= 2
    return period, most
