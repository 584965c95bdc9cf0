"""The floor: a plain cast-copy of as many tokens. Nothing that moves them can be much faster."""

from __future__ import annotations

import torch

from bench.inputs import InputSet
from bench.providers.base import Provider
from bench.timing import Call


class Floor(Provider):
    """No scatter at all: what moving the tokens costs."""

    name = "floor"
    summary = "int64 -> int32 copy_ of as many tokens, no scatter"

    def __init__(self) -> None:
        self._out = torch.empty(0)

    def prepare(self, inputs: InputSet) -> Call:
        token_ids = inputs.batch.token_ids
        self._out = out = torch.empty_like(token_ids, dtype=torch.int32)
        return lambda: out.copy_(token_ids)

    def output(self, inputs: InputSet) -> torch.Tensor:
        return self._out

    def wanted(self, inputs: InputSet, expected: torch.Tensor) -> torch.Tensor:
        return inputs.batch.token_ids.to(torch.int32)
