"""The results as a picture: a panel a suite, a bar a provider."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.results import Results, Row


def plot(results: Results, path: Path) -> None:
    """Write the PNG (or whatever matplotlib makes of the suffix). Needs matplotlib."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    suites = list(dict.fromkeys(row.suite for row in results.rows if row.median is not None))
    if not suites:
        raise ValueError("nothing was measured, so there is nothing to plot")
    counts = [len({(row.case, row.metric) for row in results.rows if row.suite == suite}) for suite in suites]
    figure, axes = pyplot.subplots(
        len(suites), 1, figsize=(max(8.0, 0.75 * max(counts)), 4.2 * len(suites)), squeeze=False, layout="constrained"
    )
    for axis, suite in zip(axes[:, 0], suites, strict=True):
        _panel(axis, suite, [row for row in results.rows if row.suite == suite and row.median is not None])
    figure.suptitle(f"{results.environment['device']}, torch {results.environment['versions']['torch']}", fontsize=10)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _panel(axis: Any, suite: str, rows: list[Row]) -> None:
    places = list(dict.fromkeys((row.case, row.metric) for row in rows))
    providers = list(dict.fromkeys(row.provider for row in rows))
    width = 0.85 / len(providers)
    for index, provider in enumerate(providers):
        mine = [row for row in rows if row.provider == provider]
        samples = [row.sample for row in mine]
        at = [places.index((row.case, row.metric)) + (index - (len(providers) - 1) / 2) * width for row in mine]
        spread = [[max(s.median - s.p10, 0) for s in samples], [max(s.p90 - s.median, 0) for s in samples]]
        axis.bar(at, [s.median for s in samples], width, yerr=spread, label=provider, error_kw={"linewidth": 0.6})
    axis.set_yscale("log")
    axis.set_ylabel("microseconds")
    axis.set_title(suite)
    metrics = {metric for _, metric in places}
    names = [case if len(metrics) == 1 else f"{case} {metric}" for case, metric in places]
    axis.set_xticks(range(len(places)), names, rotation=35, ha="right", fontsize=8)
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
