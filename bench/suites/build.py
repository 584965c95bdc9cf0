"""Suite build: host time of making a batch through the builder, against bare numpy into memory that is there."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np

from bench.results import Row, compare_to
from bench.suites.base import Settings, Suite
from bench.timing import Call, step_time
from ragged import RaggedBatch, RaggedBatchBuilder

BASELINE = "numpy"


@attrs.frozen
class BuildCase:
    """So many requests of so many tokens each; ``limit`` is the target ratio to numpy."""

    name: str
    num_reqs: int
    length: int
    limit: float | None = None
    quick: bool = False


CASES = (
    BuildCase("join_256_of_8192", 256, 8192, 1.3),
    BuildCase("decode_256", 256, 1, 5.0),
    BuildCase("quick_join", 8, 100, quick=True),
    BuildCase("quick_decode", 8, 1, quick=True),
)


def run(settings: Settings) -> Iterator[Row]:
    for case in CASES:
        if case.quick == settings.quick and settings.wants_case(case.name):
            yield from compare_to(_time_case(case, settings), BASELINE)


def _time_case(case: BuildCase, settings: Settings) -> Iterator[Row]:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 150_000, (case.num_reqs, case.length))
    rows = rng.permutation(case.num_reqs)
    prefix_lens = rng.integers(0, 8192, case.num_reqs)
    parts = [line.copy() for line in tokens]
    given = tokens if case.length == 1 else parts
    builder = RaggedBatchBuilder(device=settings.device)

    def ours() -> RaggedBatch:
        builder.extend(rows, given, prefix_lens=prefix_lens)
        return builder.build()

    made = ours()
    right = made.token_ids.tolist() == tokens.reshape(-1).tolist()
    if (
        not right
        or made.req_pool_indices.tolist() != rows.tolist()
        or made.prefix_lens.tolist() != prefix_lens.tolist()
    ):
        raise AssertionError(f"bench: {case.name}: the builder's batch is not what went in")
    calls: dict[str, Call] = {BASELINE: _bare_numpy(case, tokens, parts, rows, prefix_lens), "ours": ours}
    repeats = 50 if tokens.size > 10**6 else 500
    for name, call in calls.items():
        row = Row("build", case.name, name, "host", num_reqs=case.num_reqs, num_tokens=tokens.size)
        host, _ = step_time([call], settings.device, repeats=repeats, quick=settings.quick)
        yield attrs.evolve(row.timed(host), limit=case.limit if name == "ours" else None)


def _bare_numpy(
    case: BuildCase, tokens: np.ndarray, parts: list[np.ndarray], rows: np.ndarray, prefix_lens: np.ndarray
) -> Call:
    """What hand-written code does at least: no checks, no copy to a device."""
    count, num_tokens = case.num_reqs, tokens.size
    out = np.empty(3 * count + 1 + num_tokens, np.int64)
    if case.length > 1:
        return lambda: np.concatenate(parts, out=out[3 * count + 1 :])
    offsets = np.arange(count + 1)

    def decode() -> None:
        out[: count + 1] = offsets
        out[count + 1 : 2 * count + 1] = rows
        out[2 * count + 1 : 3 * count + 1] = prefix_lens
        out[3 * count + 1 :] = tokens[:, 0]

    return decode


SUITE = Suite("build", "host time of building a batch; ratio to bare numpy into preallocated memory", run, (BASELINE,))
