"""What changed between two results beyond the spread."""

from __future__ import annotations

from typing import Any

import attrs

from bench.results import Results, Row

LEAST = 0.02
"""A change of the median below 2% is never reported: two runs of one version differ by that."""


@attrs.frozen
class Change:
    """One measurement in both results; ``verdict`` is faster, slower or same."""

    old: Row
    new: Row

    @property
    def factor(self) -> float:
        return self.new.sample.median / self.old.sample.median

    @property
    def verdict(self) -> str:
        """Changed where the middle 80% of the two runs do not overlap."""
        old, new = self.old.sample, self.new.sample
        if new.p10 > old.p90 and self.factor > 1 + LEAST:
            return "slower"
        if new.p90 < old.p10 and self.factor < 1 - LEAST:
            return "faster"
        return "same"


@attrs.frozen
class Comparison:
    """Measurements of both, and those that only one has."""

    changes: list[Change]
    only_old: list[Row]
    only_new: list[Row]
    differences: list[str]


def compare(old: Results, new: Results) -> Comparison:
    """Match by suite, case, provider and metric."""
    before = {row.key: row for row in old.rows if row.median is not None}
    after = {row.key: row for row in new.rows if row.median is not None}
    return Comparison(
        [Change(row, after[key]) for key, row in before.items() if key in after],
        [row for key, row in before.items() if key not in after],
        [row for key, row in after.items() if key not in before],
        _differences(old.environment, new.environment),
    )


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What about the machines makes a comparison doubtful."""
    flat = [{**{k: env.get(k) for k in ("device", "threads", "quick")}, **env["versions"]} for env in (old, new)]
    names = [name for name in flat[0] | flat[1] if name != "ragged-kv-canary"]
    return [
        f"{name}: {flat[0].get(name)} then, {flat[1].get(name)} now"
        for name in names
        if flat[0].get(name) != flat[1].get(name)
    ]
