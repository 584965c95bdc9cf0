"""The Triton backend: picks tiles, sizes the grid, launches. Kernel files are imported with it, at first use."""

from __future__ import annotations

import torch

from kv_canary import launching
from kv_canary.kernels import scatter as kernels
from kv_canary.kernels import verify as verify_kernels
from ragged import RaggedBatch, RaggedLayout
from ragged.header import Starts
from ragged.packing import Views, addresses, static_tokens
from ragged.tiles import TILE

FLAT = ((65_536, 256, 256), (1 << 62, 512, 64))
"""The flat stream: up to so many tokens, tokens a program, ends that one load of its search counts. Measured on one
H200, device guards on, us by (256, 256) and by (512, 64): 256 x 1 3.1, 4.7; 1 of 32,768 among 255 of 0..3 3.1, 4.7;
64 x 128 2.5, 3.0. Of 256 x 8192 by (512, 512) 20, by (512, 64) 14.9."""
SHAPES = ((1, 128, 1), (16, 32, 16), (128, 4, 128), (512, 2, 512))
"""Tiles for batches of even lengths: up to so many tokens, requests x columns; longer ones take 1 x TILE. Measured on
one H200, device guards on, us (floor): 4096 x 1 by 128 x 1 1.9 (1.9); 4096 x 4 by 32 x 16 2.2 (1.9); 10,000 x 100 by
4 x 128 8.7 (5.2), by 2 x 512 12.6; 4096 x 512 by 2 x 512 9.3 (8.2), by 1 x 1024 9.8."""
REQUEST_BLOCK = 256
"""Requests that a program of verify's second part, or of ``_set_valid_lens``, takes."""


def scatter(
    flat_in: torch.Tensor,
    offsets: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor | None,
    pool_out: torch.Tensor,
    report: torch.Tensor | None,
    launch: int,
) -> None:
    """See ``kv_canary.launch_scatter_req_token_ids_kernel``: lengths are only on the device, so the flat stream."""
    num_tokens, num_reqs = flat_in.shape[0], req_pool_indices.shape[0]
    max_reqs, max_context_len = pool_out.shape
    block, window = next((block, window) for most, block, window in FLAT if num_tokens <= most)
    tensors = (
        flat_in,
        offsets,
        req_pool_indices,
        offsets if prefix_lens is None else prefix_lens,
        pool_out,
        offsets if report is None else report,
    )
    launching.launch(
        kernels.scatter_flat,
        pool_out.device,
        _cdiv(num_tokens, block) + _cdiv(num_reqs, window),
        lambda: tensors,
        tuple(tensor.data_ptr() for tensor in tensors),
        (num_tokens, num_reqs, max_reqs, max_context_len, pool_out.stride(0), launch),
        (prefix_lens is not None, report is not None, block, window),
        variant=flat_in.data_ptr() % 16,
    )


def scatter_batch(
    batch: RaggedBatch,
    pool_out: torch.Tensor,
    report: torch.Tensor | None,
    launch: int,
    valid_lens: torch.Tensor | None = None,
) -> None:
    """See ``kv_canary.scatter``: the host knows the lengths, so tiles, and a list of them where lengths are uneven."""
    layout = batch.layout
    programs, column_tiles, requests, columns = _grid(layout, layout.max_len)
    max_reqs, max_context_len = pool_out.shape
    at, pool_address = addresses(batch.packed, layout, batch.device_tokens), pool_out.data_ptr()
    report_address = at.offsets if report is None else report.data_ptr()
    listed = len(layout.tiles) > 0
    fused = valid_lens if not listed else None
    valid_address = at.offsets if fused is None else fused.data_ptr()
    sizes = (layout.num_tokens, layout.num_reqs, max_reqs, max_context_len, pool_out.stride(0), launch, column_tiles)
    launching.launch(
        kernels.scatter_tiles,
        pool_out.device,
        programs,
        lambda: (
            batch.token_ids,
            batch.offsets,
            batch.req_pool_indices,
            batch.prefix_lens,
            pool_out,
            batch.offsets if report is None else report,
            batch.tiles,
            batch.offsets if fused is None else fused,
        ),
        (
            at.token_ids,
            at.offsets,
            at.req_pool_indices,
            at.prefix_lens,
            pool_address,
            report_address,
            at.tiles,
            valid_address,
        ),
        sizes,
        (listed, report is not None, fused is not None, requests, columns),
    )
    if listed and valid_lens is not None:
        set_valid_lens(batch, pool_out.shape[1], valid_lens)


