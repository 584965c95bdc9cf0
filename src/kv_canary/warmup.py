"""Compiling every kernel variant ahead, so that no serving step stalls on a compile."""

from __future__ import annotations

import torch

from kv_canary.canary import KVCanary
from kv_canary.pool import TokenPool
from kv_canary.report import GuardReport
from kv_canary.scatter import launch_scatter_req_token_ids_kernel, scatter
from kv_canary.verify import verify_batch
from kv_canary.violations import ViolationLog
from ragged import Overflow, RaggedBatch
from ragged.tiles import EVEN_ENOUGH, ONE_WAVE, TILE

_LONG = TILE + 1
_UNEVEN = [int(ONE_WAVE + 2) * TILE] + [1] * int(2 * EVEN_ENOUGH)
"""Lengths that take each shape of tile, and the list of tiles."""
LARGE_FLAT = 65_537
"""Tokens that take the flat stream's large blocks."""
MANY_CHECKS = 1 << 19
"""Checks that a canary's programs take several blocks of each."""
SAMPLES = ([1], [2], [17], [129], [_LONG], _UNEVEN)


def warmup(device: torch.device | str) -> None:
    """Launch every variant of every kernel once on ``device``, with and without a report, on small tables of its own.

    Takes seconds where Triton's cache is cold. Afterwards no batch size, shape or row compiles anything. Launches on
    the current stream; does nothing that lasts. A canary's hashing of KV bytes compiles at its first launch: only its
    sources say for which page size.
    """
    _warm_pool(device)
    _warm_canary(device)


def _warm_pool(device: torch.device | str) -> None:
    pool = torch.zeros((len(_UNEVEN), 1), dtype=torch.int32, device=device)
    log = ViolationLog.allocate(device)
    tokens = TokenPool.adopt(pool, padding_row=None)
    for report in (None, GuardReport.allocate(device)):
        for lengths in SAMPLES:
            batch = RaggedBatch.from_sequences(
                [range(length) for length in lengths],
                req_pool_indices=range(len(lengths)),
                device=device,
                overflow=Overflow.TRUNCATE,
            )
            scatter(batch, pool, report=report)
            tokens.write(batch, report=report)
            for exact in (True, False):
                verify_batch(batch, pool, tokens.valid_lens, exact=exact, report=log, backend="auto")
        for num_tokens in (1, LARGE_FLAT):
            for shift in (0, 1):  # a flat vector that is aligned to 16 bytes, and one that is not
                flat = torch.zeros(num_tokens + shift, dtype=torch.int64, device=device)[shift:]
                offsets = torch.tensor([0, 1], dtype=torch.int64, device=device)
                rows = torch.zeros(1, dtype=torch.int64, device=device)
                for prefix_lens in (None, rows):
                    launch_scatter_req_token_ids_kernel(
                        flat_in=flat,
                        offsets=offsets,
                        req_pool_indices=rows,
                        pool_out=pool,
                        prefix_lens=prefix_lens,
                        report=report,
                    )


def _warm_canary(device: torch.device | str) -> None:
    """Nothing but slots of -1, which are skipped."""
    row = torch.full((1, 2 * MANY_CHECKS), -1, dtype=torch.int32, device=device)
    tokens = TokenPool.adopt(torch.zeros((1, 1), dtype=torch.int32, device=device), padding_row=None)
    for pool in (None, tokens):
        canary = KVCanary.allocate(2, device=device, pool=pool)
        for most in (1, MANY_CHECKS):
            canary.verify(row, [0], [most])
            canary.verify(row, [0], [2 * most], budget=most)
    for lengths in SAMPLES:
        batch = RaggedBatch.from_lengths(
            torch.zeros(sum(lengths), dtype=torch.int64), lengths, req_pool_indices=range(len(lengths)), device=device
        )
        slots = torch.full((batch.num_tokens,), -1, dtype=torch.int64, device=device)
        for seeds in (None, [-1] * len(lengths)):
            canary.write(batch, slots, seed_slots=seeds)
    canary.sweep([[-1, -1, 0]])
