"""ViolationLog: what the ring keeps, what it counts, whom it names, and when it gives what."""

from typing import Any

import pytest
import torch

from kv_canary import CanaryViolation, ViolationLog, backends, kinds
from kv_canary.snapshot import KEPT_LAUNCHES
from kv_canary.violations import TOKENS, Violation


def find(target: Any, log: ViolationLog[Any], number: int, req_id: object = None) -> None:
    """One launch that finds ``number`` wrong cells: the pool holds 0, the scheduler says 1, 2, 3."""
    batch = target.batch([range(1, number + 1)], [1], req_ids=None if req_id is None else [req_id])
    pool = torch.zeros((2, 16), dtype=torch.int32, device=target.device)
    with target.tiles():
        backend = backends.resolve(target.backend, pool.device)
        launch = log.begin(batch.layout.req_ids, number)
        backend.verify_batch(batch, pool, target.ints([0, number]), log.table, launch, True)


def columns(violations: list[Any]) -> list[int]:
    return sorted(violation.column for violation in violations)


# Case 47.
def test_a_new_log_over_old_memory_is_clean(target: Any) -> None:
    dirty = torch.full((4096,), -1, dtype=torch.int64, device=target.device)
    del dirty
    log = ViolationLog.allocate(target.device)
    assert (log.poll(), log.drain(), log.found, log.lost, log.compared()) == ([], [], 0, 0, 0)
    log.raise_if_any()
    assert log.capacity == 256 and log.device.type == target.device


def test_its_price_can_be_asked_beforehand() -> None:
    log = ViolationLog.allocate("cpu", capacity=5)
    assert ViolationLog.allocation_bytes(5) == log.table.nbytes == 8 * 6 * kinds.VIOLATION_COLUMNS


# Case 62: 10 at once, 3 + 3 + 3, exactly 4.
@pytest.mark.parametrize(
    ("launches", "lost"),
    [([10], 6), ([3, 3, 3], 5), ([4], 0)],
    ids=["ten_at_once", "three_times_three", "exactly_full"],
)
def test_a_ring_of_four_keeps_the_first_and_counts_all(target: Any, launches: list[int], lost: int) -> None:
    log = ViolationLog.allocate(target.device, capacity=4)
    for number in launches:
        find(target, log, number)
    given = log.drain()
    assert (log.found, log.lost, len(given)) == (sum(launches), lost, 4)
    assert all((v.kind, v.row, v.found) == ("token", 1, 0) and v.expected == v.column + 1 for v in given)
    assert log.drain() == []
    assert log.compared() == sum(launches)


HEADERS = [(-5, 0), (-(2**63), 2), (2**63 - 1, 2**62), (3, 2**63 - 1), (3, -(2**63)), (-1, -1)]
"""What may stand where a log counts: found, freed."""


@pytest.mark.parametrize(("found", "freed"), HEADERS)
def test_a_header_that_was_overwritten_leads_nowhere_outside_the_ring(target: Any, found: int, freed: int) -> None:
    memory = torch.full((3 + 1 + 4 + 3, kinds.VIOLATION_COLUMNS), -9, dtype=torch.int64, device=target.device)
    log = ViolationLog(memory[3:-3].zero_(), TOKENS)
    log.table[0, kinds.FOUND_COUNT], log.table[0, kinds.FREED] = found, freed
    header = log.table[0, kinds.NOT_COMPARED + 1 :].clone()
    find(target, log, 10)
    assert bool((memory[:3] == -9).all()) and bool((memory[-3:] == -9).all())
    assert torch.equal(log.table[0, kinds.NOT_COMPARED + 1 :], header)


def test_what_is_read_frees_its_place_and_is_given_once(target: Any) -> None:
    log = ViolationLog.allocate(target.device, capacity=4)
    for _ in range(5):
        find(target, log, 3)
        assert columns(log.drain()) == [0, 1, 2]
        assert log.drain() == []
    assert (log.found, log.lost) == (15, 0)
    find(target, log, 6)
    assert len(log.drain()) == 4
    find(target, log, 2)
    assert columns(log.drain()) == [0, 1]
    assert (log.found, log.lost) == (23, 2)


def test_what_was_lost_between_two_polls_is_not_mistaken_for_what_came_before(target: Any) -> None:
    # As on a device: the table of two launches arrives, and the free is still on its way when a third runs.
    log = ViolationLog.allocate(target.device, capacity=4)
    find(target, log, 3)
    early = log.table.clone().cpu().numpy()
    find(target, log, 3)
    assert columns(log._take(early)) == [0, 1, 2]
    assert len(log.drain()) == 1
    assert (log.found, log.lost) == (6, 2)


def test_poll_gives_what_drain_has_not(target: Any) -> None:
    log = ViolationLog.allocate(target.device)
    find(target, log, 2)
    given = log.poll()
    if target.device == "cuda":
        assert given == []  # asked for just now
        torch.cuda.synchronize()
        given = log.poll()
    assert columns(given) == [0, 1]
    assert log.drain() == log.poll() == []


def test_an_error_names_the_first_ones_and_reads_nothing_away(target: Any) -> None:
    log = ViolationLog.allocate(target.device)
    find(target, log, 1, "chat-7")
    find(target, log, 4)
    with pytest.raises(CanaryViolation) as caught:
        log.raise_if_any()
    error = caught.value
    assert str(error).startswith(
        "kv-canary: 5 violations: token at request 0 (id 'chat-7'), row 1, column 0: expected 1, found 0; token at "
        "request 0, row 1, column "
    )
    assert str(error).endswith("; 2 more")
    assert (error.request, error.req_id, len(error.violations)) == (0, "chat-7", 3)
    assert error.violations[0] == Violation("token", 0, "chat-7", 1, 0, 1, 0)
    assert len(log.drain()) == 5
    with pytest.raises(CanaryViolation, match=r"^kv-canary: 5 violations: token at request 0 \(id 'chat-7'\)"):
        log.raise_if_any()


def test_clear_makes_it_new(target: Any) -> None:
    log = ViolationLog.allocate(target.device, capacity=2)
    find(target, log, 5)
    log.poll()
    log.clear()
    assert (log.poll(), log.drain(), log.found, log.lost, log.compared()) == ([], [], 0, 0, 0)
    log.raise_if_any()
    find(target, log, 2)
    assert columns(log.drain()) == [0, 1]


def test_a_launch_too_long_ago_has_no_names(shipped: Any) -> None:
    log = ViolationLog.allocate("cpu")
    find(shipped, log, 1, "old")
    for _ in range(KEPT_LAUNCHES):
        log.begin(("new",), 0)
    [violation] = log.drain()
    assert (violation.request, violation.req_id) == (0, None)
