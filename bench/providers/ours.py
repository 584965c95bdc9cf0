"""kv_canary.scatter with device guards that report."""

from __future__ import annotations

import torch

from bench.inputs import InputSet
from bench.providers.base import Provider, WrongResult
from bench.timing import Call
from kv_canary import GuardReport, scatter


def backend_of(device: torch.device) -> str:
    """Triton on a GPU. On a CPU there is only torch."""
    return "triton" if device.type == "cuda" else "torch"


class Ours(Provider):
    """Host guards, and device guards that report."""

    name = "ours"
    summary = "scatter(batch, pool, report=report), Triton on a GPU"

    def __init__(self) -> None:
        self.report: GuardReport | None = None

    def prepare(self, inputs: InputSet) -> Call:
        batch, pool, backend = inputs.batch, inputs.pool, backend_of(inputs.pool.device)
        self.report = report = self.report or GuardReport.allocate(pool.device)
        return lambda: scatter(batch, pool, report=report, backend=backend)

    def check(self, call: Call, inputs: InputSet, expected: torch.Tensor) -> None:
        super().check(call, inputs, expected)
        counts = self.report.counts() if self.report else {}
        if any(counts.values()):
            raise WrongResult(f"{self.name}: the report counts faults in a right batch: {counts}")
