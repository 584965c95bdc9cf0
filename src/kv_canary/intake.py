"""What a canary takes: columns from the host or from the device, tables, and how many slots a call looks at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from kv_canary import kinds
from kv_canary.guards import ACCEPTED_KEPT, POOL
from ragged import Mode, RaggedLayout, RaggedTypeError, RaggedValueError, StagingRing
from ragged.convert import Converter, Int64Array
from ragged.errors import request_name
from ragged.rules import HasDtype, HasLength, HasNDim, IsContiguous, IsDense, OnDevice, Rule, apply

MOST_SHIFT = kinds.PHASES.bit_length() - 1
"""Of the longest period, 1 << MOST_SHIFT."""


class Column(NamedTuple):
    """A column that was given: what it is called, and how long it must be (``meaning`` says of what), None for any."""

    value: Any
    name: str
    length: int | None = None
    meaning: str = ""


class Taken(NamedTuple):
    """A column on the device, int64 ``[n]``, and the host's array where it came from there."""

    tensor: torch.Tensor
    host: Int64Array | None


class Intake:
    """Checks inputs, and brings those of the host to ``device`` through a staging ring of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._ring = StagingRing(device)
        self._convert = Converter(Mode.STRICT)
        self._accepted: set[tuple[Any, ...]] = set()

    def columns(self, *given: Column) -> list[Taken]:
        """Each from the device or from host integers, these in one copy.

        Raises: RaggedTypeError, RaggedValueError.
        """
        taken, hosts = [], []
        for column in given:
            host = self._host(column)
            taken.append(Taken(column.value, host))
            if host is not None:
                hosts.append(host)
        if not hosts:
            return taken
        whole = hosts[0] if len(hosts) == 1 else np.concatenate(hosts)
        slot = self._ring.acquire(len(whole))
        slot.array[: len(whole)] = whole
        sent = iter(self._ring.send(slot, 0, len(whole)).split_with_sizes(list(map(len, hosts))))
        return [each if each.host is None else Taken(next(sent), each.host) for each in taken]

    def _host(self, column: Column) -> Int64Array | None:
        """The host's integers; None for a tensor that is on the device already."""
        value, host = column.value, None
        if isinstance(value, torch.Tensor) and value.device == self.device:
            self.check(value, column.name, IsContiguous, "int64", ndim=1)
        else:
            value = host = self._convert.host(value, column.name)
        if column.length is not None and value.shape[0] != column.length:
            rule = HasLength(column.name, column.meaning, lambda _: column.length or 0)
            apply([rule], {column.name: value}, where=POOL)
        return host

    def check(self, tensor: Any, name: str, strides: Callable[[str], Rule], dtype: str, ndim: int) -> None:
        """A dense tensor of this kind on the canary's device; once for all that look alike."""
        if not isinstance(tensor, torch.Tensor):
            got = type(tensor).__name__
            raise RaggedTypeError(f"{POOL}{name} must be a tensor, got {got}", argument=name, got=got)
        looks = None
        if tensor.layout is torch.strided and not tensor.is_nested:
            looks = (strides, dtype, ndim, tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
            if looks in self._accepted:
                return
        on_device = OnDevice(name, "the canary", lambda _: self.device)
        rules: list[Rule] = [IsDense(name), HasNDim(name, ndim), HasDtype(name, dtype), on_device, strides(name)]
        apply(rules, {name: tensor}, where=POOL)
        if looks is not None:
            if len(self._accepted) >= ACCEPTED_KEPT:
                self._accepted.clear()
            self._accepted.add(looks)


def length_of_tokens(layout: RaggedLayout) -> tuple[int, str]:
    """How long a column of a batch's tokens is, and what that number is called."""
    capacity = layout.bounds.capacity
    return (layout.num_tokens, "num_tokens") if capacity is None else (capacity.max_tokens, "max_tokens")


def refuse_continuing(layout: RaggedLayout) -> None:
    """Raise RaggedValueError where a request with tokens has a prefix, or may have: its chain needs a seed."""
    if layout.bounds.capacity is not None:
        says = f"{POOL}seed_slots must be given where a batch has a capacity: a replay may continue requests"
        raise RaggedValueError(says, argument="seed_slots")
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
    most = int(np.add.reduce(bounds))
    if budget is None or most <= budget:
        return 1, most
    shift = min((-(-most // budget) - 1).bit_length(), MOST_SHIFT)  # no smaller one will do
    if (roughly := (most >> shift) + len(bounds)) <= budget:
        return 1 << shift, roughly
    while (most := int(np.add.reduce((bounds + ((1 << shift) - 1)) >> shift))) > budget:
        if shift == MOST_SHIFT:
            raise RaggedValueError(
                f"{POOL}budget must be at least {most} for these requests, got {budget}",
                argument="budget",
                got=budget,
                bound=most,
            )
        shift += 1
    return 1 << shift, most
