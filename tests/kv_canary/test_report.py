"""GuardReport: what it counts, whom it names, what it says, and for how long it remembers."""

import pickle
import re
from typing import Any

import pytest
import torch

from kv_canary import GuardReport, GuardViolation, Offender, kinds
from kv_canary.snapshot import KEPT_LAUNCHES
from ragged import RaggedBatch, RaggedError, RaggedTypeError

FOUND = "(found by the device guards, nothing wrong was written; in all: "


def _broken_batch(target: Any, row: int, req_id: object = None) -> RaggedBatch:
    """Two requests; the row of the second was overwritten on the device."""
    batch: RaggedBatch = target.batch([[5], [6, 7]], [0, 1], req_ids=["good", req_id] if req_id else None)
    batch.req_pool_indices[1] = row
    return batch


# Case 47: a report that was allocated over old memory starts at 0.
def test_a_new_report_is_clean(target: Any, counts: Any) -> None:
    dirty = torch.full((4096,), -1, dtype=torch.int64, device=target.device)
    del dirty
    report = target.report()
    assert report.counts() == counts()
    assert report.first() is None
    assert report.coercions == []
    report.raise_if_any()


def test_its_price_can_be_asked_beforehand() -> None:
    report = GuardReport.allocate("cpu")
    assert GuardReport.allocation_bytes() == report.table.nbytes == 8 * 5 * 5
    assert report.table.shape == (len(kinds.GUARDS), kinds.REPORT_COLUMNS)
    assert report.device == torch.device("cpu")


@pytest.mark.parametrize(
    ("columns", "expected", "message"),
    [
        pytest.param(
            {"offsets": [0, 2, 1]},
            Offender(
                kind="offsets",
                request=1,
                req_id=None,
                position=2,
                value=1,
                launch=1,
                message="offsets must start at 0, not decrease, and end within 3 tokens, got 2, 1",
            ),
            f"{FOUND}1 offsets)",
            id="offsets",
        ),
        pytest.param(
            {"rows": [0, 4]},
            Offender(
                kind="row",
                request=1,
                req_id=None,
                position=0,
                value=4,
                launch=1,
                message="req_pool_indices must be in [0, 4), got 4",
            ),
            f"{FOUND}1 row)",
            id="row",
        ),
        pytest.param(
            {"prefix_lens": [0, -3]},
            Offender(
                kind="prefix",
                request=1,
                req_id=None,
                position=0,
                value=-3,
                launch=1,
                message="prefix_lens must be in [0, 5], got -3",
            ),
            f"{FOUND}1 prefix)",
            id="prefix",
        ),
        pytest.param(
            {"token_ids": [1, 2**40, -(2**31) - 1], "offsets": [0, 0, 2]},
            Offender(
                kind="token",
                request=1,
                req_id=None,
                position=1,
                value=2**40,
                launch=1,
                message=f"flat_in must fit int32, got {2**40} at position 1",
            ),
            f"{FOUND}1 token)",
            id="token_and_a_spare_one_that_is_nobodys",
        ),
    ],
)
def test_an_offender_is_named_with_its_parts(
    target: Any, columns: dict[str, list[int]], expected: Offender, message: str
) -> None:
    given = {"token_ids": [1, 2, 3], "offsets": [0, 2, 3], "rows": [0, 1], "prefix_lens": [0, 0]} | columns
    framed, report = target.framed(4, 5), target.report()
    target.raw(framed.pool, **given, report=report)
    assert report.first() == expected
    with pytest.raises(GuardViolation) as caught:
        report.raise_if_any()
    error = caught.value
    assert isinstance(error, RaggedError)
    assert str(error) == f"kv-canary: scatter_req_token_ids {expected.message} at request 1 {message}"
    assert (error.argument, error.request, error.req_id, error.got) == (expected.argument, 1, None, expected.value)
    assert error.offender == expected


def test_a_token_that_no_request_owns_is_said_to_be_nobodys(target: Any) -> None:
    framed, report = target.framed(4, 5), target.report()
    target.raw(framed.pool, [1, 2, 2**31, 4], [0, 1, -2, 4], [0, 1, 2], report=report)
    offender = report.first()
    assert report.counts()["token"] == 1
    assert offender is not None and offender.kind == "offsets"
    with pytest.raises(GuardViolation, match=re.escape("in all: 2 offsets, 1 token")):
        report.raise_if_any()
    nobody = Offender("token", -1, None, 2, 2**31, 1, "flat_in must fit int32")
    assert nobody.whose == "no request"


