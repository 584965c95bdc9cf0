"""Suite guards: what reporting costs over containing, the same kernel without a report."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from bench.cases import SHAPE, select
from bench.results import Row, compare_to
from bench.suites.base import Settings, Suite
from bench.suites.scatter import time_case

BASELINE = "ours_no_report"
LONG_US, LIMIT = 5.0, 1.10
"""Target of issue 3: at most 10% on every shape that takes 5 us or longer."""


def run(settings: Settings) -> Iterator[Row]:
    for case in select(*settings.cases, quick=settings.quick, traces=settings.traces):
        for row in compare_to(time_case("guards", case, (BASELINE, "ours"), settings), BASELINE):
            bound = (
                settings.has_targets and row.provider == "ours" and row.group == SHAPE and (row.median or 0) >= LONG_US
            )
            yield attrs.evolve(row, limit=LIMIT if bound else None)


SUITE = Suite("guards", "cost of the reporting guards over the same scatter that only contains", run)
