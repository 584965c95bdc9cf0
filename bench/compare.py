"""What changed between two results beyond the spread."""

from __future__ import annotations

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
        return (self.new.median or 0.0) / (self.old.median or 1.0)

    @property
    def verdict(self) -> str:
        """Changed where the middle 80% of the two runs do not overlap."""
        assert self.old.p10 is not None and self.old.p90 is not None
        assert self.new.p10 is not None and self.new.p90 is not None
        if self.new.p10 > self.old.p90 and self.factor > 1 + LEAST:
            return "slower"
        if self.new.p90 < self.old.p10 and self.factor < 1 - LEAST:
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


def _differences(old: dict, new: dict) -> list[str]:
    """What about the machines makes a comparison doubtful."""
    flat = [{**{k: env.get(k) for k in ("device", "threads", "quick")}, **env["versions"]} for env in (old, new)]
    names = [name for name in flat[0] | flat[1] if name != "ragged-kv-canary"]
    return [
        f"{name}: {flat[0].get(name)} then, {flat[1].get(name)} now"
        for name in names
        if flat[0].get(name) != flat[1].get(name)
    ]
