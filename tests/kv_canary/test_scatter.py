"""What the scatter writes: every request's tokens into its row, exactly, on every backend."""

import itertools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kv_canary import GuardReport, scatter
from ragged import RaggedBatch, RaggedBatchBuilder

ROOM = 4
"""Columns that stay free to the right of the longest request."""


def _assert_scattered(target: Any, oracle: Any, lengths: list[int], with_report: bool = True) -> None:
    """The launcher and the batch on these lengths, rows in reverse order; tokens are numbered through."""
    rows = list(range(len(lengths)))[::-1]
    offsets = [0, *np.cumsum(lengths, dtype=np.int64).tolist()]
    token_ids = list(range(100, 100 + offsets[-1]))
    columns = {"flat_in": token_ids, "offsets": offsets, "req_pool_indices": rows}
    shape = (max(len(lengths), 1), max(lengths, default=0) + ROOM)
    framed, again = target.framed(*shape), target.framed(*shape)
    report = target.report() if with_report else None
    target.raw(framed.pool, token_ids, offsets, rows, report=report)
    sequences = [token_ids[start:end] for start, end in itertools.pairwise(offsets)]
    target.scatter(target.batch(sequences, rows), again.pool, report)
    twin, _ = oracle(columns, framed)
    assert torch.equal(framed.whole.cpu(), twin)
    assert torch.equal(again.whole.cpu(), twin)
    if report is not None:
        report.raise_if_any()


def _blocks(block: int) -> dict[str, list[int]]:
    """Lengths around the edge of a block of tokens."""
    return {
        "empty_in_the_middle": [block - 1, 0, 1, 0, 0, block],
        "one_full_between_empties": [0, block, 0],
        "full_blocks": [block, block, block],
        "one_more": [block + 1, block - 1, 0, 2 * block],
        "block_of_ones": [1] * block,
        "trailing_empties": [3, *[0] * block],
    }


# Case 23, for the tiny tiles of every kind and, on a GPU, for the shipped ones.
@pytest.mark.parametrize("name", list(_blocks(1)))
@pytest.mark.parametrize("block", [2, 4, 8, 16])
@pytest.mark.parametrize("with_report", [True, False], ids=["report", "no_report"])
def test_lengths_around_the_edges_of_small_blocks(
    target: Any, oracle: Any, block: int, name: str, with_report: bool
) -> None:
    if target.backend == "triton" and not target.tiny:
        pytest.skip("small blocks are edges of the tiny tiles only")
    _assert_scattered(target, oracle, _blocks(block)[name], with_report)


@pytest.mark.parametrize("name", list(_blocks(1)))
@pytest.mark.parametrize("block", [256, 1024])
def test_lengths_around_the_edges_of_the_shipped_blocks(target: Any, oracle: Any, block: int, name: str) -> None:
    if target.tiny or (target.device == "cpu" and target.backend == "triton" and block > 256):
        pytest.skip("many tiny tiles; too slow under the interpreter")
    _assert_scattered(target, oracle, _blocks(block)[name])


# Case 23.
@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param([128, 0, 128], id="in_the_middle"),
        pytest.param([0] * 600 + [1], id="six_hundred_before"),
        pytest.param([0, 0, 5], id="before"),
        pytest.param([5, 0, 0], id="behind"),
    ],
)
def test_an_empty_request_leaves_its_row_alone(target: Any, oracle: Any, lengths: list[int]) -> None:
    if target.tiny and target.device == "cpu":
        lengths = [length for r, length in enumerate(lengths) if r % 20 == 0 or length]
    _assert_scattered(target, oracle, lengths)


# Case 14.
@pytest.mark.parametrize("num_reqs", [1, 3, 16, 17, 511, 512, 513])
@pytest.mark.parametrize("length", [1, 16, 17])
def test_numbers_of_requests_around_powers_of_two(target: Any, oracle: Any, num_reqs: int, length: int) -> None:
    if target.device == "cpu" and target.backend == "triton" and (num_reqs * length > 600 or target.tiny):
        pytest.skip("too slow under the interpreter")
    _assert_scattered(target, oracle, [length] * num_reqs)


