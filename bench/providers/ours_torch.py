"""kv_canary.scatter on the torch backend, with a report."""

from __future__ import annotations

from bench.inputs import InputSet
from bench.providers.base import Provider
from bench.timing import Call
from kv_canary import GuardReport, scatter


class OursTorch(Provider):
    """The torch backend; it asks the device how much to write, so no graph can hold it."""

    name = "ours_torch"
    summary = 'scatter(batch, pool, report=report, backend="torch")'
    graph = False

    def prepare(self, inputs: InputSet) -> Call:
        batch, pool, report = inputs.batch, inputs.pool, GuardReport.allocate(inputs.pool.device)
        return lambda: scatter(batch, pool, report=report, backend="torch")
