"""A replay on several ranks: one builds each step's batch and broadcasts it, each scatters it into its own pool.

At the end all pools must be the same, by a digest of their cells.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from kv_canary.kinds import UNWRITTEN
from kv_canary.replay.result import ReplaySettings
from kv_canary.replay.scheduler import Scheduler
from kv_canary.replay.trace import Trace
from kv_canary.scatter import scatter
from ragged import RaggedBatch, RaggedBatchBuilder
from ragged.distributed import broadcast

__all__ = ["RanksResult", "replay_ranks"]


@attrs.frozen(kw_only=True)
class RanksResult:
    """What a replay on several ranks did: `digests` are of the ranks' pools, in order of rank."""

    steps: int
    requests_finished: int
    tokens_scattered: int
    bytes_broadcast: int
    digests: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        """Whether all pools are the same."""
        return len(set(self.digests)) == 1


def replay_ranks(trace: Trace, settings: ReplaySettings, num_ranks: int) -> RanksResult:
    """Replay a trace on `num_ranks` processes: by gloo on the CPU, by NCCL on as many GPUs.

    Raises:
        ValueError: fewer GPUs than ranks.
    """
    on_gpu = torch.device(settings.device).type == "cuda"
    if on_gpu and torch.cuda.device_count() < num_ranks:
        raise ValueError(f"ranks must be at most the number of GPUs {torch.cuda.device_count()}, got {num_ranks}")
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_run, args=(num_ranks, trace, settings, folder), nprocs=num_ranks, start_method="spawn")
        figures = json.loads(Path(folder, "result").read_text())
    return RanksResult(**figures | {"digests": tuple(figures["digests"])})


def _run(rank: int, num_ranks: int, trace: Trace, settings: ReplaySettings, folder: str) -> None:
    """One rank's process. Rank 0 has the scheduler, and leaves the figures in the folder."""
    on_gpu = torch.device(settings.device).type == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("nccl" if on_gpu else "gloo", init_method=store, rank=rank, world_size=num_ranks)
    try:
        shape = (settings.max_running + 1, settings.max_context)
        pool = torch.full(shape, UNWRITTEN, dtype=torch.int32, device=device)
        figures = _send(trace, settings, pool) if rank == 0 else _receive(pool)
        digests: list[Any] = [None] * num_ranks
        dist.all_gather_object(digests, hashlib.sha256(pool.cpu().numpy().tobytes()).hexdigest())
        if rank == 0:
            Path(folder, "result").write_text(json.dumps(figures | {"digests": digests}))
    finally:
        dist.destroy_process_group()


def _send(trace: Trace, settings: ReplaySettings, pool: torch.Tensor) -> dict[str, Any]:
    """Plan, build, broadcast and scatter, step by step; a batch of no requests ends it."""
    scheduler = Scheduler(
        trace,
        max_running=settings.max_running,
        max_context_len=settings.max_context,
        prefill_budget=settings.prefill_budget,
    )
    builder = RaggedBatchBuilder(device=pool.device, mode=settings.mode, pool_shape=(pool.shape[0], pool.shape[1]))
    steps = tokens = sent = 0
    while (step := scheduler.plan()) is not None:
        pieces, positions = step.flat()
        flat = trace.token_ids(step.requests[pieces], positions)
        parts = np.split(flat, np.cumsum(step.lengths, dtype=np.int64)[:-1])
        builder.extend(step.rows, parts, prefix_lens=step.starts)
        batch = broadcast(builder.build(), 0)
        scatter(batch, pool)
        scheduler.advance(step)
        scheduler.retire()
        steps, tokens, sent = steps + 1, tokens + batch.num_tokens, sent + batch.packed.nbytes
    broadcast(builder.build(), 0)
    return {
        "steps": steps,
        "requests_finished": scheduler.num_finished,
        "tokens_scattered": tokens,
        "bytes_broadcast": sent,
    }


def _receive(pool: torch.Tensor) -> dict[str, Any]:
    """Scatter what comes, until a batch of no requests."""
    batch: RaggedBatch = broadcast(None, 0, device=pool.device)
    while batch.num_reqs:
        scatter(batch, pool)
        batch = broadcast(None, 0, device=pool.device)
    return {}
