"""One torch index_put_, its indices computed from offsets on the device."""

from __future__ import annotations

import torch

from bench.inputs import InputSet
from bench.providers.base import Provider
from bench.timing import Call


class IndexPut(Provider):
    """How one writes it in torch."""

    name = "index_put"
    summary = "torch: rows and columns from offsets, then one index_put_; no guards"

    def launches(self, inputs: InputSet) -> int:
        return 12

    def prepare(self, inputs: InputSet) -> Call:
        batch, pool, num_tokens = inputs.batch, inputs.pool, inputs.batch.num_tokens
        token_ids, offsets = batch.token_ids, batch.offsets
        rows, prefix_lens = batch.req_pool_indices, batch.prefix_lens

        def call() -> None:
            lengths = offsets.diff()
            row = torch.repeat_interleave(rows, lengths, output_size=num_tokens)
            shift = torch.repeat_interleave(prefix_lens - offsets[:-1], lengths, output_size=num_tokens)
            columns = torch.arange(num_tokens, device=pool.device) + shift
            pool.index_put_((row, columns), token_ids.to(torch.int32))

        return call