# Case 15: there is no cap on the number of requests.
@pytest.mark.parametrize("num_reqs", [512, 5000])
def test_many_requests_of_uneven_length(target: Any, oracle: Any, num_reqs: int) -> None:
    if target.device == "cpu" and target.backend == "triton":
        num_reqs = 48 if target.tiny else 300
    _assert_scattered(target, oracle, [(r * r) % 4 for r in range(num_reqs)])


@pytest.mark.parametrize("longest", [40, 3000])
def test_one_long_request_among_short_ones(target: Any, oracle: Any, longest: int) -> None:
    if target.tiny and target.device == "cpu" and longest > 40:
        pytest.skip("too slow under the interpreter")
    _assert_scattered(target, oracle, [1, 0, 2, longest, 3, 0, 1])


# Case 25: what a chunked prefill is for.
@pytest.mark.parametrize("max_tokens", [1, 3, 6, 100])
def test_the_pieces_of_a_split_write_what_the_whole_batch_writes(target: Any, max_tokens: int) -> None:
    sequences = [[10, 11, 12, 13], [], [20, 21, 22, 23, 24], [30, 31, 32, 33, 34, 35]]
    batch = target.batch(sequences, [1, 2, 4, 3], prefix_lens=[2, 0, 0, 1])
    whole, pieces = target.framed(5, 8), target.framed(5, 8)
    target.scatter(batch, whole.pool)
    with target.tiles():
        parts = batch.split(max_tokens)
    for part in parts:
        target.scatter(part, pieces.pool)
    assert whole.rows()[1] == [-7, -7, 10, 11, 12, 13, -7, -7]
    assert torch.equal(pieces.whole, whole.whole)


# Case 8: alone, and after a call that wrote.
@pytest.mark.parametrize("after_another", [False, True])
@pytest.mark.parametrize(
    ("lengths", "max_reqs", "max_context_len"),
    [
        pytest.param([], 3, 4, id="zero_requests"),
        pytest.param([0, 0], 3, 4, id="only_empty_requests"),
        pytest.param([], 0, 4, id="no_rows"),
        pytest.param([0], 3, 0, id="no_columns"),
        pytest.param([], 0, 0, id="no_pool_at_all"),
    ],
)
def test_nothing_to_do_changes_nothing(
    target: Any, counts: Any, lengths: list[int], max_reqs: int, max_context_len: int, after_another: bool
) -> None:
    if after_another:
        earlier = target.framed(3, 4)
        target.raw(earlier.pool, [1, 2, 3], [0, 2, 3], [0, 2])
        assert earlier.rows() == [[1, 2, -7, -7], [-7] * 4, [3, -7, -7, -7]]
    framed = target.framed(max_reqs, max_context_len)
    rows = list(range(len(lengths)))
    for report in (None, target.report()):
        target.raw(framed.pool, [], [0] * (len(lengths) + 1), rows, report=report)
        target.scatter(target.batch([[] for _ in lengths], rows), framed.pool, report)
        framed.assert_untouched()
        if report is not None:
            assert report.counts() == counts()


def test_tokens_for_a_pool_without_columns_are_all_dropped(target: Any, counts: Any) -> None:
    framed, report = target.framed(3, 0), target.report()
    target.raw(framed.pool, [1, 2, 3], [0, 2, 3], [0, 2])
    target.raw(framed.pool, [1, 2, 3], [0, 2, 3], [0, 2], report=report)
    framed.assert_untouched()
    assert report.counts() == counts(dropped=3)


def test_every_row_of_a_pool_without_rows_is_wrong(target: Any, counts: Any) -> None:
    framed, report = target.framed(0, 3), target.report()
    target.raw(framed.pool, [1, 2], [0, 1, 2], [0, 1])
    target.raw(framed.pool, [1, 2], [0, 1, 2], [0, 1], report=report)
    framed.assert_untouched()
    assert report.counts() == counts(row=2)


