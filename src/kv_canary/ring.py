"""The ring of a ViolationLog, as the torch backends see it; ``kernels/_ring.py`` is the device's."""

from __future__ import annotations

import torch

from kv_canary import kinds


def claim(log: torch.Tensor, launch: int, wrong: torch.Tensor, kind: torch.Tensor | int) -> tuple[torch.Tensor, ...]:
    """Count all that is wrong; the lines that the first of it get, and who they are.

    Args:
        log: int64 ``[1 + capacity, columns]``, a header line and the ring.
        wrong: bool ``[n]``.
        kind: int64 ``[n]``, or one for all.

    Returns: lines, int64 ``[num_stored]``, and the positions in ``wrong`` of those that they are for. A header that was
        overwritten leads nowhere else: a line is always within the ring.
    """
    culprits = wrong.nonzero().flatten()
    if not len(culprits):
        return culprits, culprits
    capacity, (count, freed) = log.shape[0] - 1, log[0, : kinds.FREED + 1].tolist()
    room = capacity - (count - freed) if count >= 0 else 0
    stored = culprits[: min(max(room, 0), capacity)]
    index = count + torch.arange(len(stored), dtype=torch.int64, device=log.device)
    lines = 1 + index % capacity
    log[lines, kinds.ENTRY_KIND] = kind if isinstance(kind, int) else kind[stored]
    log[lines, kinds.ENTRY_INDEX] = index + 1
    log[lines, kinds.ENTRY_LAUNCH] = launch
    log[0, kinds.FOUND_COUNT] += len(culprits)
    return lines, stored
