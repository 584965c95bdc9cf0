"""Index arithmetic of layouts: select, concat, split, pad. Every result goes through RaggedLayout's own checks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ragged.convert import Int64Array
from ragged.errors import RaggedValueError
from ragged.integers import as_int
from ragged.layout import RaggedLayout
from ragged.rules import INT64_MAX


def select(layout: RaggedLayout, indices: Int64Array) -> RaggedLayout:
    """The requests at ``indices`` int64 ``[n]``, in that order."""
    wrong = (indices < 0) | (indices >= layout.num_reqs)
    if wrong.any():
        index = int(indices[wrong.argmax()])
        raise RaggedValueError(
            f"indices must be in [0, {layout.num_reqs}), got {index}",
            argument="indices",
            got=index,
            bound=layout.num_reqs,
        )
    ids = layout.req_ids
    return RaggedLayout(
        lengths=layout.lengths[indices],
        req_pool_indices=layout.req_pool_indices[indices],
        prefix_lens=layout.prefix_lens[indices],
        req_ids=None if ids is None else tuple(ids[i] for i in indices.tolist()),
        bounds=layout.bounds,
    )


def concat(layouts: Sequence[RaggedLayout]) -> RaggedLayout:
    """All requests of several layouts, in order. At least one layout, all with the same bounds."""
    if not layouts:
        raise RaggedValueError("batches must not be empty", argument="batches", got=0, bound=1)
    for position, layout in enumerate(layouts):
        if layout.bounds != layouts[0].bounds:
            raise RaggedValueError(
                f"batches must share their bounds, got {layout.bounds} at {position} after {layouts[0].bounds}",
                argument="batches",
                got=layout.bounds,
                bound=layouts[0].bounds,
            )
    ids = None
    if any(layout.req_ids is not None for layout in layouts):
        ids = tuple(i for layout in layouts for i in layout.req_ids or (None,) * layout.num_reqs)
    return RaggedLayout(
        lengths=np.concatenate([layout.lengths for layout in layouts]),
        req_pool_indices=np.concatenate([layout.req_pool_indices for layout in layouts]),
        prefix_lens=np.concatenate([layout.prefix_lens for layout in layouts]),
        req_ids=ids,
        bounds=layouts[0].bounds,
    )


def split(layout: RaggedLayout, max_tokens: int) -> list[RaggedLayout]:
    """Pieces of at most ``max_tokens`` tokens, in order (chunked prefill).

    A request may be cut; its later part starts where the earlier one ended. An empty request goes into the piece in
    which its offset falls. There is always at least one piece. Under ``Overflow.TRUNCATE`` a part that would start
    beyond the row starts at its end, where all of it is dropped.
    """
    max_tokens = as_int(max_tokens, "max_tokens", least=1)
    starts, ends = layout.offsets[:-1], layout.offsets[1:]
    row_end = INT64_MAX if layout.bounds.pool_shape is None else layout.bounds.pool_shape[1]
    pieces = []
    for first in range(0, max(layout.num_tokens, 1), max_tokens):
        last = first + max_tokens
        begin = min(starts.searchsorted(first, "left"), ends.searchsorted(first, "right"))
        end = layout.num_reqs if last >= layout.num_tokens else starts.searchsorted(last, "left")
        part = slice(int(begin), int(end))
        cut: Int64Array = np.maximum(starts[part], first)
        pieces.append(
            RaggedLayout(
                lengths=np.minimum(ends[part], last) - cut,
                req_pool_indices=layout.req_pool_indices[part],
                prefix_lens=np.minimum(layout.prefix_lens[part] + (cut - starts[part]), row_end),
                req_ids=None if layout.req_ids is None else layout.req_ids[part],
                bounds=layout.bounds,
            )
        )
    return pieces


def pad_to(layout: RaggedLayout, num_reqs: int) -> RaggedLayout:
    """Empty requests appended until there are ``num_reqs``; they point to the padding row (row 0 where none is set)."""
    missing = as_int(num_reqs, "num_reqs", least=layout.num_reqs) - layout.num_reqs
    padding = RaggedLayout(
        lengths=np.zeros(missing, dtype=np.int64),
        req_pool_indices=np.full(missing, layout.bounds.padding_row or 0, dtype=np.int64),
        bounds=layout.bounds,
    )
    return concat([layout, padding])
