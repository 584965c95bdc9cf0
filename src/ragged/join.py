"""Joining many parts into one array, and the largest of it in the same pass; large ones by several threads."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import torch

from ragged.convert import Int64Array

THREADS = max(1, min(4, (os.cpu_count() or 1) // 4))
"""256 parts of 8,192 tokens: one thread 1.65 ms, two 0.91, four 0.65, eight 0.88 (H200 host, 16 cores). A quarter of
the cores at most: on two busy ones, waiting for the second thread costs more than it brings (1.4 against 1.2 ms)."""
PIECE = 1 << 18
"""Tokens that a thread takes at a time. The join above by pieces of 2^15 tokens 4.8 ms, 2^17 2.1, 2^18 1.5, 2^19 1.4,
by one thread 2.8 (another H200 host, busier)."""
LARGE = 2 * PIECE
"""Tokens from which threads pay; smaller joins never start one."""


def join(parts: list[Int64Array], out: Int64Array) -> int:
    """Write all parts, one after the other, into ``out``, which has their total length.

    Returns the largest of ``out`` read as uint64, where a negative number is a huge one; 0 for nothing.
    """
    if out.size < LARGE or THREADS == 1:
        return _write(parts, out)
    pieces = [_threads().submit(_write_piece, *piece) for piece in _pieces(parts, out)]
    wait(pieces)  # all of them, also where one fails: out is the caller's again when this returns
    return max(piece.result() for piece in pieces)


def _write(parts: list[Int64Array], out: Int64Array) -> int:
    if len(parts) == 1:
        out[:] = parts[0]
    elif out.size < PIECE or not all(part.flags.writeable for part in parts):
        np.concatenate(parts, out=out)  # also for read-only parts, which torch would warn of
    else:  # torch.cat lets go of the GIL once for all parts, np.concatenate for each of them
        torch.cat([torch.from_numpy(part) for part in parts], out=torch.from_numpy(out))
    return int(np.maximum.reduce(out.view(np.uint64))) if out.size else 0


def _write_piece(parts: list[Int64Array], out: Int64Array) -> int:
    """The work of one thread, which holds on to its arguments for a moment after the caller has the result."""
    try:
        return _write(parts, out)
    finally:
        parts.clear()  # a view of the caller's array would make its append a BufferError


def _pieces(parts: list[Int64Array], out: Int64Array) -> Iterable[tuple[list[Int64Array], Int64Array]]:
    """The work in pieces of PIECE tokens or, where parts are shorter, a little more: parts, and where they go."""
    taken: list[Int64Array] = []
    begin = end = 0
    for part in parts:
        for at in range(0, len(part), PIECE):
            taken.append(part[at : at + PIECE] if len(part) > PIECE else part)
            end += len(taken[-1])
            if end - begin >= PIECE:
                yield taken, out[begin:end]
                taken, begin = [], end
    if taken:
        yield taken, out[begin:end]


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="ragged-join")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.cache_clear)  # threads do not survive a fork