def verify_batch(
    batch: RaggedBatch, pool: torch.Tensor, valid_lens: torch.Tensor, log: torch.Tensor, launch: int, exact: bool
) -> None:
    """See ``TokenPool.verify``: the scatter's tiles, then the requests."""
    layout = batch.layout
    # Not batch.token_ids: of a batch that is empty now it has no address, and a graph is replayed with the next.
    token_ids = batch.token_ids if layout.bounds.capacity is None else static_tokens(batch.packed, layout)
    grid = _grid(layout, min(token_ids.shape[0], pool.shape[1]))
    views = Views(batch.offsets, batch.req_pool_indices, batch.prefix_lens, batch.tiles, token_ids)
    at = addresses(batch.packed, layout, batch.device_tokens)
    _verify(views, at, grid, pool, valid_lens, log, launch, exact)


def verify_views(
    views: Views, pool: torch.Tensor, valid_lens: torch.Tensor, log: torch.Tensor, launch: int, exact: bool
) -> None:
    """The same of tensors whose lengths the host does not know: tiles for requests as long as they may be."""
    max_len = min(views.num_tokens, pool.shape[1])
    requests, columns = _tile(max_len)
    column_tiles = max(_cdiv(max_len, columns), 1)
    grid = (_cdiv(views.num_reqs, requests) * column_tiles, column_tiles, requests, columns)
    at = Starts(*(tensor.data_ptr() for tensor in views))
    _verify(views, at, grid, pool, valid_lens, log, launch, exact)


def _verify(
    views: Views,
    at: Starts,
    grid: tuple[int, int, int, int],
    pool: torch.Tensor,
    valid_lens: torch.Tensor,
    log: torch.Tensor,
    launch: int,
    exact: bool,
) -> None:
    programs, column_tiles, requests, columns = grid
    max_reqs, max_context_len = pool.shape
    tensors = (views.token_ids, views.offsets, views.req_pool_indices, views.prefix_lens, pool, valid_lens, log)
    mine = (pool.data_ptr(), valid_lens.data_ptr(), log.data_ptr())
    sizes = (views.num_tokens, views.num_reqs, max_reqs, max_context_len, pool.stride(0), launch)
    launching.launch(
        verify_kernels.verify_tiles,
        pool.device,
        programs + _cdiv(views.num_reqs, REQUEST_BLOCK),
        lambda: (*tensors, views.tiles),
        (at.token_ids, at.offsets, at.req_pool_indices, at.prefix_lens, *mine, at.tiles),
        (*sizes, column_tiles, programs, log.shape[0] - 1),
        (len(views.tiles) > 0, exact, requests, columns, REQUEST_BLOCK),
    )


def set_valid_lens(batch: RaggedBatch, max_context_len: int, valid_lens: torch.Tensor) -> None:
    """``valid_lens[row] = prefix_len + length`` of every request of a batch, where its tiles cannot do it."""
    layout = batch.layout
    num_tokens = static_tokens(batch.packed, layout).shape[0]
    at = addresses(batch.packed, layout, batch.device_tokens)
    launching.launch(
        verify_kernels.set_valid_lens,
        valid_lens.device,
        _cdiv(layout.num_reqs, REQUEST_BLOCK),
        lambda: (batch.offsets, batch.req_pool_indices, batch.prefix_lens, valid_lens),
        (at.offsets, at.req_pool_indices, at.prefix_lens, valid_lens.data_ptr()),
        (num_tokens, layout.num_reqs, valid_lens.shape[0], max_context_len),
        (REQUEST_BLOCK,),
    )


def _grid(layout: RaggedLayout, max_static_len: int) -> tuple[int, int, int, int]:
    """Tile programs, how many of them lie side by side, and a tile's requests x columns.

    In buffers of fixed sizes a request may become ``max_static_len`` long by the time that a graph is replayed.
    """
    max_len = layout.max_len if layout.bounds.capacity is None else max_static_len
    requests, columns = _tile(max_len)
    column_tiles = max(_cdiv(max_len, columns), 1)
    return len(layout.tiles) or _cdiv(layout.num_reqs, requests) * column_tiles, column_tiles, requests, columns


def _tile(max_len: int) -> tuple[int, int]:
    for longest, requests, columns in SHAPES:
        if max_len <= longest:
            return requests, columns
    return 1, TILE


def _cdiv(total: int, size: int) -> int:
    return -(-total // size)
