"""A batch across ranks: built on one, broadcast to all in one small header and one buffer; or dealt out by request.

torch.distributed is the engine. Tensors are where the group's backend wants them: on the CPU for gloo, on the current
CUDA device for NCCL.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from ragged.batch import RaggedBatch
from ragged.bounds import Bounds, Overflow
from ragged.convert import Converter, Mode
from ragged.errors import RaggedError, RaggedTypeError, RaggedValueError, refuses
from ragged.header import starts
from ragged.layout import RaggedLayout
from ragged.packing import views
from ragged.staging import resolve_device
from ragged.tokens import TokenCounts, TokenRules, WideTokens

MAGIC = 0x72616767656401
"""Begins a header: "ragged", format 1."""
NONE = -1
"""In a header: there is none."""
HEADER = 11
"""MAGIC, elements, num_reqs, num_tiles, num_tokens, pool_shape twice, overflow, padding_row, placeholders, wide."""


@refuses
def broadcast(
    batch: RaggedBatch | None,
    src: int,
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str | None = None,
) -> RaggedBatch:
    """One rank's batch on every rank of a group: a header of 88 bytes, then the packed buffer, in one collective each.

    Every rank must call it. A receiver reads the layout back to its host, which syncs, and holds it and, on the CPU,
    its tokens to the same rules as whoever built it: nothing is trusted for having been valid once.
    Request ids, which may be any objects, stay on ``src``.

    Args:
        batch: on ``src`` the batch, on the group's device; elsewhere ignored.
        src: the global rank that has it.
        group: the default group where None.
        device: where a receiver's batch is to be; by default the CPU for gloo, the current CUDA device for NCCL.

    Returns: ``batch`` itself on ``src``, a batch of its own elsewhere.

    Raises: RaggedTypeError, RaggedValueError, RaggedOverflowError, on the rank that found something wrong, which it
        names. It takes part in both collectives before, so that no other rank waits for it.
    """
    rank = dist.get_rank()
    if rank == src:
        if not isinstance(batch, RaggedBatch):
            got = type(batch).__name__
            raise RaggedTypeError(f"batch must be a RaggedBatch on rank {src}, got {got}", argument="batch", got=got)
        buffer = batch.packed
        if batch.device_tokens is not None:
            buffer = torch.cat([batch.packed, batch.device_tokens])
        dist.broadcast(_header(batch, len(buffer)).to(batch.device), src, group)
        dist.broadcast(buffer, src, group)
        return batch
    at = _device(group) if device is None else resolve_device(device)
    header = torch.empty(HEADER, dtype=torch.int64, device=at)
    dist.broadcast(header, src, group)
    numbers = header.tolist()
    if numbers[1] < 0:  # nothing that could be received
        raise _wrong_header(f"rank {rank}: batch from rank {src}: ", numbers)
    buffer = torch.empty(numbers[1], dtype=torch.int64, device=at)
    dist.broadcast(buffer, src, group)
    try:
        return _received(numbers, buffer)
    except RaggedError as error:
        error.args = (f"rank {rank}: batch from rank {src}: {error.args[0]}",)
        raise


@refuses
def split_by_rank(batch: RaggedBatch, sizes: Sequence[int]) -> list[RaggedBatch]:
    """Each data-parallel rank's requests, as new batches: the first ``sizes[0]``, the next ``sizes[1]``, and so on.

    Args:
        batch: all requests.
        sizes: requests of each rank; they sum to ``num_reqs``.

    Raises: RaggedTypeError, RaggedValueError.
    """
    counts = Converter(Mode.STRICT).host(sizes, "sizes").tolist()
    if any(count < 0 for count in counts) or sum(counts) != batch.num_reqs:
        raise RaggedValueError(
            f"sizes must not be negative and sum to num_reqs {batch.num_reqs}, got {counts}",
            argument="sizes",
            got=counts,
            bound=batch.num_reqs,
        )
    ends = itertools.accumulate(counts, initial=0)
    return [batch.select(np.arange(begin, end, dtype=np.int64)) for begin, end in itertools.pairwise(ends)]


def _device(group: dist.ProcessGroup | None) -> torch.device:
    return resolve_device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def _header(batch: RaggedBatch, num_elements: int) -> torch.Tensor:
    layout, bounds, counts = batch.layout, batch.layout.bounds, batch.counts
    shape = bounds.pool_shape or (NONE, NONE)
    truncates = int(bounds.overflow is Overflow.TRUNCATE)
    padding_row = NONE if bounds.padding_row is None else bounds.padding_row
    special = (NONE, NONE) if counts is None else (counts.placeholders, counts.wide)
    sizes = (layout.num_reqs, len(layout.tiles), layout.num_tokens)
    return torch.tensor([MAGIC, num_elements, *sizes, *shape, truncates, padding_row, *special], dtype=torch.int64)


def _wrong_header(where: str, numbers: list[int]) -> RaggedValueError:
    says = f"{where}header must begin with {MAGIC} and a size, got {numbers[:2]}"
    return RaggedValueError(says, argument="header", got=numbers[0], bound=MAGIC)


def _received(numbers: list[int], buffer: torch.Tensor) -> RaggedBatch:
    """The batch of a header and a buffer, neither of which is trusted."""
    if numbers[0] != MAGIC:
        raise _wrong_header("", numbers)
    num_elements, num_reqs, num_tiles, num_tokens = numbers[1:5]
    max_reqs, max_context_len, truncates, padding_row, *special = numbers[5:]
    if min(num_reqs, num_tiles, num_tokens) < 0 or starts(num_reqs, num_tiles).token_ids + num_tokens != num_elements:
        raise RaggedValueError(
            f"header must describe a buffer of {num_elements}, got num_reqs {num_reqs}, {num_tiles} tiles, "
            f"num_tokens {num_tokens}",
            argument="header",
            got=(num_reqs, num_tiles, num_tokens),
            bound=num_elements,
        )
    bounds = Bounds(
        pool_shape=None if max_reqs == NONE else (max_reqs, max_context_len),
        overflow=Overflow.TRUNCATE if truncates else Overflow.RAISE,
        padding_row=None if padding_row == NONE else padding_row,
    )
    at = starts(num_reqs, num_tiles)
    header = buffer[: at.token_ids].cpu().numpy()
    offsets = header[: num_reqs + 1]
    if (offsets > num_tokens).any():
        request = max(int((offsets > num_tokens).argmax()) - 1, 0)
        says = f"offsets must not exceed num_tokens {num_tokens}, got {offsets[request + 1]} at request {request}"
        got = int(offsets[request + 1])
        raise RaggedValueError(says, argument="offsets", request=request, got=got, bound=num_tokens)
    layout = RaggedLayout.from_offsets(
        offsets,
        req_pool_indices=header[at.req_pool_indices : at.req_pool_indices + num_reqs],
        prefix_lens=header[at.prefix_lens : at.prefix_lens + num_reqs],
        bounds=bounds,
    )
    if len(layout.tiles) != num_tiles or layout.num_tokens != num_tokens:
        got_both = (layout.num_tokens, len(layout.tiles))
        says = f"offsets must end at {num_tokens} and make {num_tiles} tiles, got {got_both[0]} and {got_both[1]}"
        raise RaggedValueError(says, argument="offsets", got=got_both, bound=(num_tokens, num_tiles))
    expected = layout.header
    if not np.array_equal(expected, header):
        where = int((expected != header).argmax())
        raise RaggedValueError(
            f"packed must be the buffer of its layout, got {header[where]} at element {where}",
            argument="packed",
            got=int(header[where]),
            bound=int(expected[where]),
        )
    counts = None if special[0] == NONE else TokenCounts(*special)
    if counts is not None and buffer.device.type == "cpu":
        _check_tokens(views(buffer, layout).token_ids, layout, counts)
    return RaggedBatch(layout, buffer, counts=counts)


def _check_tokens(token_ids: torch.Tensor, layout: RaggedLayout, counts: TokenCounts) -> None:
    """No token that the sender's own rules would have refused."""
    wide = WideTokens.OPAQUE if counts.wide else WideTokens.REFUSE
    found = TokenRules(None, counts.placeholders > 0, wide).check(token_ids.numpy(), layout.offsets)
    if found != counts:
        raise RaggedValueError(
            f"token_ids must hold {counts}, got {found}", argument="token_ids", got=found, bound=counts
        )
