"""What only a GPU can show: large tables, large grids, streams, threads, syncs, processes."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kv_canary import GuardReport, launch_scatter_req_token_ids_kernel, scatter
from ragged import RaggedBatch, RaggedBatchBuilder

pytestmark = pytest.mark.gpu
heavy = pytest.mark.heavy

ROOT = Path(__file__).resolve().parents[2]
POISON = -7


@pytest.fixture(autouse=True)
def _memory_is_given_back() -> Iterator[None]:
    yield
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def _ints(values: Any) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int64).to("cuda")


def _pool(max_reqs: int, max_context_len: int) -> torch.Tensor:
    return torch.full((max_reqs, max_context_len), POISON, dtype=torch.int32, device="cuda")


# ---- sizes -----------------------------------------------------------------------------------------------------------


# Cases 3, 56: more than 2^31 cells, the last row written. In 32 bits it would land in another row, or nowhere.
@heavy
@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("shape", [(70_000, 40_000), (65_536, 32_769)], ids=["70000_rows", "a_product_just_above_2_31"])
def test_a_pool_of_more_than_2_31_cells_is_addressed_right(backend: str, shape: tuple[int, int], counts: Any) -> None:
    pool, report = _pool(*shape), GuardReport.allocate("cuda")
    last = shape[0] - 1
    columns = {
        "flat_in": _ints([1, 2, 3, 4, 5]),
        "offsets": _ints([0, 1, 3, 5]),
        "req_pool_indices": _ints([0, last, 1]),
    }
    prefix_lens = _ints([0, shape[1] - 2, 5])
    launch_scatter_req_token_ids_kernel(
        **columns, prefix_lens=prefix_lens, pool_out=pool, report=report, backend=backend
    )
    batch = RaggedBatch.from_sequences([[8, 9]], req_pool_indices=[last - 1], device="cuda")
    scatter(batch, pool, report=report, backend=backend)
    assert pool[0, :2].tolist() == [1, POISON]
    assert pool[last, -3:].tolist() == [POISON, 2, 3]
    assert pool[1, 4:8].tolist() == [POISON, 4, 5, POISON]
    assert pool[last - 1, :3].tolist() == [8, 9, POISON]
    assert int((pool != POISON).sum()) == 7
    assert report.counts() == counts()


# Case 40: more programs than the 65,535 that two of a grid's three dimensions take.
@pytest.mark.parametrize("num_reqs", [512, 65_535, 65_536, 70_000])
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_one_token_for_each_of_many_requests(backend: str, num_reqs: int) -> None:
    tokens = torch.arange(num_reqs, dtype=torch.int64, device="cuda") + 5
    rows = torch.arange(num_reqs, dtype=torch.int64, device="cuda").flip(0)
    offsets = torch.arange(num_reqs + 1, dtype=torch.int64, device="cuda")
    pool, again = _pool(70_000, 1), _pool(70_000, 1)
    columns = {"flat_in": tokens, "offsets": offsets, "req_pool_indices": rows}
    launch_scatter_req_token_ids_kernel(**columns, pool_out=pool, backend=backend)
    batch = RaggedBatch.from_lengths(tokens, [1] * num_reqs, req_pool_indices=rows.cpu(), device="cuda")
    scatter(batch, again, backend=backend)
    for table in (pool, again):
        assert torch.equal(table[:num_reqs, 0], tokens.flip(0).to(torch.int32))
        assert bool((table[num_reqs:] == POISON).all())


# Case 40: one request longer than 65,536 column tiles of 1,024.
@heavy
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_one_request_of_more_than_65536_column_tiles(backend: str) -> None:
    longest = 65_536 * 1024 + 3
    tokens = torch.arange(longest + 2, dtype=torch.int64, device="cuda") & 0xFFFFFF
    pool, again = _pool(3, longest + 1), _pool(3, longest + 1)
    columns = {"offsets": _ints([0, 1, longest + 1, longest + 2]), "req_pool_indices": _ints([2, 0, 1])}
    launch_scatter_req_token_ids_kernel(flat_in=tokens, **columns, pool_out=pool, backend=backend)
    batch = RaggedBatch.from_lengths(tokens, [1, longest, 1], req_pool_indices=[2, 0, 1], device="cuda")
    scatter(batch, again, backend=backend)
    for table in (pool, again):
        assert torch.equal(table[0, :longest], tokens[1 : longest + 1].to(torch.int32))
        assert table[:, -1].tolist() == [POISON] * 3
        assert table[1, :2].tolist() == [(longest + 1) & 0xFFFFFF, POISON]
        assert table[2, :2].tolist() == [0, POISON]


# Case 58: nothing that `tl.arange` or a grid cannot hold follows the number of requests.
@pytest.mark.parametrize("num_reqs", [1, 2**20, 2**20 + 1])
@pytest.mark.parametrize("with_report", [True, False], ids=["report", "no_report"])
def test_a_million_requests(num_reqs: int, with_report: bool) -> None:
    report = GuardReport.allocate("cuda") if with_report else None
    lengths = torch.arange(num_reqs, dtype=torch.int64) % 3
    lengths[-1] = 2
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    tokens = torch.arange(int(offsets[-1]), dtype=torch.int64, device="cuda")
    pool, again = _pool(num_reqs, 3), _pool(num_reqs, 3)
    rows = torch.arange(num_reqs, dtype=torch.int64, device="cuda")
    columns = {"flat_in": tokens, "offsets": offsets.cuda(), "req_pool_indices": rows}
    launch_scatter_req_token_ids_kernel(**columns, pool_out=pool, report=report)
    batch = RaggedBatch.from_lengths(tokens, lengths, req_pool_indices=rows.cpu(), device="cuda")
    scatter(batch, again, report=report)
    owner = torch.repeat_interleave(rows, lengths.cuda(), output_size=len(tokens))
    expected = _pool(num_reqs, 3)
    expected[owner, tokens - offsets.cuda()[owner]] = tokens.to(torch.int32)
    assert torch.equal(pool, expected)
    assert torch.equal(again, expected)
    if report is not None:
        report.raise_if_any()


# Cases 11, 28, 30 at size: many blocks, many windows, and faults in the first, a middle and the last of them.
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_faults_among_thousands_of_requests_are_contained_and_counted(backend: str, counts: Any) -> None:
    num_reqs, length = 3000, 7
    whole = _pool(num_reqs + 4, length + 6)
    pool = whole[2:-2, 3:-3]
    tokens = torch.arange(num_reqs * length, dtype=torch.int64, device="cuda")
    offsets = torch.arange(num_reqs + 1, dtype=torch.int64, device="cuda") * length
    rows = torch.arange(num_reqs, dtype=torch.int64, device="cuda").flip(0)
    prefix_lens = torch.zeros_like(rows)
    expected = whole.clone()
    expected[2:-2, 3:-3] = tokens.view(num_reqs, length).flip(0).to(torch.int32)
    at_row, at_prefix, at_token = [0, 1500, 2999], [1, 1777], [5, 10_000, 20_990]
    rows[at_row] = _ints([2**40, -1, num_reqs])
    prefix_lens[at_prefix] = _ints([-1, length + 1])
    tokens[at_token] = 2**31
    for request in [*at_row, *at_prefix]:
        expected[2 + num_reqs - 1 - request, 3:-3] = POISON
    for token in at_token:
        request = token // length
        if request not in at_row:
            expected[2 + num_reqs - 1 - request, 3 + token % length] = -1
    report = GuardReport.allocate("cuda")
    columns = {"flat_in": tokens, "offsets": offsets, "req_pool_indices": rows, "prefix_lens": prefix_lens}
    launch_scatter_req_token_ids_kernel(**columns, pool_out=pool, report=report, backend=backend)
    assert torch.equal(whole, expected)
    assert report.counts() == counts(row=3, prefix=2, token=3)
    # One decrease in the middle: its request and the next begin and end wrong, all others are written.
    report.clear()
    broken = offsets.clone()
    broken[1600] = 1
    pool.fill_(POISON)
    launch_scatter_req_token_ids_kernel(**columns | {"offsets": broken}, pool_out=pool, report=report, backend=backend)
    expected[2 + num_reqs - 1 - 1599, 3:-3] = POISON  # goes from 1599 * 7 back to 1
    stretched = expected[2 + num_reqs - 1 - 1600, 3:-3]  # goes from 1 to 1601 * 7, cut at the row's end
    stretched.copy_(torch.where(tokens[1 : 1 + length] > 2**31 - 1, -1, tokens[1 : 1 + length]).to(torch.int32))
    assert torch.equal(whole, expected)
    found = report.counts()
    assert (found["offsets"], found["row"], found["prefix"], found["token"]) == (1, 3, 2, 3)
    assert found["dropped"] == 1600 * length + length - 1 - length


# ---- syncs -----------------------------------------------------------------------------------------------------------


@contextmanager
def _no_sync() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _step(builder: RaggedBatchBuilder, pool: torch.Tensor, report: GuardReport | None) -> RaggedBatch:
    builder.add(3, [1, 2, 3], [4], req_id="a")
    builder.extend([1, 2], [[5], [6, 7]], prefix_lens=[0, 4])
    batch = builder.build().pad_to(5)
    scatter(batch, pool, report=report)
    return batch


# Case 21.
def test_a_step_never_syncs() -> None:
    builder, pool, report = RaggedBatchBuilder(device="cuda"), _pool(5, 8), GuardReport.allocate("cuda")
    for _ in range(3):
        batch = _step(builder, pool, report)
    other = RaggedBatch.from_sequences([[9]], req_pool_indices=[0], device="cuda")
    report.poll()
    torch.cuda.synchronize()
    launcher = {"flat_in": batch.token_ids, "offsets": batch.offsets, "req_pool_indices": batch.req_pool_indices}
    launcher["prefix_lens"] = batch.prefix_lens
    with _no_sync():
        for with_report in (None, report):
            batch = _step(builder, pool, with_report)
            _ = (batch.token_ids, batch.offsets, batch.req_pool_indices, batch.prefix_lens, batch.tiles)
            _ = (batch.cu_seqlens, batch.positions, batch.req_ids, batch.last_token_indices)
            _ = (batch.num_reqs, batch.num_tokens, batch.max_len, batch.device, batch.dropped_tokens)
            _ = (batch.num_placeholders, batch.num_wide_tokens, repr(batch), batch.unbind(), batch.to_padded(0))
            _ = (batch.select([2, 0]), batch.split(3), RaggedBatch.concat([batch, other]))
            launch_scatter_req_token_ids_kernel(**launcher, pool_out=pool, report=with_report)
        for _ in range(3):
            report.poll()
        report.clear()
    torch.cuda.synchronize()
    assert pool.tolist()[1:4] == [[5] + [POISON] * 7, [POISON] * 4 + [6, 7] + [POISON] * 2, [1, 2, 3, 4] + [POISON] * 4]


# Cases 2, 21: one copy moves a batch, and its source is pinned.
def test_a_step_is_one_copy_from_pinned_memory() -> None:
    builder, pool = RaggedBatchBuilder(device="cuda"), _pool(5, 8)
    report = GuardReport.allocate("cuda")

    def step() -> None:
        builder.extend([1, 2], [[5], [6, 7]], prefix_lens=[0, 4])
        scatter(builder.build(), pool, report=report)

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    on_device = [name for name in names if "scatter_tiles" in name or name.startswith("Memcpy")]
    if not on_device:
        pytest.skip("the profiler sees no device activity here")
    assert [name for name in on_device if name.startswith("Memcpy")] == ["Memcpy HtoD (Pinned -> Device)"]
    assert sum(name == "cudaStreamSynchronize" for name in names) == 0


# ---- streams and threads ---------------------------------------------------------------------------------------------


# Case 38.
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_threads_with_their_own_batches_do_not_disturb_each_other(backend: str) -> None:
    wrong: list[str] = []

    def work(number: int) -> None:
        try:
            before = torch.cuda.current_device()
            builder = RaggedBatchBuilder(device="cuda", pool_shape=(8, 64))
            pool, report = _pool(8, 64), GuardReport.allocate("cuda")
            for step in range(30):
                row, token = (number + step) % 8, 1000 * number + step
                builder.add(row, [token] * 3, prefix_len=step)
                scatter(builder.build(), pool, report=report, backend=backend)
                if pool[row, step : step + 3].tolist() != [token] * 3:
                    wrong.append(f"thread {number} step {step}")
            report.raise_if_any()
            with pytest.raises(ValueError, match="pool_out must be 2-D"):
                builder.add(0, [1])
                scatter(builder.build(), pool[0], backend=backend)
            if torch.cuda.current_device() != before:
                wrong.append(f"thread {number}: the current device changed")
        except Exception as error:
            wrong.append(f"thread {number}: {error!r}")

    work(0)  # the main thread first, then a fresh one, then eight at once
    for numbers in ([1], range(8)):
        threads = [threading.Thread(target=work, args=(number,)) for number in numbers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


# Case 39, in a process of its own: the allocator is chosen before the first allocation.
DROPPED_WHILE_READ = """
import torch
from kv_canary import scatter
from ragged import RaggedBatch

