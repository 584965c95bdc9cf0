"""Our kernel by an ordinary Triton JIT launch, as a user of Triton would write it: what the kept launch is held to."""

from __future__ import annotations

import torch

from bench.providers import Unavailable
from bench.timing import Call
from ragged import RaggedBatch


def make(batch: RaggedBatch, pool: torch.Tensor) -> Call:
    """A launch on the flat stream, without a report; Unavailable without a GPU."""
    if pool.device.type != "cuda":
        raise Unavailable(f"a Triton kernel, needs a CUDA device, not {pool.device.type}")
    from kv_canary import triton_backend
    from kv_canary.kernels.scatter import scatter_flat

    block, window = triton_backend.FLAT[0][1:]
    programs = -(-batch.num_tokens // block) + -(-batch.num_reqs // window)
    tensors = (batch.token_ids, batch.offsets, batch.req_pool_indices, batch.prefix_lens, pool, batch.offsets)
    sizes = (batch.num_tokens, batch.num_reqs, *pool.shape, pool.stride(0), 0)
    constants = (True, False, block, window)
    return lambda: scatter_flat[(programs,)](*tensors, *sizes, *constants)