def test_dropped_tokens_are_counted_and_are_no_fault(target: Any, counts: Any) -> None:
    framed, report = target.framed(2, 4), target.report()
    target.raw(framed.pool, list(range(9)), [0, 6, 9], [0, 1], prefix_lens=[0, 4], report=report)
    assert report.counts() == counts(dropped=5)
    assert report.first() is None
    report.raise_if_any()


def test_counts_add_up_over_launches_and_the_first_offender_stays(target: Any, counts: Any) -> None:
    framed, report = target.framed(2, 4), target.report()
    for launch in range(1, 4):
        target.raw(framed.pool, [1, 2], [0, 1, 2], [launch + 5, -launch], report=report)
    assert report.counts() == counts(row=6)
    offender = report.first()
    assert offender is not None
    assert (offender.launch, offender.value) in ((1, 6), (1, -1))  # both were of the first launch
    assert offender.value == [6, -1][offender.request]


def test_the_first_offender_is_of_the_earliest_launch_whatever_its_kind(target: Any) -> None:
    framed, report = target.framed(2, 4), target.report()
    target.raw(framed.pool, [1], [0, 1], [0], report=report)
    target.raw(framed.pool, [1], [0, 1], [0], prefix_lens=[9], report=report)
    target.raw(framed.pool, [1], [0, 1], [7], report=report)
    target.raw(framed.pool, [1], [0, 5], [1], report=report)
    offender = report.first()
    assert offender is not None
    assert (offender.kind, offender.launch, offender.value) == ("prefix", 2, 9)


# Case 53: it is read only after other batches have been built, and scattered, with the same report.
def test_an_offender_has_the_id_and_the_bounds_of_its_own_batch(target: Any) -> None:
    report, framed = target.report(), target.framed(3, 4)
    batch = target.batch([[1], [2], [3]], [0, 1, 2], req_ids=["a", "b", "c"])
    batch.req_pool_indices[2] = 3
    target.scatter(batch, framed.pool, report)
    later, wider = target.batch([[4]] * 5, [0, 1, 2, 3, 4], req_ids="vwxyz"), target.framed(8, 8)
    target.scatter(later, wider.pool, report)
    offender = report.first()
    assert offender is not None
    assert (offender.request, offender.req_id, offender.value, offender.launch) == (2, "c", 3, 1)
    assert offender.whose == "request 2 (id 'c')"
    with pytest.raises(GuardViolation) as caught:
        report.raise_if_any()
    assert str(caught.value) == (
        "kv-canary: scatter_req_token_ids req_pool_indices must be in [0, 3), got 3 at request 2 (id 'c') "
        f"{FOUND}1 row)"
    )
    assert caught.value.req_id == "c"


# Case 53: ids, rows and prefixes move together.
def test_a_selected_batch_names_its_own_requests(target: Any) -> None:
    report, framed = target.report(), target.framed(4, 4)
    batch = target.batch([[1], [2], [3]], [0, 1, 2], prefix_lens=[0, 1, 2], req_ids=["a", "b", "c"])
    with target.tiles():
        selected = batch.select([2, 0])
    selected.req_pool_indices[0] = -1
    target.scatter(selected, framed.pool, report)
    offender = report.first()
    assert offender is not None
    assert (offender.request, offender.req_id) == (0, "c")
    assert framed.rows()[0] == [1, -7, -7, -7]


def test_a_report_remembers_the_ids_of_many_launches(shipped: Any) -> None:
    report, framed = shipped.report(), shipped.framed(2, 2)
    shipped.scatter(_broken_batch(shipped, 9, "lost"), framed.pool, report)
    sound = shipped.batch([[5]], [0])
    for _ in range(KEPT_LAUNCHES - 1):
        shipped.scatter(sound, framed.pool, report)
    offender = report.first()
    assert offender is not None and offender.req_id == "lost"
    assert offender.message == "req_pool_indices must be in [0, 2), got 9"


