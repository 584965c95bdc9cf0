"""A torch copy a request."""

from __future__ import annotations

from bench.inputs import InputSet
from bench.providers.base import Provider, Unavailable
from bench.timing import Call

MOST_REQS = 1024
"""Beyond it even a graph of three calls would have thousands of nodes."""


class Loop(Provider):
    """A slice and a copy a request."""

    name = "loop"
    summary = "torch: one copy a request, lengths known on the host; no guards"

    def launches(self, inputs: InputSet) -> int:
        return inputs.batch.num_reqs

    def prepare(self, inputs: InputSet) -> Call:
        layout, pool = inputs.batch.layout, inputs.pool
        if layout.num_reqs > MOST_REQS:
            raise Unavailable(f"more than {MOST_REQS} requests")
        begins = layout.prefix_lens.tolist()
        rows, parts = layout.req_pool_indices.tolist(), inputs.batch.unbind()

        def call() -> None:
            for row, begin, part in zip(rows, begins, parts, strict=True):
                if len(part):
                    pool[row, begin : begin + len(part)].copy_(part)

        return call
