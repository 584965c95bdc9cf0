"""The format of a batch's packed buffer: ``offsets | req_pool_indices | prefix_lens | tiles | token_ids``, int64.

Each part starts at a multiple of 128 bytes, so that kernels see one alignment. ``tiles`` is empty for batches of even
lengths. All but ``token_ids`` is the header, which a layout keeps ready to be sent.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from ragged.convert import Int64Array

ALIGNMENT = 16
"""In int64 elements: 128 bytes, one cache line of an NVIDIA GPU."""


class Starts(NamedTuple):
    """Where each part starts, in elements."""

    offsets: int
    req_pool_indices: int
    prefix_lens: int
    tiles: int
    token_ids: int


def aligned(num_elements: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-num_elements // ALIGNMENT) * ALIGNMENT


@functools.lru_cache(maxsize=1024)
def starts(num_reqs: int, num_tiles: int = 0) -> Starts:
    """The format itself. The last start is the header's size.

    >>> starts(num_reqs=16)
    Starts(offsets=0, req_pool_indices=32, prefix_lens=48, tiles=64, token_ids=64)
    """
    column = aligned(num_reqs)
    first = aligned(num_reqs + 1)
    tiles = first + 2 * column
    return Starts(0, first, first + column, tiles, tiles + aligned(2 * num_tiles))


def with_tiles(header: Int64Array, tiles: Int64Array) -> Int64Array:
    """A header without tiles, and the tiles behind it."""
    if not len(tiles):
        return header
    whole: Int64Array = np.zeros(len(header) + aligned(tiles.size), dtype=np.int64)
    whole[: len(header)] = header
    whole[len(header) : len(header) + tiles.size] = tiles.reshape(-1)
    whole.setflags(write=False)
    return whole
