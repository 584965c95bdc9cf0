"""The heart: whatever the metadata says, nothing outside the pool changes, and the report names what was wrong."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import RawScatter, corrupted_scatters, models, raw_scatters

from ragged import RaggedBatch

INT64_MAX = 2**63 - 1
SOUND_ROW = 1


def _launch(target: Any, raw: RawScatter, row_step: int, shift: int, with_report: bool) -> tuple[Any, Any]:
    """Launch with inputs whose memory goes on with legal-looking numbers, into a framed pool."""
    framed = target.framed(raw.max_reqs, raw.max_context_len, row_step)
    report = target.report() if with_report else None
    target.launch(
        flat_in=target.buried(raw.flat_in, 5, before=shift),
        offsets=target.buried(raw.offsets, len(raw.flat_in), before=shift),
        req_pool_indices=target.buried(raw.req_pool_indices, 0, before=shift),
        prefix_lens=target.buried(raw.prefix_lens, 0, before=shift),
        pool_out=framed.pool,
        report=report,
    )
    return framed, report


def _assert_equals_reference(raw: RawScatter, framed: Any, report: Any, oracle: Any) -> None:
    framed.assert_border_intact()
    twin, expected = oracle(raw.columns, framed)
    # No cell of a row that two requests claim is specified; compare all others.
    row_step = framed.pool.stride(0) // framed.whole.stride(0)
    skipped = [(3 + row) * row_step for row in raw.shared_rows if 0 <= row < raw.max_reqs]
    whole = framed.whole.cpu()
    whole[skipped], twin[skipped] = 0, 0
    assert torch.equal(whole, twin), f"{whole}\n{twin}"
    if report is not None:
        assert report.counts() == expected
        found, offender = any(expected[kind] for kind in ("offsets", "row", "prefix", "token")), report.first()
        assert (offender is not None) == found
        if offender is not None:
            assert offender.request in raw.corrupted, f"{offender} of {raw.corrupted}"


# Cases 4, 9, 11, 30, 41: any numbers at all, any row stride, any alignment.
@given(raw=corrupted_scatters(), row_step=st.sampled_from([1, 2]), shift=st.integers(0, 3), with_report=st.booleans())
def test_corrupted_metadata_never_writes_outside_and_is_named(
    target: Any, oracle: Any, raw: RawScatter, row_step: int, shift: int, with_report: bool
) -> None:
    framed, report = _launch(target, raw, row_step, shift, with_report)
    _assert_equals_reference(raw, framed, report, oracle)


@given(raw=raw_scatters(), row_step=st.sampled_from([1, 2]), shift=st.integers(0, 3), with_report=st.booleans())
def test_sound_metadata_writes_exactly_its_cells_and_reports_no_fault(
    target: Any, oracle: Any, raw: RawScatter, row_step: int, shift: int, with_report: bool
) -> None:
    framed, report = _launch(target, raw, row_step, shift, with_report)
    _assert_equals_reference(raw, framed, report, oracle)
    if report is not None:
        report.raise_if_any()


@given(model=models(max_reqs=12, max_len=9, max_row=11, max_prefix_len=8), wide=st.booleans())
def test_a_batch_writes_exactly_its_cells_and_truncates_at_the_edge(
    target: Any, oracle: Any, model: Any, wide: bool
) -> None:
    sequences = [list(tokens) for tokens in model.sequences]
    for tokens in sequences if wide else []:
        tokens[-1:] = [2**61 + 5 for _ in tokens[-1:]]
    options = {"prefix_lens": model.prefix_lens, "overflow": "truncate", "wide_tokens": "opaque"}
    batch = target.batch(sequences, model.rows, **options)
    framed, report = target.framed(12, 8), target.report()
    target.scatter(batch, framed.pool, report)
    columns = {
        "flat_in": [token for tokens in sequences for token in tokens],
        "offsets": model.offsets,
        "req_pool_indices": model.rows,
        "prefix_lens": model.prefix_lens,
    }
    twin, expected = oracle(columns, framed)
    assert torch.equal(framed.whole.cpu(), twin)
    assert report.counts() == expected


@given(
    model=models(max_reqs=9, max_len=9, max_row=8, max_prefix_len=8),
    part=st.sampled_from(["req_pool_indices", "prefix_lens", "offsets"]),
    data=st.data(),
)
def test_a_batch_whose_device_memory_was_overwritten_stays_inside(
    target: Any, model: Any, part: str, data: st.DataObject
) -> None:
    batch = target.batch(model.sequences, model.rows, prefix_lens=model.prefix_lens, overflow="truncate")
    column: torch.Tensor = getattr(batch, part)
    values = st.sampled_from([-1, 9, 17, 2**31, 2**32, 2**62, INT64_MAX, -(2**63)]) | st.integers(0, 20)
    for at in range(column.shape[0]):
        if data.draw(st.booleans()):
            column[at] = data.draw(values)
    framed, report = target.framed(9, 8), target.report()
    target.scatter(batch, framed.pool, report)
    framed.assert_border_intact()
    # The host knew which requests are empty, so a kernel may leave those out: they write nothing.
    wrong_rows = [model.lengths[r] > 0 for r, row in enumerate(batch.req_pool_indices.tolist()) if not 0 <= row < 9]
    assert sum(wrong_rows) <= report.counts()["row"] <= len(wrong_rows)
    wrong_prefixes = [
        model.lengths[r] > 0 for r, prefix in enumerate(batch.prefix_lens.tolist()) if not 0 <= prefix <= 8
    ]
    assert sum(wrong_prefixes) <= report.counts()["prefix"] <= len(wrong_prefixes)


# Cases 9, 11, 30: in torch `pool[-1]` is legal, and 2^32 + 1 is 1 in 32 bits.
@pytest.mark.parametrize("row", [4, 5, -1, -2, 2**31, 2**32, 2**32 + 1, 2**40, INT64_MAX, -(2**63)])
def test_a_wrong_row_is_skipped_never_clamped_wrapped_or_redirected(target: Any, counts: Any, row: int) -> None:
    framed, report = target.framed(4, 5), target.report()
    target.raw(framed.pool, [10, 11, 12, 20, 21], [0, 3, 5], [row, 2], report=report)
    framed.assert_border_intact()
    assert framed.rows() == [[-7] * 5, [-7] * 5, [20, 21, -7, -7, -7], [-7] * 5]
    assert report.counts() == counts(row=1)
    offender = report.first()
    assert offender is not None
    assert (offender.kind, offender.request, offender.value) == ("row", 0, row)


# Case 43: a prefix beyond the row is corrupt, not long; one at its end leaves no room and is sound.
@pytest.mark.parametrize("prefix_len", [17, 2**31, 2**32, 2**62, INT64_MAX, -1, -(2**62), -(2**63)])
@pytest.mark.parametrize("length", [0, 2])
def test_a_wrong_prefix_is_contained_and_reported(target: Any, counts: Any, prefix_len: int, length: int) -> None:
    framed, report = target.framed(4, 16), target.report()
    token_ids = [*range(10, 10 + length), 20]
    target.raw(framed.pool, token_ids, [0, length, length + 1], [1, 3], prefix_lens=[prefix_len, 15], report=report)
    framed.assert_border_intact()
    assert framed.rows() == [[-7] * 16, [-7] * 16, [-7] * 16, [-7] * 15 + [20]]
    assert report.counts() == counts(prefix=1)
    offender = report.first()
    assert offender is not None
    assert (offender.kind, offender.request, offender.value) == ("prefix", 0, prefix_len)


# Case 28, and every other way in which offsets can be wrong.
@pytest.mark.parametrize(
    ("offsets", "wrong"),
    [
        pytest.param([0, 4, 3, 5], {1: (4, 3)}, id="wrong_middle"),
        pytest.param([1, 2, 3, 5], {0: (1, 2)}, id="not_from_0"),
        pytest.param([-1, 2, 3, 5], {0: (-1, 2)}, id="from_below_0"),
        pytest.param([0, 2, 3, 6], {2: (3, 6)}, id="past_the_end"),
        pytest.param([0, 2, 9, 5], {1: (2, 9), 2: (9, 5)}, id="there_and_back"),
        pytest.param([0, 2, 3, 2**62], {2: (3, 2**62)}, id="huge_end"),
        pytest.param([0, INT64_MAX, -(2**63), 5], {0: (0, INT64_MAX), 1: (INT64_MAX, -(2**63)), 2: (-(2**63), 5)}, id="extreme"),  # noqa: E501 - a table
        pytest.param([5, 4, 3, 2], {0: (5, 4), 1: (4, 3), 2: (3, 2)}, id="backwards"),
        pytest.param([0, 5, 0, 5], {1: (5, 0)}, id="all_tokens_twice"),
    ],
)  # fmt: skip
def test_a_request_with_wrong_offsets_writes_nothing_and_its_neighbours_are_exact(
    target: Any, counts: Any, offsets: list[int], wrong: dict[int, tuple[int, int]]
) -> None:
    token_ids = [10, 11, 12, 13, 14]
    framed, report = target.framed(3, 6), target.report()
    target.raw(framed.pool, token_ids, offsets, [2, 0, 1], report=report)
    framed.assert_border_intact()
    rows = [[-7] * 6 for _ in range(3)]
    for request, row in enumerate([2, 0, 1]):
        if request not in wrong:
            own = token_ids[offsets[request] : offsets[request + 1]]
            rows[row][: len(own)] = own
    assert framed.rows() == rows
    assert report.counts() == counts(offsets=len(wrong))
    offender = report.first()
    assert offender is not None and offender.kind == "offsets"
    assert (offender.position, offender.value) == wrong[offender.request]


# Case 28: there may be no tokens at all, and offsets still be wrong.
def test_wrong_offsets_are_found_where_there_are_no_tokens(target: Any, counts: Any) -> None:
    framed, report = target.framed(2, 4), target.report()
    target.raw(framed.pool, [], [0, 2, 0], [0, 1], report=report)
    framed.assert_untouched()
    assert report.counts() == counts(offsets=2)


def test_many_faults_at_once_are_each_counted_once(target: Any, counts: Any) -> None:
    framed, report = target.framed(4, 8), target.report()
    target.raw(
        framed.pool,
        [10, 11, 2**31, 13, 14, 15, -(2**40)],
        [0, 3, 5, 4, 7],
        [0, 9, 1, 3],
        prefix_lens=[6, -1, 2, 0],
        report=report,
    )
    framed.assert_border_intact()
    assert framed.rows() == [[-7] * 6 + [10, 11], [-7] * 8, [-7] * 8, [14, 15, -1] + [-7] * 5]
    assert report.counts() == counts(offsets=1, row=1, prefix=1, token=2, dropped=1)


def test_a_whole_batch_of_wrong_rows_is_counted_row_by_row(target: Any, counts: Any) -> None:
    num_reqs = 41 if target.tiny else 700  # more than one window
    framed, report = target.framed(2, 3), target.report()
    rows = [2 + request for request in range(num_reqs)]
    target.raw(framed.pool, list(range(num_reqs)), list(range(num_reqs + 1)), rows, report=report)
    framed.assert_untouched()
    assert report.counts() == counts(row=num_reqs)
    offender = report.first()
    assert offender is not None and offender.value == 2 + offender.request


def test_what_is_contained_is_contained_without_a_report_too(target: Any) -> None:
    framed = target.framed(2, 3)
    target.raw(framed.pool, [1, 2, 3, 4], [0, 1, 2, 9], [-1, 0, 1], prefix_lens=[0, 4, 0])
    framed.assert_untouched()


# Case 48, on the device side: a batch is checked where it was made, and again where it is used.
def test_a_row_flipped_in_a_batch_on_its_way_is_named_with_its_id(target: Any, counts: Any) -> None:
    batch: RaggedBatch = target.batch([[5, 6], [7]], [1, 0], req_ids=["a", "b"])
    batch.req_pool_indices[1] = 2**40
    framed, report = target.framed(2, 3), target.report()
    target.scatter(batch, framed.pool, report)
    framed.assert_border_intact()
    assert framed.rows() == [[-7] * 3, [5, 6, -7]]
    assert report.counts() == counts(row=1)
    offender = report.first()
    assert offender is not None
    assert (offender.request, offender.req_id, offender.value) == (1, "b", 2**40)
