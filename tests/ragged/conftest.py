"""What the tests of ragged share: refusals compared whole, and staging memory that is poisoned before each use."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ragged import RaggedBatch, RaggedError, StagingRing
from ragged.staging import Slot

POISON = -0x0BAD_70CE
"""A token id that nobody allows; where it shows, memory was read that nobody wrote."""

PARTS = ("argument", "request", "req_id", "got", "bound")


@pytest.fixture(autouse=True, scope="module")
def poisoned_staging() -> Iterator[None]:
    """Every slot that is handed out or grown holds POISON wherever it has not been written since."""
    acquire, grow = StagingRing.acquire, StagingRing.grow

    def poisoned_acquire(self: StagingRing, num_elements: int) -> Slot:
        slot = acquire(self, num_elements)
        slot.array.fill(POISON)
        return slot

    def poisoned_grow(self: StagingRing, slot: Slot, num_elements: int) -> None:
        kept = len(slot.array)
        grow(self, slot, num_elements)
        slot.array[kept:] = POISON

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StagingRing, "acquire", poisoned_acquire)
        patch.setattr(StagingRing, "grow", poisoned_grow)
        yield


@contextmanager
def _refused(kind: type[RaggedError], text: str, *, note: str | None = None, **parts: Any) -> Iterator[Any]:
    with pytest.raises(RaggedError) as caught:
        yield caught
    error = caught.value
    assert (type(error), str(error)) == (kind, text)
    assert set(parts) <= set(PARTS)
    expected = {name: parts.get(name) for name in PARTS}
    found = {name: getattr(error, name) for name in PARTS}
    assert found == expected
    assert getattr(error, "__notes__", []) == ([] if note is None else [note])


@pytest.fixture(scope="session")
def refused() -> Any:
    """``with refused(kind, text, note=..., argument=..., got=...)``: type, text, note and every part are compared.

    A part that is not given must be None.
    """
    return _refused


def _contents(batch: RaggedBatch) -> dict[str, Any]:
    return {
        "lengths": batch.layout.lengths.tolist(),
        "offsets": batch.offsets.tolist(),
        "rows": batch.req_pool_indices.tolist(),
        "prefix_lens": batch.prefix_lens.tolist(),
        "token_ids": batch.token_ids.tolist(),
        "names": batch.layout.req_ids,
        "counts": batch.counts,
        "coercions": batch.coercions,
        "bounds": batch.layout.bounds,
    }


@pytest.fixture(scope="session")
def contents() -> Any:
    """Everything that a batch holds, as plain values that compare by ``==``."""
    return _contents


def _agrees(batch: RaggedBatch, model: Any) -> None:
    layout = batch.layout
    assert (batch.num_reqs, batch.num_tokens) == (len(model.requests), len(model.token_ids))
    assert batch.max_len == max(model.lengths, default=0)
    assert layout.lengths.tolist() == model.lengths
    assert layout.offsets.tolist() == batch.offsets.tolist() == model.offsets
    assert layout.req_pool_indices.tolist() == batch.req_pool_indices.tolist() == model.rows
    assert layout.prefix_lens.tolist() == batch.prefix_lens.tolist() == model.prefix_lens
    assert batch.token_ids.tolist() == model.token_ids
    assert batch.cu_seqlens.tolist() == model.offsets
    assert batch.req_ids.tolist() == model.req_ids
    assert batch.positions.tolist() == model.positions
    assert batch.last_token_indices.tolist() == model.last_token_indices


@pytest.fixture(scope="session")
def agrees() -> Any:
    """Assert that a batch is what a plain-list model says, derived metadata included."""
    return _agrees


@pytest.fixture(scope="session")
def busy() -> Any:
    """Keep the current stream of the GPU busy for a while; what follows queues up behind it."""
    return lambda: torch.cuda._sleep(200_000_000)