# Case 7: what lies behind the metadata is legal-looking poison, and differs from call to call.
@pytest.mark.parametrize("poison", [0, 1, 3, 2**40, -1])
def test_what_lies_behind_the_inputs_is_never_read(target: Any, oracle: Any, poison: int) -> None:
    columns = {"flat_in": [5, 6, 7], "offsets": [0, 1, 3], "req_pool_indices": [2, 0], "prefix_lens": [1, 0]}
    framed, report = target.framed(4, 5), target.report()
    buried = {name: target.buried(values, poison) for name, values in columns.items()}
    target.launch(**buried, pool_out=framed.pool, report=report)
    twin, _ = oracle(columns, framed)
    assert torch.equal(framed.whole.cpu(), twin)
    report.raise_if_any()


# Case 16: SGLang's silent truncation, counted where a report is given.
def test_a_segment_that_ends_beyond_the_row_is_cut_there(target: Any, counts: Any) -> None:
    framed, report = target.framed(3, 16), target.report()
    target.raw(framed.pool, list(range(20, 30)), [0, 10], [1], prefix_lens=[10], report=report)
    framed.assert_border_intact()
    assert framed.rows() == [[-7] * 16, [-7] * 10 + [20, 21, 22, 23, 24, 25], [-7] * 16]
    assert report.counts() == counts(dropped=4)


# Case 10: a padded batch refilled with a smaller one.
def test_padding_requests_write_nothing(target: Any) -> None:
    builder = RaggedBatchBuilder(device=target.device, padding_row=0)
    framed = target.framed(4, 4)
    with target.tiles():
        builder.extend([1, 2, 3], [[11, 12], [21], [31]])
        target.scatter(builder.build().pad_to(4), framed.pool)
        builder.extend([2], [[99]], prefix_lens=[1])
        smaller = builder.build().pad_to(4)
    assert smaller.layout.lengths.tolist() == [1, 0, 0, 0]
    assert smaller.req_pool_indices.tolist() == [2, 0, 0, 0]
    target.scatter(smaller, framed.pool)
    assert framed.rows() == [[-7] * 4, [11, 12, -7, -7], [21, 99, -7, -7], [31, -7, -7, -7]]
    framed.assert_border_intact()


# Case 29: tokens beyond the last offset are nobody's, and not looked at either.
def test_spare_tokens_of_the_raw_launcher_belong_to_nobody(target: Any, counts: Any) -> None:
    framed, report = target.framed(2, 8), target.report()
    target.raw(framed.pool, [1, 2, 3, 4, 5, 2**40, 7, 8], [0, 2, 5], [0, 1], report=report)
    assert framed.rows() == [[1, 2, *[-7] * 6], [3, 4, 5, *[-7] * 5]]
    assert report.counts() == counts()


# Case 31: which of two requests a cell holds is not specified; it is one of the two.
def test_a_row_that_two_requests_claim_holds_one_of_them_in_each_cell(target: Any) -> None:
    framed = target.framed(3, 6)
    target.raw(framed.pool, [10, 11, 12, 20, 21], [0, 3, 5], [1, 1])
    framed.assert_border_intact()
    row = framed.rows()[1]
    assert row[0] in (10, 20) and row[1] in (11, 21)
    assert row[2:] == [12, -7, -7, -7]
    assert framed.rows()[0] == framed.rows()[2] == [-7] * 6