def test_beyond_what_it_remembers_a_report_still_names_request_and_value(shipped: Any) -> None:
    report, framed = shipped.report(), shipped.framed(2, 2)
    shipped.scatter(_broken_batch(shipped, 9, "lost"), framed.pool, report)
    other = shipped.batch([[5], [6]], [0, 1], req_ids=["x", "y"])
    for _ in range(KEPT_LAUNCHES + 3):
        shipped.scatter(other, framed.pool, report)
    offender = report.first()
    assert offender is not None
    assert (offender.request, offender.req_id, offender.value, offender.launch) == (1, None, 9, 1)
    assert offender.message == "req_pool_indices must be in [0, ?), got 9"
    with pytest.raises(GuardViolation, match=re.escape("in [0, ?), got 9 at request 1 (found")):
        report.raise_if_any()


# Case 20, on the CPU: counts are those of now, and a cleared report stays clear.
def test_poll_on_the_cpu_is_up_to_date(shipped: Any, counts: Any) -> None:
    report, framed = shipped.report(), shipped.framed(2, 2)
    assert report.poll() == counts()
    shipped.scatter(_broken_batch(shipped, 9), framed.pool, report)
    assert report.poll() == counts(row=1)
    report.clear()
    assert report.poll() == counts()


def test_a_cleared_report_starts_anew(target: Any, counts: Any) -> None:
    report, framed = target.report(), target.framed(4, 5)
    target.scatter(_broken_batch(target, 9, "old"), framed.pool, report)
    target.raw(framed.pool, [1], [0, 1], [0], mode="coerce", report=report)
    report.clear()
    assert report.counts() == counts()
    assert report.first() is None
    report.raise_if_any()
    target.scatter(_broken_batch(target, 8, "new"), framed.pool, report)
    assert report.counts() == counts(row=1)
    offender = report.first()
    assert offender is not None
    assert (offender.req_id, offender.value) == ("new", 8)


def test_clearing_forgets_the_coercions(shipped: Any) -> None:
    report, framed = shipped.report(), shipped.framed(4, 5)
    narrow = torch.tensor([1], dtype=torch.int32)
    columns = {"flat_in": narrow, "offsets": torch.tensor([0, 1]), "req_pool_indices": torch.tensor([0])}
    shipped.launch(**columns, pool_out=framed.pool, mode="coerce", report=report)
    assert len(report.coercions) == 1
    report.clear()
    assert report.coercions == []


# Case 65.
@pytest.mark.parametrize("first_inside", [True, False])
def test_a_report_made_in_inference_mode_works_outside_and_the_other_way_round(
    target: Any, counts: Any, first_inside: bool
) -> None:
    with torch.inference_mode(first_inside):
        report, framed = target.report(), target.framed(2, 2)
        target.raw(framed.pool, [1], [0, 1], [9], report=report)
    with torch.inference_mode(not first_inside):
        target.raw(framed.pool, [1], [0, 1], [8], report=report)
        assert report.counts() == counts(row=2)
        report.clear()
        target.raw(framed.pool, [1], [0, 1], [1], report=report)
    assert report.counts() == counts()
    assert framed.rows() == [[-7, -7], [1, -7]]


# Case 69.
def test_reports_compare_by_identity_and_offenders_by_value() -> None:
    report, other = GuardReport.allocate("cpu"), GuardReport.allocate("cpu")
    assert report == report and report != other and report != None  # noqa: E711 - that comparison is the test
    assert report in [other, report]
    assert {report: 1}[report] == 1
    offender = Offender("row", 1, "a", 0, 9, 1, "no")
    assert offender == Offender("row", 1, "a", 0, 9, 1, "no") != Offender("row", 1, "a", 0, 8, 1, "no")


def test_a_violation_survives_pickling_with_its_parts(shipped: Any) -> None:
    report, framed = shipped.report(), shipped.framed(2, 2)
    shipped.scatter(_broken_batch(shipped, 9, "b"), framed.pool, report)
    with pytest.raises(GuardViolation) as caught:
        report.raise_if_any()
    copied = pickle.loads(pickle.dumps(caught.value))
    assert str(copied) == str(caught.value)
    assert copied.offender == caught.value.offender
    assert (copied.request, copied.req_id, copied.got) == (1, "b", 9)


