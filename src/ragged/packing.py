"""The format of the packed buffer: ``offsets | req_pool_indices | prefix_lens | tiles | token_ids``, int64.

Each part starts at a multiple of 128 bytes, so that kernels see one alignment. ``tiles`` is empty for batches of even
lengths. Where tokens live elsewhere (they came in on the device) the buffer is the header: all but ``token_ids``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ragged.convert import Int64Array
from ragged.layout import RaggedLayout

ALIGNMENT = 16
"""In int64 elements: 128 bytes, one cache line of an NVIDIA GPU."""


def aligned(num_elements: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-num_elements // ALIGNMENT) * ALIGNMENT


def header_size(num_reqs: int, num_tiles: int = 0) -> int:
    """Elements before ``token_ids``."""
    return aligned(num_reqs + 1) + 2 * aligned(num_reqs) + aligned(2 * num_tiles)


class Views(NamedTuple):
    """The parts of a packed buffer: int64, 1-D but for ``tiles`` ``[num_tiles, 2]``."""

    offsets: torch.Tensor
    req_pool_indices: torch.Tensor
    prefix_lens: torch.Tensor
    tiles: torch.Tensor | None
    token_ids: torch.Tensor


def views(packed: torch.Tensor, num_reqs: int, num_tiles: int = 0) -> Views:
    """Slice a packed buffer, int64 ``[header_size(num_reqs, num_tiles) + num_tokens]``, into its parts."""
    first, later = aligned(num_reqs + 1), aligned(num_reqs)
    num_tokens = packed.shape[0] - header_size(num_reqs, num_tiles)
    # One call for all parts: four slices cost twice as much (measured on the CPU, 6.3 against 3.7 us).
    sizes = [num_reqs + 1, first - num_reqs - 1, num_reqs, later - num_reqs, num_reqs, later - num_reqs]
    if num_tiles == 0:
        parts = packed.split_with_sizes([*sizes, num_tokens])
        return Views(parts[0], parts[2], parts[4], None, parts[6])
    sizes += [2 * num_tiles, aligned(2 * num_tiles) - 2 * num_tiles, num_tokens]
    parts = packed.split_with_sizes(sizes)
    return Views(parts[0], parts[2], parts[4], parts[6].view(num_tiles, 2), parts[8])


def layout_header_size(layout: RaggedLayout) -> int:
    """Elements before ``token_ids`` in the packed buffer of this layout."""
    return header_size(layout.num_reqs, len(layout.tiles))


def write_header(header: Int64Array, layout: RaggedLayout) -> None:
    """Fill the header, int64 ``[layout_header_size(layout)]``; the gaps become 0: equal batches are equal bytes."""
    num_reqs, num_tiles = layout.num_reqs, len(layout.tiles)
    first, later = aligned(num_reqs + 1), aligned(num_reqs)
    header.fill(0)
    header[: num_reqs + 1] = layout.offsets
    header[first : first + num_reqs] = layout.req_pool_indices
    header[first + later : first + later + num_reqs] = layout.prefix_lens
    if num_tiles:
        begin = first + 2 * later
        header[begin : begin + 2 * num_tiles] = layout.tiles.reshape(-1)