made_on, read_on = torch.cuda.Stream(), torch.cuda.Stream()
length = 5000
pool = torch.full((4, length), -7, dtype=torch.int32, device="cuda")
tokens_on_device = torch.arange(length, dtype=torch.int64, device="cuda")
torch.cuda.synchronize()
wrong = 0
for step in range(100):
    row = step % 4
    with torch.cuda.stream(made_on):
        if step % 2:  # tokens that are on the device already are memory of their own
            batch = RaggedBatch.from_lengths(tokens_on_device + step, [length], req_pool_indices=[row], device="cuda")
        else:
            batch = RaggedBatch.from_sequences([range(step, step + length)], req_pool_indices=[row], device="cuda")
        nbytes = [batch.packed.nbytes, batch.token_ids.nbytes]
        made = torch.cuda.Event()
        made.record(made_on)
    with torch.cuda.stream(read_on):
        read_on.wait_event(made)
        torch.cuda._sleep(1_000_000)
        scatter(batch, pool, backend=BACKEND)
    del batch
    with torch.cuda.stream(made_on):
        poison = [torch.full((size // 8,), 99, dtype=torch.int64, device="cuda") for size in nbytes]
    read_on.synchronize()
    wrong += pool[row].tolist() != list(range(step, step + length))
    del poison
print("wrong", wrong)
"""


def _subprocess(code: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")} | environment,
    )


def _output(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.strip()


@heavy
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_a_batch_dropped_while_another_stream_reads_it_is_scattered_exactly(backend: str) -> None:
    allocators = ["", "expandable_segments:True", "backend:cudaMallocAsync"]
    code = f"BACKEND = {backend!r}\n{DROPPED_WHILE_READ}"
    processes = {name: _subprocess(code, **({"PYTORCH_CUDA_ALLOC_CONF": name} if name else {})) for name in allocators}
    assert {name: _output(process) for name, process in processes.items()} == dict.fromkeys(allocators, "wrong 0")


@heavy  # a sanitizer's own slowness would outlast the busy device
def test_a_scatter_goes_to_the_current_stream() -> None:
    side = torch.cuda.Stream()
    batch = RaggedBatch.from_sequences([[5, 6]], req_pool_indices=[0], device="cuda")
    pool = _pool(1, 2)
    scatter(batch, pool)
    pool.fill_(POISON)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(400_000_000)
        scatter(batch, pool)
        done = torch.cuda.Event()
        done.record(side)
    # The default stream is free: it sees the pool as it was before the other stream's turn.
    seen = pool.clone().tolist()
    early = not done.query()
    torch.cuda.synchronize()
    assert early and seen == [[POISON, POISON]]
    assert pool.tolist() == [[5, 6]]


# Cases 13, 38.
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="gpu: needs two devices")
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_tensors_on_the_second_device_are_scattered_there(backend: str, counts: Any) -> None:
    batch = RaggedBatch.from_sequences([[5, 6]], req_pool_indices=[1], device="cuda:1")
    pool, report = torch.full((2, 3), POISON, dtype=torch.int32, device="cuda:1"), GuardReport.allocate("cuda:1")
    columns = {"flat_in": batch.token_ids, "offsets": batch.offsets, "req_pool_indices": batch.req_pool_indices}
    for _ in range(2):
        with torch.cuda.device(0):
            scatter(batch, pool, report=report, backend=backend)
            launch_scatter_req_token_ids_kernel(**columns, pool_out=pool, report=report, backend=backend)
            assert torch.cuda.current_device() == 0
    assert pool.tolist() == [[POISON] * 3, [5, 6, POISON]]
    assert report.counts() == counts()
    with pytest.raises(ValueError, match="pool_out is on cuda:0, the batch is on cuda:1"):
        scatter(batch, pool.to("cuda:0"), backend=backend)


# ---- processes -------------------------------------------------------------------------------------------------------


FIRST_SCATTER = """
import torch
from kv_canary import launch_scatter_req_token_ids_kernel, scatter
from ragged import RaggedBatch
pool = torch.full((4, 8), -7, dtype=torch.int32, device="cuda")
batch = RaggedBatch.from_sequences([[7, 8, 9], [5]], req_pool_indices=[1, 3], prefix_lens=[2, 0], device="cuda")
try:
    scatter(batch, pool)
    launch_scatter_req_token_ids_kernel(
        flat_in=batch.token_ids, offsets=batch.offsets, req_pool_indices=batch.req_pool_indices, pool_out=pool
    )
    print(pool[1].tolist(), pool[3].tolist())
except Exception as error:
    print(type(error).__name__, error)
"""


# Case 59.
@heavy
def test_eight_processes_make_their_first_scatter_with_a_fresh_cache_at_once(tmp_path: Path) -> None:
    processes = [_subprocess(FIRST_SCATTER, TRITON_CACHE_DIR=str(tmp_path / "cache")) for _ in range(8)]
    expected = "[7, 8, 9, 8, 9, -7, -7, -7] [5, -7, -7, -7, -7, -7, -7, -7]"
    assert [_output(process) for process in processes] == [expected] * 8


# Case 59: even root cannot write a folder inside a file.
@heavy
def test_a_cache_folder_that_cannot_be_written_is_one_error_and_no_other_backend(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "cache"
    said = _output(_subprocess(FIRST_SCATTER, TRITON_CACHE_DIR=str(folder)))
    assert said.startswith(f"RaggedError kv-canary: triton cannot use its cache folder {folder}: ")
    assert said.endswith("set TRITON_CACHE_DIR to one that can be written")


# Case 67: neither the imports nor work on the CPU touch the driver, which a forked child could not use then.
FORK = """
import os, sys
import torch
import ragged, kv_canary
pool = torch.full((2, 3), -7, dtype=torch.int32)
kv_canary.scatter(ragged.RaggedBatch.from_sequences([[1, 2]], req_pool_indices=[1]), pool)
assert pool.tolist() == [[-7] * 3, [1, 2, -7]]
assert not torch.cuda.is_initialized()
child = os.fork()
if child == 0:
    try:
        pool = pool.cuda()
        batch = ragged.RaggedBatch.from_sequences([[3]], req_pool_indices=[0], device="cuda")
        report = kv_canary.GuardReport.allocate("cuda")
        kv_canary.scatter(batch, pool, report=report)
        report.raise_if_any()
        code = 0 if pool.tolist() == [[3, -7, -7], [1, 2, -7]] else 3
    except BaseException as error:
        print(repr(error), file=sys.stderr)
        code = 4
    os._exit(code)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@heavy
def test_a_forked_child_can_use_the_device() -> None:
    assert _output(_subprocess(FORK)) == "child 0"
