"""kv_canary.scatter with device guards that contain and do not report."""

from __future__ import annotations

from bench.inputs import InputSet
from bench.providers.base import Provider
from bench.providers.ours import backend_of
from bench.timing import Call
from kv_canary import scatter


class OursNoReport(Provider):
    """Contained, nothing counted."""

    name = "ours_no_report"
    summary = "scatter(batch, pool): contained, nothing counted"

    def prepare(self, inputs: InputSet) -> Call:
        batch, pool, backend = inputs.batch, inputs.pool, backend_of(inputs.pool.device)
        return lambda: scatter(batch, pool, backend=backend)
