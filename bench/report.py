"""Results as tables: for the terminal, and as Markdown for docs/performance.md."""

from __future__ import annotations

from typing import NamedTuple

from bench.results import Results, Row, geometric_means


class Table(NamedTuple):
    """One suite: a line a case, a column a provider."""

    title: str
    header: list[str]
    lines: list[list[str]]
    notes: list[str]


def tables(results: Results) -> list[Table]:
    """A table a suite, and as notes what is missing and which targets are not met."""
    return [_table(results.rows, suite) for suite in dict.fromkeys(row.suite for row in results.rows)]


def _table(rows: list[Row], suite: str) -> Table:
    rows = [row for row in rows if row.suite == suite]
    cells = {(row.case, row.metric, row.provider): row for row in rows}
    providers = [
        name
        for name in dict.fromkeys(row.provider for row in rows)
        if any(row.median is not None for row in rows if row.provider == name)
    ]
    lines = []
    for case, metric in dict.fromkeys((row.case, row.metric) for row in rows):
        first = next(row for row in rows if (row.case, row.metric) == (case, metric))
        line = [case, metric, f"{first.num_reqs:,}", f"{first.num_tokens:,}"]
        lines.append(line + [_cell(cells.get((case, metric, name))) for name in providers])
    means = geometric_means(rows).get(suite, {})
    if means:
        cells_of_means = [f"{means[name]:.2f}x" if name in means else "" for name in providers]
        lines.append(["geometric mean of ratios", "", "", "", *cells_of_means])
    return Table(suite, ["case", "metric", "requests", "tokens", *providers], lines, _notes(rows))


def _cell(row: Row | None) -> str:
    if row is None or row.median is None:
        return "-"
    ratio = "" if row.ratio is None or row.provider == row.baseline else f" ({row.ratio:.2f}x)"
    return f"{_number(row.median)}{ratio}{' !' if row.within is False else ''}"


def _number(microseconds: float) -> str:
    return f"{microseconds:.2f}" if microseconds < 100 else f"{microseconds:,.0f}"


def _notes(rows: list[Row]) -> list[str]:
    notes = []
    for provider, reason in dict.fromkeys((row.provider, row.missing) for row in rows if row.missing):
        cases = [row.case for row in rows if (row.provider, row.missing) == (provider, reason)]
        everywhere = len(cases) == len([row for row in rows if row.provider == provider])
        notes.append(f"{provider} is missing{'' if everywhere else ' for ' + ', '.join(cases)}: {reason}")
    for row in rows:
        if row.within is False:
            value = f"{row.ratio:.2f}x" if row.limit_on == "ratio" else f"{row.median:.1f} us"
            unit = "x" if row.limit_on == "ratio" else " us"
            notes.append(f"! {row.case}, {row.metric}, {row.provider}: {value}, target at most {row.limit:g}{unit}")
    return notes


def markdown(results: Results) -> str:
    """All tables, under a line about the machine."""
    made = [machine(results), ""]
    for table in tables(results):
        made += [f"### {table.title}", "", _line(table.header), _line(["---"] * 2 + ["---:"] * (len(table.header) - 2))]
        made += [_line(line) for line in table.lines]
        made += ["", *(f"- {note}" for note in table.notes), ""]
    return "\n".join(made).rstrip() + "\n"


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def machine(results: Results) -> str:
    """Device, versions, clocks and date in one line."""
    env = results.environment
    versions = ", ".join(f"{name} {number}" for name, number in env["versions"].items() if number)
    clocks = env.get("clocks") or {}
    read = f"; {', '.join(f'{name} {value}' for name, value in clocks.items())}" if clocks else ""
    return f"{env['device']}; {versions}{read}; {env['date']}. Microseconds a call, medians."
