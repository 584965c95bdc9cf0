"""The work list of a batch whose requests are of very unequal length: one line a tile of TILE tokens.

A kernel that takes tiles of requests x columns wastes itself where one request is much longer than the others; the host
knows the lengths, so it lists the tiles that hold tokens, and the list travels in the packed buffer.
"""

from __future__ import annotations

import numpy as np

from ragged.convert import Int64Array

TILE = 1024
"""Tokens of one request in a tile. 1 of 32,768 among 255 of 0..3: 2.2 us by the list, 14 us by requests x columns; even
batches lose 0.1 us by it (one H200, device guards on)."""
EVEN_ENOUGH = 1.5
"""By how much the number of tiles of requests x columns may exceed the number that hold tokens."""
ONE_WAVE = 132
"""Programs that cost nothing: one for each multiprocessor of an H200."""

MOST_TOKENS = 1 << 34
"""More tokens, 128 GiB, are in no batch; a layout may still say so, and its list would be what fills the memory."""

NO_TILES: Int64Array = np.empty((0, 2), dtype=np.int64)
NO_TILES.setflags(write=False)


def list_tiles(lengths: Int64Array, max_len: int, num_tokens: int) -> Int64Array:
    """int64 ``[num_tiles, 2]``: request and tile of each tile that holds tokens; no line where lengths are even enough.

    >>> list_tiles(np.array([3, 0, 2500]), max_len=2500, num_tokens=2503).tolist()
    []
    >>> tiles = list_tiles(np.array([200_000] + [1] * 200), max_len=200_000, num_tokens=200_200)
    >>> len(tiles), tiles[-201:-198].tolist()
    (396, [[0, 195], [1, 0], [2, 0]])
    """
    if max_len <= TILE or num_tokens > MOST_TOKENS:
        return NO_TILES
    in_rectangle = len(lengths) * -(-max_len // TILE)
    if in_rectangle <= EVEN_ENOUGH * (num_tokens // TILE) + ONE_WAVE:
        return NO_TILES
    counts = -(-lengths // TILE)
    num_tiles = int(counts.sum(dtype=np.int64))
    if in_rectangle <= EVEN_ENOUGH * num_tiles + ONE_WAVE:
        return NO_TILES
    tiles = np.empty((num_tiles, 2), dtype=np.int64)
    tiles[:, 0] = np.repeat(np.arange(len(lengths), dtype=np.int64), counts)
    tiles[:, 1] = np.arange(num_tiles, dtype=np.int64) - np.repeat(np.cumsum(counts, dtype=np.int64) - counts, counts)
    tiles.setflags(write=False)
    return tiles
