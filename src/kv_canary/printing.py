"""What the command line shows: tables, and lines for people."""

from __future__ import annotations

from collections.abc import Iterable

import click
from rich.console import Console
from rich.table import Table

from kv_canary.replay.ranks import RanksResult
from kv_canary.replay.result import ReplayResult
from kv_canary.selftest import Trial

__all__ = ["print_ranks", "print_replay", "print_trials"]


def print_trials(trials: Iterable[Trial]) -> None:
    """One line for each perturbation of a self-test."""
    table = Table(box=None, pad_edge=False)
    for heading in ("perturbation", "", "found", "first"):
        table.add_column(heading)
    for trial in trials:
        table.add_row(trial.name, "ok" if trial.passed else "FAILED", str(trial.found), trial.first)
    Console(markup=False).print(table)


def print_ranks(name: str, result: RanksResult) -> None:
    """The figures of a replay on several ranks, and their digests where they differ."""
    verdict = "all pools are the same" if result.agrees else "the pools DIFFER"
    click.echo(
        f"{name}: {result.steps:,} steps, {result.requests_finished:,} requests, {result.tokens_scattered:,} tokens, "
        f"{result.bytes_broadcast:,} bytes broadcast to {len(result.digests)} ranks; {verdict}"
    )
    if not result.agrees:
        for rank, digest in enumerate(result.digests):
            click.echo(f"rank {rank}: {digest}", err=True)


def print_replay(result: ReplayResult) -> None:
    """The table at the end of a replay."""
    reasons = ", ".join(f"{count:,} {why}" for why, count in result.refused_reasons.items() if count)
    refused = f"{result.requests_refused:,}" + (f" ({reasons})" if reasons else "")
    verdict = "clean" if result.tokens_verified else "NOTHING WAS COMPARED"
    if result.findings:
        verdict = f"FAILED, {result.violations:,} violations"
    means = result.per_step()
    rows = {
        "trace": f"{result.trace}, {result.requests:,} requests",
        "steps": f"{result.steps:,} in {result.seconds:.1f} s",
        "requests finished": f"{result.requests_finished:,}",
        "requests refused": refused,
        "tokens sent": f"{result.tokens_scattered:,}; a step {means['tokens']:,.0f}, "
        f"a full re-scatter {means['rescatter_tokens']:,.0f}",
        "bytes copied": f"{result.bytes_copied:,}; a step {means['bytes']:,.0f}, "
        f"a full re-scatter {means['rescatter_bytes']:,.0f}",
        "host us a step": f"p50 {result.host_us_at(50):,.0f}, p99 {result.host_us_at(99):,.0f} (sync)",
        "verification": (
            f"{verdict}; {result.tokens_verified:,} tokens of {result.requests_verified:,} requests compared"
        ),
    }
    if (canary := result.canary) is not None:
        compared = ", ".join(f"{canary.counts[name]:,} {name}" for name in ("position", "chain", "token", "kv"))
        rows["canary"] = (
            f"{canary.counts['written']:,} slots stamped; compared {compared}; all in {canary.period} steps"
        )
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in rows.items():
        table.add_row(name, value)
    Console(markup=False).print(table)  # a file name may look like markup
