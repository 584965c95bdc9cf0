"""RaggedBatchBuilder: requests in, a batch out, step after step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

from ragged.assembly import Assembly
from ragged.batch import RaggedBatch, batch_of
from ragged.errors import refuses
from ragged.options import BatchOptions


class RaggedBatchBuilder:
    """Builds one batch a step. Reusable: its staging memory is kept, so that a steady state allocates none.

    >>> builder = RaggedBatchBuilder(pool_shape=(8, 16))
    >>> builder.add(4, [5, 6], [7], req_id="chat-1")  # prompt and output, joined with one copy
    >>> builder.extend([1, 7], [[], [8, 9]], prefix_lens=[0, 5])
    >>> builder.build()
    RaggedBatch(num_reqs=3, num_tokens=5, lengths=[3, 0, 2], rows=[4, 1, 7], device=cpu)
    >>> len(builder)
    0

    A call that refuses its input leaves the builder exactly as it was. One thread at a time: threads take one each.
    Copies run on the current stream of the device; ``build`` waits only where the copy of ``num_slots`` batches before
    is still in flight.

    With a ``capacity`` every batch lies in the same device memory, padded with empty requests to ``max_reqs``, so that
    a CUDA graph that was captured with one batch can be replayed with the next; the batch before is then overwritten,
    in the order of the stream.

    Args: BatchOptions: ``device``, ``mode``, ``vocab_size``, ``pool_shape``, ``overflow``, ``allow_placeholders``,
        ``wide_tokens``, ``padding_row``, ``capacity``.
    """

    @refuses
    def __init__(self, **options: Unpack[BatchOptions]) -> None:
        self._assembly = Assembly(**options)

    def __len__(self) -> int:
        return len(self._assembly)

    @refuses
    def add(self, req_pool_index: int, *parts: Any, prefix_len: int = 0, req_id: object = None) -> None:
        """One request: its pool row and its tokens, in any number of parts.

        Args:
            req_pool_index: the pool row.
            parts: token sequences, as ``RaggedBatch.from_sequences`` takes them; copied before the call returns.
            prefix_len: tokens already in the row.
            req_id: the caller's id, for messages.
        """
        self._assembly.add(req_pool_index, parts, prefix_len, req_id)

    @refuses
    def extend(
        self,
        req_pool_indices: Any,
        sequences: Any,
        *,
        prefix_lens: Any = None,
        req_ids: Sequence[object] | None = None,
    ) -> None:
        """Many requests at once, without a Python call a request.

        Args:
            req_pool_indices: int64 ``[n]``.
            sequences: n token sequences, or a 2-D array ``[n, k]`` of k tokens each. Fastest where all are lists, all
                are int64 numpy arrays, or all are ``array('q')``.
            prefix_lens: int64 ``[n]``; 0 where not given.
            req_ids: n ids, for messages.
        """
        self._assembly.extend(req_pool_indices, sequences, prefix_lens, req_ids)

    @refuses
    def clear(self) -> None:
        """Forget all requests."""
        self._assembly.clear()

    @refuses
    def build(self) -> RaggedBatch:
        """The batch of all requests; the builder is empty afterwards."""
        return batch_of(self._assembly.finish())