# Case 37.
@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda big: big[1:-1, 2:10], id="inner_rows_and_columns"),
        pytest.param(lambda big: big[::4, 2:10], id="every_fourth_row"),
        pytest.param(lambda big: big[4:5, 3:11], id="one_row"),
        pytest.param(lambda big: big[2:, 5:6], id="one_column"),
    ],
)
def test_a_pool_that_is_a_slice_is_written_where_it_is(target: Any, view: Any) -> None:
    big = torch.full((13, 12), -7, dtype=torch.int32, device=target.device)
    expected = big.clone()
    pool, mirror = view(big), view(expected)
    last = pool.shape[0] - 1
    token_ids = [1, 2, 3, 4] if last else [4]
    offsets, rows = ([0, 3, 4], [0, last]) if last else ([0, 1], [0])
    target.raw(pool, token_ids, offsets, rows)
    for r, row in enumerate(rows):
        own = torch.tensor(token_ids[offsets[r] : offsets[r + 1]], dtype=torch.int32)[: mirror.shape[1]]
        mirror[row, : len(own)] = own.to(target.device)
    assert torch.equal(big, expected)


# Case 41: every alignment that a view can have.
@pytest.mark.parametrize("shift", [0, 1, 2, 3, 15])
def test_tokens_of_any_alignment_are_right(target: Any, oracle: Any, shift: int) -> None:
    token_ids = list(range(100, 160))
    columns = {"flat_in": token_ids, "offsets": [0, 25, 60], "req_pool_indices": [1, 0]}
    framed = target.framed(2, 40)
    buried = {name: target.buried(values, -99, before=shift) for name, values in columns.items()}
    target.launch(**buried, pool_out=framed.pool)
    twin, _ = oracle(columns, framed)
    assert torch.equal(framed.whole.cpu(), twin)


# Case 49: a token wider than int32 is stored as the placeholder, never as another token.
@pytest.mark.parametrize("wide", [1_000_000 + 2**61, 2**31, -(2**31) - 1, 2**32 + 5, -(2**63)])
def test_a_wide_token_becomes_the_placeholder_and_is_counted(target: Any, counts: Any, wide: int) -> None:
    framed, report = target.framed(1, 4), target.report()
    target.raw(framed.pool, [5, wide, 6], [0, 3], [0], report=report)
    assert framed.rows() == [[5, -1, 6, -7]]
    assert report.counts() == counts(token=1)
    offender = report.first()
    assert offender is not None
    assert (offender.kind, offender.request, offender.position, offender.value) == ("token", 0, 1, wide)
    if wide > 0:
        framed = target.framed(1, 4)
        batch = target.batch([[5, wide, 6]], [0], wide_tokens="opaque")
        target.scatter(batch, framed.pool)
        assert framed.rows() == [[5, -1, 6, -7]]
        assert batch.token_ids.tolist() == [5, wide, 6]
        assert batch.num_wide_tokens == 1


@pytest.mark.parametrize("token", [-1, -(2**31), 2**31 - 1, 0])
def test_a_token_that_fits_int32_is_stored_as_it_is(target: Any, counts: Any, token: int) -> None:
    framed, report = target.framed(1, 2), target.report()
    target.raw(framed.pool, [token], [0, 1], [0], report=report)
    assert framed.rows() == [[token, -7]]
    assert report.counts() == counts()


def test_every_wide_token_is_counted_once_whatever_its_block(target: Any, counts: Any) -> None:
    wide_at = [0, 1, 7, 8, 9, 40, 41, 58]
    token_ids = [2**33 + t if t in wide_at else t for t in range(59)]
    offsets, rows = [0, 20, 20, 41, 59], [3, 2, 1, 0]
    sequences = [token_ids[start:end] for start, end in itertools.pairwise(offsets)]
    for by_batch in (False, True):
        framed, report = target.framed(4, 21), target.report()
        if by_batch:
            target.scatter(target.batch(sequences, rows, wide_tokens="opaque"), framed.pool, report)
        else:
            target.raw(framed.pool, token_ids, offsets, rows, report=report)
        assert report.counts() == counts(token=len(wide_at))
        assert framed.rows()[0][:18] == [-1 if t in wide_at else t for t in range(41, 59)]
        framed.assert_border_intact()


