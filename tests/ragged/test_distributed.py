"""A batch across ranks: every rank gets the same one, or says what is wrong with what it got."""

import os
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from ragged import RaggedBatch, RaggedError, RaggedTypeError, RaggedValueError
from ragged.distributed import broadcast, split_by_rank
from ragged.header import starts

LONG = [3000, *[1] * 400]  # uneven: it has a list of tiles


def made(kind: str, device: str = "cpu") -> RaggedBatch:
    """Batches of every kind that goes out."""
    lengths = {"mixed": [3, 0, 2], "empty": [], "uneven": LONG}.get(kind, [2, 1])
    tokens: list[list[int]] = [[7 * request + i for i in range(n)] for request, n in enumerate(lengths)]
    options: dict[str, Any] = {"device": device}
    if kind == "special":
        tokens = [[-1, 2**40], [5]]
        options |= {"allow_placeholders": True, "wide_tokens": "opaque"}
    if kind == "bounded":
        options |= {"pool_shape": (9, 3), "overflow": "truncate", "padding_row": 0, "prefix_lens": [2, 0]}
    return RaggedBatch.from_sequences(tokens, req_pool_indices=range(1, len(tokens) + 1), **options)


KINDS = ["mixed", "empty", "uneven", "special", "bounded"]
FAULTS = {
    "negative_length": "offsets must not decrease, got 3 then 0 at request 1",
    "huge_length": "offsets must not exceed num_tokens 5, got 2147483651 at request 1",
    "one_request_too_many": "header must describe a buffer of 53, got num_reqs 16, 0 tiles, num_tokens 5",
    "negative_row": "req_pool_indices must not be negative, got -4 at request 2",
    "duplicate_row": "req_pool_indices must be unique among requests with tokens, got 1 at both request 0",
    "bad_token": "token_ids must not be negative, got -9 at request 2, position 1",
    "not_a_header": "header must begin with",
}


class Altered:
    """torch.distributed's broadcast on one rank, with what arrives changed in transit."""

    def __init__(self, fault: str) -> None:
        self.fault, self.calls, self.real = fault, 0, dist.broadcast
        at = starts(3)
        self.header = {"one_request_too_many": (2, 16), "not_a_header": (0, 5)}.get(fault)
        self.buffer = {
            "negative_length": (2, 0),
            "huge_length": (2, 3 + 2**31),
            "negative_row": (at.req_pool_indices + 2, -4),
            "duplicate_row": (at.req_pool_indices + 2, 1),
            "bad_token": (at.token_ids + 4, -9),
        }.get(fault)

    def __call__(self, tensor: torch.Tensor, src: int, group: Any = None) -> None:
        self.real(tensor, src, group)
        change = self.header if self.calls == 0 else self.buffer
        self.calls += 1
        if change is not None:
            tensor[change[0]] = change[1]


def rank_main(rank: int, size: int, store: str, out: str) -> None:
    """What each process does; its findings go to a file."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    said: list[str] = []
    try:
        for src in range(size):
            for kind in KINDS:
                mine = made(kind)
                got = broadcast(mine if rank == src else None, src)
                same = torch.equal(got.packed, mine.packed) and got.layout == mine.layout and got.counts == mine.counts
                said.append(f"{kind} {src} {same}")
        for fault in FAULTS:
            if rank == size - 1:
                dist.broadcast = Altered(fault)  # type: ignore[assignment]
            try:
                broadcast(made("mixed") if rank == 0 else None, 0)
                said.append(f"{fault} taken")
            except RaggedError as error:
                said.append(f"{fault} {type(error).__name__} {error}")
            finally:
                if rank == size - 1:
                    dist.broadcast = dist.broadcast.real  # type: ignore[attr-defined]
            dist.barrier()  # nobody hangs
    except Exception:
        said.append(traceback.format_exc())
    finally:
        Path(out, str(rank)).write_text("\n".join(said))
        dist.destroy_process_group()


def gpu_main(rank: int, size: int, store: str, out: str) -> None:
    """The same by NCCL, each process on a GPU of its own."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=size)
    said: list[str] = []
    try:
        for src in range(size):
            for kind in KINDS:
                mine = made(kind, "cuda")
                got = broadcast(mine if rank == src else None, src)
                same = torch.equal(got.packed, mine.packed) and got.layout == mine.layout and got.counts == mine.counts
                said.append(f"{kind} {src} {same and got.device == mine.device}")
    except Exception:
        said.append(traceback.format_exc())
    finally:
        Path(out, str(rank)).write_text("\n".join(said))
        dist.destroy_process_group()


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """What each rank said."""
    folder = tmp_path_factory.mktemp("ranks")
    size = request.param
    torch.multiprocessing.start_processes(
        rank_main, args=(size, str(folder / "store"), str(folder)), nprocs=size, start_method="spawn"
    )
    return [(folder / str(rank)).read_text().splitlines() for rank in range(size)]


def test_every_rank_gets_what_one_rank_built(ranks: list[list[str]]) -> None:
    expected = [f"{kind} {src} True" for src in range(len(ranks)) for kind in KINDS]
    for said in ranks:
        assert said[: len(expected)] == expected


@pytest.mark.gpu
def test_every_gpu_gets_what_one_gpu_has(tmp_path: Path) -> None:
    # On one GPU this is a group of one, whose collectives run and send nothing.
    size, store = torch.cuda.device_count(), str(tmp_path / "store")
    torch.multiprocessing.start_processes(
        gpu_main, args=(size, store, str(tmp_path)), nprocs=size, start_method="spawn"
    )
    expected = [f"{kind} {src} True" for src in range(size) for kind in KINDS]
    assert [(tmp_path / str(rank)).read_text().splitlines() for rank in range(size)] == [expected] * size


# Case 48.
@pytest.mark.parametrize("fault", FAULTS)
def test_what_was_altered_in_transit_is_named_by_its_rank_and_stops_no_other(
    ranks: list[list[str]], fault: str
) -> None:
    last = len(ranks) - 1
    for rank, said in enumerate(ranks):
        [line] = [line for line in said if line.startswith(fault)]
        if rank < last:
            assert line == f"{fault} taken"
        else:
            assert f"rank {rank}: " in line
            assert FAULTS[fault] in line


def test_requests_are_dealt_out_in_order(refused: Any) -> None:
    sequences = [[1, 2], [], [3], [4, 5, 6]]
    batch = RaggedBatch.from_sequences(sequences, req_pool_indices=[4, 3, 2, 1], prefix_lens=[0, 1, 2, 3])
    first, second, third = split_by_rank(batch, [2, 0, 2])
    assert [part.unbind() for part in (second,)] == [()]
    assert [tokens.tolist() for tokens in first.unbind()] == [[1, 2], []]
    assert [tokens.tolist() for tokens in third.unbind()] == [[3], [4, 5, 6]]
    assert third.req_pool_indices.tolist() == [2, 1]
    assert third.prefix_lens.tolist() == [2, 3]
    for sizes in ([2, 1], [5, -1]):
        text = f"sizes must not be negative and sum to num_reqs 4, got {sizes}"
        with refused(RaggedValueError, text, argument="sizes", got=sizes, bound=4):
            split_by_rank(batch, sizes)


def test_the_sender_must_have_a_batch(monkeypatch: pytest.MonkeyPatch, refused: Any) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    text = "batch must be a RaggedBatch on rank 0, got NoneType"
    with refused(RaggedTypeError, text, argument="batch", got="NoneType"):
        broadcast(None, 0)
