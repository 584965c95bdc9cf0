"""SGLang's launcher, as installed or as in the file that BENCH_SGLANG names."""

from __future__ import annotations

import torch

from bench.inputs import InputSet
from bench.providers.base import Provider, Unavailable
from bench.providers.found import find, require_cuda
from bench.timing import Call

LAUNCHER = "launch_scatter_req_token_ids_kernel"
MODULES = (
    "sglang.kernels.ops.kv_canary.scatter_req_token_ids",
    "sglang.jit_kernel.kv_canary.scatter_req_token_ids",
)
PR_MARK = "_SCATTER_COL_BLOCK"
"""A name that the module has since pull request 31709, and not before."""


class SGLang(Provider):
    """Without its pull request 31709."""

    name = "sglang"
    summary = "SGLang's launcher up to 0.5.23: owner search, at most 511 requests"
    variable = "BENCH_SGLANG"
    has_pr = False

    def require(self, device: torch.device) -> None:
        require_cuda(device.type)
        _, module = find(LAUNCHER, MODULES, self.variable)
        if hasattr(module, PR_MARK) != self.has_pr:
            raise Unavailable(f"the SGLang found has pull request 31709{' not' * self.has_pr} in it")

    def prepare(self, inputs: InputSet) -> Call:
        if inputs.has_prefixes:
            raise Unavailable("takes no prefix_lens")
        launcher, _ = find(LAUNCHER, MODULES, self.variable)
        batch = inputs.batch
        arguments = {
            "flat_in": batch.token_ids,
            "offsets": batch.offsets,
            "req_pool_indices": batch.req_pool_indices,
            "pool_out": inputs.pool,
        }
        return lambda: launcher(**arguments)
