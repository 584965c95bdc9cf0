"""Joining many parts into one array; large ones by several threads."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from ragged.convert import Int64Array

THREADS = max(1, min(4, (os.cpu_count() or 1) // 4))
"""256 parts of 8,192 tokens: one thread 1.65 ms, two 0.91, four 0.65, eight 0.88 (H200 host, 16 cores). A quarter of
the cores at most: on two busy ones, waiting for the second thread costs more than it brings (1.4 against 1.2 ms)."""
LARGE = 1 << 18
"""Tokens from which threads pay; smaller joins never start one."""


def join(parts: list[Int64Array], out: Int64Array) -> None:
    """Write all parts, one after the other, into ``out``, which has their total length."""
    if len(parts) == 1:
        out[:] = parts[0]
    elif out.size < LARGE or THREADS == 1 or not all(part.flags.writeable for part in parts):
        np.concatenate(parts, out=out)  # also for read-only parts, which torch would warn of
    else:
        with torch.inference_mode(False):  # the mode is a thread's own: the others could not write its tensors
            pieces = list(_pieces(parts, out))
        list(_threads().map(lambda piece: torch.cat(piece[0], out=piece[1]), pieces))


def exceeds(token_ids: Int64Array, largest: int) -> bool:
    """Whether any token is negative or above ``largest``; by several threads where there are many."""
    if token_ids.size == 0:
        return False
    unsigned = token_ids.view(np.uint64)  # where a negative id is a huge one: one reduction screens both ends
    if token_ids.size < LARGE or THREADS == 1:
        return bool(np.maximum.reduce(unsigned) > largest)
    return bool(max(_threads().map(np.maximum.reduce, np.array_split(unsigned, THREADS))) > largest)


def _pieces(parts: list[Int64Array], out: Int64Array) -> Iterable[tuple[list[torch.Tensor], torch.Tensor]]:
    """About equal shares of the work: the parts of each, and where they go."""
    ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
    cuts = [0, *(ends.searchsorted(out.size * np.arange(1, THREADS) // THREADS) + 1).tolist(), len(parts)]
    whole = torch.from_numpy(out)
    for first, last in itertools.pairwise(cuts):
        if first < last:
            begin = int(ends[first - 1]) if first else 0
            # torch.cat lets go of the GIL once for all parts, np.concatenate for each of them.
            yield [torch.from_numpy(part) for part in parts[first:last]], whole[begin : int(ends[last - 1])]


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="ragged-join")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.cache_clear)  # threads do not survive a fork