# Tokens that came in on the device are unseen by the host; the guards see them.
def test_tokens_that_came_in_on_the_device_are_the_guards_to_check(target: Any, counts: Any) -> None:
    tokens = target.ints([5, 2**40, 6])
    batch = RaggedBatch.from_lengths(
        tokens, [2, 1], req_pool_indices=[1, 0], device=target.device, wide_tokens="opaque"
    )
    tokens.fill_(0)  # the batch owns its data
    framed, report = target.framed(2, 3), target.report()
    target.scatter(batch, framed.pool, report)
    assert framed.rows() == [[6, -7, -7], [5, -1, -7]]
    assert report.counts() == counts(token=1)


# Case 46: under the interpreter an `np.int64` argument fails, and a list is no grid.
def test_only_python_integers_reach_a_kernel(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if target.backend != "triton":
        pytest.skip("launches no kernel")
    from kv_canary import launching

    seen: list[Any] = []
    launch = launching.launch

    def spy(*arguments: Any, **more: Any) -> None:
        seen.extend(arguments)
        seen.extend(more.values())
        launch(*arguments, **more)

    monkeypatch.setattr(launching, "launch", spy)
    framed = target.framed(3, 40)
    lengths = np.array([1, 20, 2])
    batch = RaggedBatch.from_lengths(
        np.arange(23), lengths, req_pool_indices=np.array([2, 1, 0]), prefix_lens=lengths, device=target.device
    )
    target.scatter(batch, framed.pool, target.report())
    target.raw(framed.pool, np.arange(23), np.array([0, 1, 21, 23]), np.array([2, 1, 0]))
    numbers = [n for value in seen for n in (value if isinstance(value, tuple) else [value]) if not callable(n)]
    assert len(numbers) > 20
    assert {type(n) for n in numbers} <= {int, bool, torch.device, type(None)}


# Case 60.
@pytest.mark.parametrize("inference", [False, True], ids=["eager", "inference_mode"])
def test_a_report_changes_no_cell(target: Any, inference: bool) -> None:
    cells = []
    with torch.inference_mode(inference):
        batch = target.batch([[1, 2], [], [3]], [2, 1, 0], prefix_lens=[1, 0, 0])
        for more in ({}, {"report": None}, {"report": target.report()}):
            framed = target.framed(3, 4)
            with target.tiles():
                scatter(batch, framed.pool, backend=target.backend, **more)
            cells.append(framed.rows())
    assert cells[0] == cells[1] == cells[2] == [[3, -7, -7, -7], [-7] * 4, [-7, 1, 2, -7]]


# Case 64: every factory call names its device and dtype.
@pytest.mark.parametrize("default", ["meta", "cuda"])
def test_defaults_of_the_process_change_nothing(target: Any, counts: Any, default: str) -> None:
    if default == "cuda" and not torch.cuda.is_available():
        pytest.skip("gpu: torch sees no CUDA device")
    framed = target.framed(3, 4)
    dtype = torch.get_default_dtype()
    torch.set_default_device(default)
    torch.set_default_dtype(torch.float64)
    try:
        builder = RaggedBatchBuilder(device=target.device)
        with target.tiles():
            builder.extend([2, 0], [[1, 2], [3]], prefix_lens=[1, 0])
            batch = builder.build()
            batch = RaggedBatch.concat([batch.select([1]), batch.select([0])])
        report = GuardReport.allocate(target.device)
        target.scatter(batch, framed.pool, report)
        columns = {"flat_in": batch.token_ids, "offsets": batch.offsets, "req_pool_indices": batch.req_pool_indices}
        target.launch(**columns, prefix_lens=batch.prefix_lens, pool_out=framed.pool, report=report)
        target.launch(**columns, prefix_lens=batch.prefix_lens, pool_out=framed.pool, mode="coerce")
        assert report.counts() == counts()
        assert report.first() is None
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(dtype)
    assert framed.rows() == [[3, -7, -7, -7], [-7] * 4, [-7, 1, 2, -7]]
    framed.assert_border_intact()


# Case 65: a pool made in one mode and written in the other, by both entries.
@pytest.mark.parametrize("made_inside", [True, False])
@pytest.mark.parametrize("written_inside", [True, False])
def test_pools_and_batches_work_across_inference_mode(target: Any, made_inside: bool, written_inside: bool) -> None:
    with torch.inference_mode(made_inside):
        builder = RaggedBatchBuilder(device=target.device)
        builder.add(0, [9])
        builder.build()
        framed, report = target.framed(2, 3), target.report()
    with torch.inference_mode(written_inside):
        builder.add(1, [4, 5])
        with target.tiles():
            batch = builder.build()
        target.scatter(batch, framed.pool, report)
        target.raw(framed.pool, [6, 2**40], [0, 2], [0], report=report)
        report.clear()
    builder.add(0, [7], prefix_len=2)
    with target.tiles():
        batch = builder.build()
    target.scatter(batch, framed.pool, report)
    assert framed.rows() == [[6, -1, 7], [4, 5, -7]]
    assert report.first() is None


# Case 66.
def test_deterministic_algorithms_change_no_cell(target: Any, oracle: Any) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        _assert_scattered(target, oracle, [3, 0, 9, 1])
        columns = {"flat_in": [1, 2**40, 3], "offsets": [0, 2, 3], "req_pool_indices": [0, 5]}
        framed, report = target.framed(2, 3), target.report()
        target.raw(framed.pool, *columns.values(), report=report)
        twin, expected = oracle(columns, framed)
        assert torch.equal(framed.whole.cpu(), twin)
        assert report.counts() == expected
    finally:
        torch.use_deterministic_algorithms(False)


# Case 68.
def test_two_spellings_of_one_device_are_the_same_device(target: Any) -> None:
    index = torch.cuda.current_device() if target.device == "cuda" else 0
    spelled = f"{target.device}:{index}"
    builder = RaggedBatchBuilder(device=spelled, mode="coerce")
    builder.add(1, target.ints([4, 5]).to(spelled))
    with target.tiles():
        batch = builder.build()
    framed, report = target.framed(2, 3), GuardReport.allocate(spelled)
    target.scatter(batch, framed.pool, report)
    assert framed.rows() == [[-7] * 3, [4, 5, -7]]
    assert batch.coercions == ()


# Case 38, for the backend that needs no device.
def test_threads_with_their_own_batches_do_not_disturb_each_other(shipped: Any) -> None:
    wrong: list[str] = []

    def work(number: int) -> None:
        builder = RaggedBatchBuilder(pool_shape=(8, 64))
        framed, report = shipped.framed(8, 64), shipped.report()
        for step in range(50):
            row, token = (number + step) % 8, 1000 * number + step
            builder.add(row, [token] * 3, prefix_len=step)
            shipped.scatter(builder.build(), framed.pool, report)
            if framed.pool[row, step : step + 3].tolist() != [token] * 3:
                wrong.append(f"thread {number} step {step}")
        report.raise_if_any()
        framed.assert_border_intact()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# Case 4, without the memory: a table of more than 2^31 cells in a sparse file, of which a few are touched.
def test_cells_beyond_2_31_are_addressed_right_on_the_cpu(tmp_path: Path, shipped: Any, counts: Any) -> None:
    row_stride = 2**30 + 8
    cells = 2 * row_stride + 64
    memory = torch.from_file(str(tmp_path / "pool"), shared=True, size=cells, dtype=torch.int32)
    pool = memory.as_strided((3, 8), (row_stride, 1))
    report = shipped.report()
    shipped.raw(pool, [1, 2, 3, 2**40], [0, 1, 4], [0, 2], prefix_lens=[0, 5], report=report)
    assert pool.tolist() == [[1] + [0] * 7, [0] * 8, [0] * 5 + [2, 3, -1]]
    assert int(memory[2 * row_stride + 8 :].abs().sum()) == 0
    assert report.counts() == counts(token=1)
