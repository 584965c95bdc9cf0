"""Our drop-in for SGLang's launcher: lengths only on the device, the flat stream."""

from __future__ import annotations

from bench.inputs import InputSet
from bench.providers.base import Provider
from bench.providers.ours import backend_of
from bench.timing import Call
from kv_canary import GuardReport, launch_scatter_req_token_ids_kernel


class OursLauncher(Provider):
    """The flat stream, with a report."""

    name = "ours_launcher"
    summary = "launch_scatter_req_token_ids_kernel(..., report=report)"

    def prepare(self, inputs: InputSet) -> Call:
        batch = inputs.batch
        flat_in, offsets, rows = batch.token_ids, batch.offsets, batch.req_pool_indices
        prefix_lens = batch.prefix_lens if inputs.has_prefixes else None
        pool, report = inputs.pool, GuardReport.allocate(inputs.pool.device)
        backend = backend_of(pool.device)
        return lambda: launch_scatter_req_token_ids_kernel(
            flat_in=flat_in,
            offsets=offsets,
            req_pool_indices=rows,
            pool_out=pool,
            prefix_lens=prefix_lens,
            report=report,
            backend=backend,
        )
