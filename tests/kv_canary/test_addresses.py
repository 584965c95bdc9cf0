"""A kept launch passes addresses where an ordinary one passes tensors: they must be the same memory, in one order."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kv_canary.kinds import COUNTER_LINES, COUNTERS, PHASES, STAMP_COLUMNS, STAMP_FIELDS, VIOLATION_COLUMNS
from kv_canary.stamping import Checks, KVSource, Memory, Pooled, turns_of
from ragged import Capacity, RaggedBatch
from ragged.packing import Views

pytest.importorskip("triton")

from kv_canary import stamps_triton, triton_backend

LENGTHS = {"even": [3, 1, 2], "long": [2000, 1500], "listed": [200_000, *[1] * 300]}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the kernels that are launched from here on, each held against its own signature."""
    names: list[str] = []

    def launch(kernel: Any, _: Any, programs: int, tensors: Any, addresses: Any, *rest: Any, **__: Any) -> None:
        given, (sizes, constants, *_) = tensors(), rest
        assert programs > 0
        assert len(given) == len(addresses)
        known = [(tensor.data_ptr(), at) for tensor, at in zip(given, addresses, strict=True) if tensor.numel()]
        assert [at for at, _ in known] == [at for _, at in known]
        pointers = [name for name in kernel.arg_names if name.endswith("_ptr")]
        assert len(pointers) == len(given)
        assert len(kernel.arg_names) == len(given) + len(sizes) + len(constants)
        assert all(type(size) is int for size in sizes)
        names.append(kernel.fn.__name__)

    monkeypatch.setattr(triton_backend.launching, "launch", launch)
    yield names


def batch_of(kind: str, **options: Any) -> RaggedBatch:
    lengths = LENGTHS[kind]
    tokens = torch.arange(sum(lengths)) % 1000
    return RaggedBatch.from_lengths(tokens, lengths, req_pool_indices=range(1, len(lengths) + 1), **options)


@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("reported", [False, True])
def test_of_the_pools_kernels(launched: list[str], kind: str, reported: bool) -> None:
    batch, pool = batch_of(kind), torch.empty(400, 16, dtype=torch.int32)
    report = torch.zeros(5, 5, dtype=torch.int64) if reported else None
    valid_lens, log = torch.zeros(400, dtype=torch.int64), torch.zeros(9, VIOLATION_COLUMNS, dtype=torch.int64)
    for lens in (None, valid_lens):
        triton_backend.scatter_batch(batch, pool, report, 1, lens)
    triton_backend.verify_batch(batch, pool, valid_lens, log, 1, True)
    no_tiles = torch.empty(0, 2, dtype=torch.int64)
    views = Views(batch.offsets, batch.req_pool_indices, batch.prefix_lens, no_tiles, batch.token_ids)
    triton_backend.verify_views(views, pool, valid_lens, log, 1, True)
    columns = (batch.token_ids, batch.offsets, batch.req_pool_indices)
    for prefixes in (None, batch.prefix_lens):
        triton_backend.scatter(*columns, prefixes, pool, report, 1)
    extra = ["set_valid_lens"] if kind == "listed" else []
    assert launched == ["scatter_tiles"] * 2 + extra + ["verify_tiles"] * 2 + ["scatter_flat"] * 2


def test_of_a_fixed_capacity(launched: list[str]) -> None:
    batch = batch_of("even", capacity=Capacity(9, 100), padding_row=0)
    pool, valid_lens = torch.empty(40, 16, dtype=torch.int32), torch.zeros(40, dtype=torch.int64)
    triton_backend.verify_batch(batch, pool, valid_lens, torch.zeros(9, VIOLATION_COLUMNS, dtype=torch.int64), 1, True)
    triton_backend.set_valid_lens(batch, 16, valid_lens)
    assert launched == ["verify_tiles", "set_valid_lens"]


@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("full", [False, True])
def test_of_the_canarys_kernels(launched: list[str], kind: str, full: bool) -> None:
    batch = batch_of(kind)
    slots = torch.arange(batch.num_tokens) + 1
    num_slots = batch.num_tokens + 1
    memory = Memory(
        torch.zeros(num_slots, STAMP_FIELDS, dtype=torch.int64),
        torch.zeros(9, STAMP_COLUMNS, dtype=torch.int64),
        torch.zeros(2 + PHASES, dtype=torch.int64),
        torch.zeros(COUNTER_LINES, COUNTERS, dtype=torch.int64),
    )
    more = (torch.zeros(batch.num_reqs, dtype=torch.int64), slots, slots) if full else (None, None, None)
    kv = KVSource(torch.zeros(num_slots, 16, dtype=torch.uint8), 16)
    turns = turns_of([kv] if full else [], None, num_slots, kv.tensor.device)
    pool = Pooled(torch.zeros(400, 8, dtype=torch.int32), torch.zeros(400, dtype=torch.int64)) if full else None
    stamps_triton.write(batch, slots, *more, memory, 1)
    table = torch.zeros(400, 8, dtype=torch.int32)
    checks = Checks(table, torch.arange(3), torch.full((3,), 8), 1 << 62, 1, 24)
    stamps_triton.check(checks, pool, turns, memory, 1)
    stamps_triton.sweep(torch.zeros(4, 3, dtype=torch.int64), turns, memory, 1)
    sums = [] if kind == "even" else ["sum_tiles"]
    hashes = ["gather_slots", "hash_kv"] if full else []
    swept = ["hash_kv", "check_triples"] if full else ["check_triples"]
    assert launched == [*sums, "write_stamps", "plan_checks", *hashes, "check_requests", *swept]
