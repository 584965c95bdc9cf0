"""``python -m bench``: run suites, compare results, print tables."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

import click
import torch
from rich.console import Console
from rich.table import Table

from bench import report
from bench.cases import select
from bench.compare import compare as compare_results
from bench.plot import plot as plot_results
from bench.providers import PROVIDERS, Unavailable
from bench.results import Results, Row
from bench.runner import run as run_suites
from bench.soak import Difference, soak
from bench.suites import SUITES
from ragged import RaggedError

RESULT = click.Path(exists=True, dir_okay=False, path_type=Path)


class _RunByDefault(click.Group):
    """``bench scatter --quick`` is ``bench run scatter --quick``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ("--help", "-h")):
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_RunByDefault, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Benchmarks of scatter, build and whole steps. Without a command: run.

    \b
    python -m bench                         lists suites, providers and cases
    python -m bench --quick                 every suite, tiny cases
    python -m bench scatter --json r.json   one suite, kept
    """


@main.command()
@click.argument("suites", nargs=-1, type=click.Choice(list(SUITES)))
@click.option("--device", default=None, help="cpu or cuda; by default cuda where there is one, cpu with --quick.")
@click.option("--providers", default="", help="Comma-separated; all by default.")
@click.option("--cases", default="", help="Globs on case names, comma-separated; all by default.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Keep the results here.")
@click.option("--plot", "plot_path", type=click.Path(dir_okay=False, path_type=Path), help="Draw them here.")
@click.option("--quick", is_flag=True, help="Tiny cases, few repeats: the harness works, the numbers mean nothing.")
@click.option("--traces", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Folder of real traces.")
def run(
    suites: tuple[str, ...],
    device: str | None,
    providers: str,
    cases: str,
    json_path: Path | None,
    plot_path: Path | None,
    quick: bool,
    traces: Path | None,
) -> None:
    """Run SUITES; list what there is where none is named."""
    console, progress = Console(), Console(stderr=True)
    if not suites and not quick:
        _list(console, device or _default_device(quick), traces)
        return

    def on_row(row: Row, results: Results) -> None:
        progress.print(f"{row.suite} {row.case} {row.provider} {row.metric}", style="dim", highlight=False)
        if json_path:
            results.save(json_path)  # each time: a run that is cut off was not for nothing

    try:
        results = run_suites(
            suites,
            device=device or _default_device(quick),
            providers=_names(providers),
            quick=quick,
            cases=_names(cases),
            traces=traces,
            on_row=on_row,
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    _show(console, results)
    click.echo(report.machine(results))
    if json_path:
        results.save(json_path)
    if plot_path:
        plot_results(results, plot_path)
    if failed := [row for row in results.rows if row.failed]:
        raise click.ClickException("; ".join(f"{row.suite} {row.case} {row.provider}: {row.missing}" for row in failed))


@main.command()
@click.argument("old", type=RESULT)
@click.argument("new", type=RESULT)
def compare(old: Path, new: Path) -> None:
    """Say what changed beyond the spread from OLD to NEW."""
    console = Console()
    found = compare_results(Results.load(old), Results.load(new))
    for difference in found.differences:
        click.echo(f"not the same machine: {difference}")
    changed = sorted((change for change in found.changes if change.verdict != "same"), key=lambda c: -c.factor)
    if changed:
        table = Table("suite", "case", "provider", "metric", "old us", "new us", "factor", "verdict")
        for change in changed:
            numbers = (f"{change.old.median:.2f}", f"{change.new.median:.2f}", f"{change.factor:.2f}x")
            table.add_row(*change.old.key, *numbers, change.verdict)
        console.print(table)
    click.echo(f"{len(changed)} of {len(found.changes)} changed beyond the spread")
    for title, rows in (("only in OLD", found.only_old), ("only in NEW", found.only_new)):
        for row in rows:
            click.echo(f"{title}: {' '.join(row.key)}")


@main.command("soak")
@click.option("--steps", type=click.IntRange(1), default=1_000_000, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
def soak_command(steps: int, seed: int) -> None:
    """A token pool against a dictionary of lists, on the CPU: exit 1 at the first difference.

    A million steps take some minutes.
    """
    begin = perf_counter()
    every = max(steps // 20, 1)

    def on_step(step: int) -> None:
        if step % every == 0:
            click.echo(f"{step:,} steps, {perf_counter() - begin:,.0f} s", err=True)

    try:
        sent = soak(steps, seed=seed, on_step=on_step)
    except (Difference, RaggedError) as error:
        raise click.ClickException("; ".join([str(error), *getattr(error, "__notes__", ())])) from None
    click.echo(f"no difference in {steps:,} steps of seed {seed}; {sent:,} tokens were sent")


@main.command()
@click.argument("result", type=RESULT)
def table(result: Path) -> None:
    """Print RESULT as Markdown tables."""
    click.echo(report.markdown(Results.load(result)), nl=False)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _default_device(quick: bool) -> str:
    return "cuda" if torch.cuda.is_available() and not quick else "cpu"


def _list(console: Console, device: str, traces: Path | None) -> None:
    suites = Table("suite", "what it measures", "providers of its own")
    for suite in SUITES.values():
        suites.add_row(suite.name, suite.summary, ", ".join(suite.providers))
    providers = Table("provider", "what it is", f"on {device}")
    for name, provider in PROVIDERS.items():
        try:
            provider().require(torch.device(device))
            state = "ready"
        except Unavailable as reason:
            state = f"missing: {reason}"
        providers.add_row(name, provider.summary, state)
    console.print(suites, providers)
    console.print(f"cases: {', '.join(case.name for case in select(traces=traces))}")


def _show(console: Console, results: Results) -> None:
    for made in report.tables(results):
        shown = Table(title=made.title, title_justify="left")
        for index, name in enumerate(made.header):
            shown.add_column(name, justify="left" if index < 2 else "right", no_wrap=True)
        for line in made.lines:
            shown.add_row(*line)
        # As wide as it needs to be: a number that is cut off is worse than a line that the terminal breaks.
        width = max(console.width, Console(width=1000).measure(shown).maximum)
        Console(width=width).print(shown)
        for note in made.notes:
            console.print(note, markup=False, highlight=False)


__all__ = ["main"]
