"""The inputs of a case: several sets to rotate among, and what a right scatter of a set leaves in its pool."""

from __future__ import annotations

import attrs
import numpy as np
import torch

from bench.cases import QUICK, Case, Int64Array
from kv_canary import reference
from ragged import RaggedBatch

POISON = -7
"""In every cell before a scatter; no token is negative."""
VOCAB_SIZE = 150_000
WANTED_BYTES = 150_000_000
"""Of all sets of a case together: well over an H200's L2 cache of 60 MB."""
FEWEST_SETS, MOST_SETS = 3, 384
"""384 sets of 32,768 tokens still exceed it; of much smaller cases no number of sets would."""
POOL_BYTES, FEWEST_POOLS = 16_000_000_000, 4
"""Of all pools of a case together; where that is fewer pools than sets, sets take turns with them."""


@attrs.frozen(eq=False)
class InputSet:
    """One batch and the pool that it goes to. All providers read the same device memory, that of ``batch``."""

    batch: RaggedBatch
    pool: torch.Tensor

    @property
    def has_prefixes(self) -> bool:
        return bool(self.batch.layout.prefix_lens.any())


@attrs.frozen(eq=False)
class Inputs:
    """The sets of one case, and the pool expected of the first."""

    case: Case
    sets: list[InputSet]
    expected: torch.Tensor


def set_bytes(num_tokens: int, num_reqs: int) -> int:
    """What a scatter moves: a token is read as 8 bytes and written as 4, a request is three numbers."""
    return 12 * num_tokens + 24 * num_reqs


def num_sets(num_tokens: int, num_reqs: int) -> int:
    """How many sets exceed the L2 cache, within bounds."""
    return min(max(FEWEST_SETS, -(-WANTED_BYTES // max(set_bytes(num_tokens, num_reqs), 1))), MOST_SETS)


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """Random tokens and rows for each set; on the CPU two sets do, nothing there claims to be uncached."""
    lengths, prefix_lens = case.segments()
    rng = np.random.default_rng(1)
    num_tokens, num_reqs = int(lengths.sum()), len(lengths)
    count = num_sets(num_tokens, num_reqs) if device.type == "cuda" else 2
    shape = (num_reqs, case.max_context_len)
    num_pools = min(count, max(FEWEST_POOLS, POOL_BYTES // max(4 * num_reqs * case.max_context_len, 1)))
    pools = [torch.full(shape, POISON, dtype=torch.int32, device=device) for _ in range(num_pools)]
    sets, first_tokens = [], np.empty(0, np.int64)
    for index in range(count):
        token_ids = rng.integers(0, VOCAB_SIZE, num_tokens)
        rows = rng.permutation(num_reqs)
        batch = RaggedBatch.from_lengths(
            token_ids, lengths, req_pool_indices=rows, prefix_lens=prefix_lens, device=device
        )
        sets.append(InputSet(batch, pools[index % len(pools)]))
        if index == 0:
            first_tokens = token_ids
    return Inputs(case, sets, _expected(case, sets[0], first_tokens))


def _expected(case: Case, first: InputSet, token_ids: Int64Array) -> torch.Tensor:
    """By index_put, from what the host knows; for the tiny cases held against the reference cell by cell too."""
    layout, device = first.batch.layout, first.pool.device
    lengths = np.asarray(layout.lengths)
    rows = np.repeat(layout.req_pool_indices, lengths)
    begins = np.cumsum(lengths) - lengths - layout.prefix_lens
    columns = np.arange(len(token_ids)) - np.repeat(begins, lengths)
    expected = torch.full_like(first.pool, POISON)
    indices = (torch.from_numpy(rows).to(device), torch.from_numpy(columns).to(device))
    expected.index_put_(indices, torch.from_numpy(token_ids).to(device, torch.int32))
    if case.group == QUICK:
        again = torch.full_like(first.pool, POISON, device="cpu")
        batch = first.batch.to("cpu")
        reference.scatter(batch.token_ids, batch.offsets, batch.req_pool_indices, batch.prefix_lens, again, None, 0)
        if not torch.equal(again, expected.cpu()):
            raise AssertionError(f"bench: {case.name}: index_put and the reference disagree")
    return expected
