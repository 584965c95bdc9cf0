"""The kernel of vLLM's StagedWriteTensor, as installed or as in the file that BENCH_VLLM names."""

from __future__ import annotations

import torch

from bench.inputs import InputSet
from bench.providers.base import Provider
from bench.providers.found import find, require_cuda
from bench.timing import Call

KERNEL = "_apply_write_kernel"
MODULES = ("vllm.v1.worker.gpu.buffer_utils",)
BLOCK = 1024  # what its own caller passes


class VLLM(Provider):
    """A program a request."""

    name = "vllm"
    summary = "vLLM's StagedWriteTensor kernel: a program a request; reads int32 tokens, a third less traffic"
    variable = "BENCH_VLLM"

    def require(self, device: torch.device) -> None:
        require_cuda(device.type)
        find(KERNEL, MODULES, self.variable)

    def prepare(self, inputs: InputSet) -> Call:
        kernel, _ = find(KERNEL, MODULES, self.variable)
        batch, pool = inputs.batch, inputs.pool
        rows, starts, token_ids, ends = (
            tensor.to(torch.int32)
            for tensor in (batch.req_pool_indices, batch.prefix_lens, batch.token_ids, batch.offsets[1:])
        )
        positional = [pool, pool.stride(0), rows, starts, token_ids, ends]
        keywords = {"BLOCK_SIZE": BLOCK}
        if "MULTI_GROUP" in kernel.arg_names:  # later versions write several tensors at once
            positional.append(None)
            keywords["MULTI_GROUP"] = False
        grid = (batch.num_reqs,)
        return lambda: kernel[grid](*positional, **keywords)
