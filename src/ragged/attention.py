"""What attention kernels ask of a batch: where each token's KV goes, and where that of its history lies.

Everything is derived on the batch's device from its packed buffer, which one copy has brought there; sizes come from
the host's layout, so that nothing syncs.
"""

from __future__ import annotations

import attrs
import numpy as np
import torch

from ragged.batch import RaggedBatch
from ragged.derived import check_int32
from ragged.errors import RaggedValueError, refuses
from ragged.integers import as_int
from ragged.rules import HasDtype, HasNDim, HasOwnRows, IsDense, OnDevice, Rule, apply


@attrs.frozen(eq=False)
class AttentionMetadata:
    """Tensors on the batch's device. A request's KV history is its prefix and its tokens, ``seq_lens`` in all.

    >>> table = torch.tensor([[0, 0], [7, 4], [3, 9]], dtype=torch.int32)  # pages of 2 slots, by pool row
    >>> batch = RaggedBatch.from_sequences([[5], [6, 7, 8]], req_pool_indices=[2, 1], prefix_lens=[2, 0])
    >>> found = AttentionMetadata.from_block_table(batch, table, page_size=2)
    >>> found.seq_lens.tolist(), found.slot_mapping.tolist()
    ([3, 3], [18, 14, 15, 8])
    >>> found.kv_indptr.tolist(), found.kv_indices.tolist(), found.kv_last_page_len.tolist()
    ([0, 2, 4], [3, 9, 7, 4], [1, 1])

    Attributes:
        query_start_loc: int32 ``[num_reqs + 1]``, vLLM's name; flash-attn's ``cu_seqlens``, FlashInfer's ``qo_indptr``.
        seq_lens: int32 ``[num_reqs]``, prefix and tokens.
        positions: int64 ``[num_tokens]``.
        req_ids: int64 ``[num_tokens]``, the request of each token.
        slot_mapping: int64 ``[num_tokens]``, the KV slot of each token; SGLang's ``out_cache_loc``.
        kv_indptr: int32 ``[num_reqs + 1]``, FlashInfer: request r has pages ``[kv_indptr[r], kv_indptr[r + 1])``.
        kv_indices: int32 ``[kv_indptr[-1]]``, those pages, request after request.
        kv_last_page_len: int32 ``[num_reqs]``, slots used of each request's last page; 0 for no history.
        block_table: int32 ``[num_reqs, max_pages]``, vLLM: each request's line of the table; None for ``req_to_token``.
        page_size: slots a page.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    positions: torch.Tensor
    req_ids: torch.Tensor
    slot_mapping: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_last_page_len: torch.Tensor
    block_table: torch.Tensor | None
    page_size: int

    @classmethod
    @refuses
    def from_block_table(cls, batch: RaggedBatch, block_table: torch.Tensor, page_size: int) -> AttentionMetadata:
        """From a table of pages by pool row: slot ``block_table[row, position // page_size] * page_size + rest``.

        Args:
            batch: the step.
            block_table: int32 ``[max_reqs, max_pages]`` on the batch's device.
            page_size: slots a page.

        Raises: RaggedTypeError, RaggedValueError: no such table, or one that a request does not fit.
        """
        page_size = as_int(page_size, "page_size", least=1)
        _check_table(batch, block_table, "block_table", page_size)
        rows = batch.req_pool_indices
        page = block_table[rows[batch.req_ids], batch.positions // page_size].to(torch.int64)
        slots = page * page_size + batch.positions % page_size
        return _metadata(batch, slots, block_table, page_size, page_size, block_table[rows])

    @classmethod
    @refuses
    def from_req_to_token(cls, batch: RaggedBatch, req_to_token: torch.Tensor, page_size: int = 1) -> AttentionMetadata:
        """From a table of slots by pool row, SGLang's ReqToTokenPool: slot ``req_to_token[row, position]``.

        Args:
            batch: the step.
            req_to_token: int32 ``[max_reqs, max_context_len]`` on the batch's device.
            page_size: slots a page; slots of a page follow each other.

        Raises: RaggedTypeError, RaggedValueError: no such table, or one that a request does not fit.
        """
        page_size = as_int(page_size, "page_size", least=1)
        _check_table(batch, req_to_token, "req_to_token", 1)
        slots = req_to_token[batch.req_pool_indices[batch.req_ids], batch.positions].to(torch.int64)
        return _metadata(batch, slots, req_to_token, 1, page_size, None)


def _check_table(batch: RaggedBatch, table: torch.Tensor, name: str, slots_an_entry: int) -> None:
    rules: list[Rule] = [IsDense(name), HasNDim(name, 2), HasDtype(name, "int32"), HasOwnRows(name)]
    apply([*rules, OnDevice(name, "the batch", lambda _: batch.device)], {name: table})
    layout, (rows, entries) = batch.layout, table.shape
    layout.check_pool((rows, entries * slots_an_entry))
    if layout.reaches_beyond(entries * slots_an_entry):
        bound = entries * slots_an_entry
        raise RaggedValueError(
            f"{name} has room for {bound} positions, got a request that ends at {layout.max_end}",
            argument=name,
            got=layout.max_end,
            bound=bound,
        )


def _metadata(
    batch: RaggedBatch,
    slots: torch.Tensor,
    table: torch.Tensor,
    entry: int,
    page_size: int,
    block_table: torch.Tensor | None,
) -> AttentionMetadata:
    """``entry``: slots that an entry of ``table`` stands for, ``page_size`` or 1."""
    layout = batch.layout
    pages = -(-(layout.prefix_lens + layout.lengths) // page_size)
    total = int(pages.sum(dtype=np.int64))
    check_int32(max(total, batch.num_tokens))
    ends = batch.prefix_lens + batch.offsets.diff()
    counts = (ends + page_size - 1) // page_size
    kv_indptr = torch.zeros(batch.num_reqs + 1, dtype=torch.int64, device=batch.device)
    torch.cumsum(counts, 0, out=kv_indptr[1:])
    requests = torch.arange(batch.num_reqs, dtype=torch.int64, device=batch.device)
    owners = torch.repeat_interleave(requests, counts, output_size=total)
    number = torch.arange(total, dtype=torch.int64, device=batch.device) - kv_indptr[owners]
    entries = table[batch.req_pool_indices[owners], number * (page_size // entry)]
    return AttentionMetadata(
        query_start_loc=batch.cu_seqlens,
        seq_lens=ends.to(torch.int32),
        positions=batch.positions,
        req_ids=batch.req_ids,
        slot_mapping=slots,
        kv_indptr=kv_indptr.to(torch.int32),
        kv_indices=(entries // (page_size // entry)).to(torch.int32),
        kv_last_page_len=torch.where(ends > 0, (ends - 1) % page_size + 1, 0).to(torch.int32),
        block_table=block_table,
        page_size=page_size,
    )