@pytest.mark.parametrize("device", ["nowhere", 3.5, None])
def test_a_device_that_is_none_is_refused_by_name(refused: Any, device: Any) -> None:
    with refused(RaggedTypeError, f"device must name a device, got {device!r}", argument="device", got=device):
        GuardReport.allocate(device)


@pytest.mark.parametrize(
    ("table", "got"),
    [
        (torch.zeros(5, 5), "torch.float32 (5, 5)"),
        (torch.zeros(5, 5, dtype=torch.int32), "torch.int32 (5, 5)"),
        (torch.zeros(4, 5, dtype=torch.int64), "torch.int64 (4, 5)"),
        (torch.zeros(25, dtype=torch.int64), "torch.int64 (25,)"),
        (torch.zeros(5, 5, dtype=torch.int64).t(), "strides (1, 5)"),
        (torch.zeros(1, 5, dtype=torch.int64).expand(5, 5), "strides (0, 1)"),
        (torch.zeros(5, 5, dtype=torch.int64).to_sparse(), "Tensor"),
        ([[0] * 5] * 5, "list"),
        (None, "NoneType"),
    ],
    ids=["float32", "int32", "one_kind_short", "flat", "transposed", "expanded", "sparse", "a_list", "none"],
)
def test_a_table_that_a_kernel_would_leave_is_refused(refused: Any, table: Any, got: str) -> None:
    # Kernels write to it by address: a smaller one would be left.
    text = f"table must be a contiguous int64 tensor of shape (5, 5), got {got}"
    with refused(RaggedTypeError, text, argument="table", got=got, bound=(5, 5)):
        GuardReport(table)


def _slow(milliseconds: int) -> None:
    """Keep the device busy for about so long (at 2 GHz), so that the host runs ahead."""
    torch.cuda._sleep(2_000_000 * milliseconds)


# Case 20.
@pytest.mark.gpu
@pytest.mark.heavy  # a sanitizer's own slowness would outlast the busy device
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_poll_never_waits_and_never_shows_what_is_not_there(backend: str, counts: Any) -> None:
    from kv_canary import scatter

    batch = RaggedBatch.from_sequences([[5], [6]], req_pool_indices=[0, 1], device="cuda")
    batch.req_pool_indices[1] = 9
    pool = torch.zeros(2, 2, dtype=torch.int32, device="cuda")
    scatter(batch, pool, report=GuardReport.allocate("cuda"), backend=backend)  # compiled and warm
    report = GuardReport.allocate("cuda")
    assert report.poll() is None  # asks
    torch.cuda.synchronize()
    assert report.poll() == counts()  # and has it
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    if backend == "triton":  # the torch backend syncs
        _slow(300)
    scatter(batch, pool, report=report, backend=backend)
    done.record()
    if backend == "triton":
        for _ in range(3):
            assert report.poll() == counts()  # asked for before, or nothing new yet
        assert not done.query(), "poll waited for the device"
    torch.cuda.synchronize()
    report.poll()
    torch.cuda.synchronize()
    assert report.poll() == counts(row=1)
    _slow(100)
    report.clear()
    assert report.poll() is None
    torch.cuda.synchronize()
    assert report.poll() == counts()
    torch.cuda.synchronize()
    assert report.poll() == counts()
    assert report.counts() == counts()


# Case 20: a request for counts that is under way when the report is cleared brings nothing back.
@pytest.mark.gpu
def test_counts_under_way_when_a_report_is_cleared_do_not_come_back(counts: Any) -> None:
    from kv_canary import scatter

    batch = RaggedBatch.from_sequences([[5]], req_pool_indices=[1], device="cuda")
    batch.req_pool_indices[0] = 9
    pool, report = torch.zeros(2, 2, dtype=torch.int32, device="cuda"), GuardReport.allocate("cuda")
    scatter(batch, pool, report=report)
    torch.cuda.synchronize()
    _slow(100)
    assert report.poll() is None  # a copy of the old counts waits behind the slow kernel
    report.clear()
    for _ in range(3):
        polled = report.poll()
        assert polled is None or polled == counts()
        torch.cuda.synchronize()
    assert report.poll() == counts()
