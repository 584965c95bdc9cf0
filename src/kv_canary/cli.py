"""The `kv-canary` command: options, a progress bar, a table, exit codes. The work is elsewhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch

from kv_canary.replay.inject import KINDS
from kv_canary.replay.plot import plot
from kv_canary.replay.result import ReplayResult, ReplaySettings
from kv_canary.replay.run import replay
from kv_canary.replay.scheduler import Scheduler
from kv_canary.replay.trace import TraceError, read_trace, synthetic_trace
from kv_canary.replay.watch import PERTURBATIONS
from kv_canary.selftest import selftest

try:
    import click
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
except ModuleNotFoundError as missing:
    sys.stderr.write(
        f"kv-canary: the command line needs {(missing.name or '').partition('.')[0]}, which is not installed; "
        "pip install 'ragged-kv-canary[cli]'\n"
    )
    raise SystemExit(2) from None

__all__ = ["main"]

SYNTHETIC_REQUESTS = 1000
FOUND, BAD_CALL, INTERRUPTED = 1, 2, 130  # exit codes beside 0; the last is the shell's for Ctrl-C
DEFAULTS = ReplaySettings()
POSITIVE = click.IntRange(1, 2**31 - 1)


class _BadCall(click.ClickException):
    """Said in one line; exit code 2."""

    exit_code = BAD_CALL


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Ragged batches that cannot be wrong, and a canary that proves it."""


def _checked_device(_context: click.Context, _option: click.Parameter, name: str) -> str:
    """A device that exists here: a wrong one is a bad call, not a traceback at the first step."""
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise click.BadParameter(f"{name!r} cannot be used: {reason}") from None
    return name


def _checked_folder(_context: click.Context, _option: click.Parameter, path: Path | None) -> Path | None:
    """A file that can be written later: a typing error must not cost a whole run."""
    if path is not None and not path.parent.is_dir():
        raise click.BadParameter(f"{path.parent} is not a folder")
    return path


def _checked_plot(context: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    """The same for a picture, and what draws it."""
    if path is not None and find_spec("matplotlib") is None:
        raise click.BadParameter("needs matplotlib, which is not installed; pip install 'ragged-kv-canary[plot]'")
    return _checked_folder(context, option, path)


@main.command("replay", short_help="Replay a serving trace, and verify the pool.")
@click.argument("trace", required=False, metavar="[TRACE]", type=click.Path(path_type=Path, allow_dash=False))
@click.option(
    "--requests",
    type=POSITIVE,
    help=f"Replay the first N requests.  [default: all; {SYNTHETIC_REQUESTS} without TRACE]",
)
@click.option(
    "--max-running",
    type=POSITIVE,
    default=DEFAULTS.max_running,
    show_default=True,
    help="Requests that run at once: rows of the pool.",
)
@click.option(
    "--max-context",
    type=POSITIVE,
    default=DEFAULTS.max_context,
    show_default=True,
    help="Tokens in a row of the pool; a longer request is refused.",
)
@click.option(
    "--prefill-budget",
    type=POSITIVE,
    default=DEFAULTS.prefill_budget,
    show_default=True,
    help="Context tokens that a step takes at the most.",
)
@click.option(
    "--device",
    default=DEFAULTS.device,
    show_default=True,
    callback=_checked_device,
    help="Where the pool is: cpu, cuda, cuda:1.",
)
@click.option(
    "--mode",
    type=click.Choice(["strict", "coerce"]),
    default=DEFAULTS.mode,
    show_default=True,
    help="How the builder takes its input.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=DEFAULTS.seed,
    show_default=True,
    help="Of the synthetic trace, and of where --inject strikes.",
)
@click.option(
    "--verify-every",
    type=POSITIVE,
    default=DEFAULTS.verify_every,
    show_default=True,
    help="Steps from one comparison of the pool to the next; the end is always compared.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    callback=_checked_folder,
    metavar="FILE",
    help="Write the figures and the settings to FILE.",
)
@click.option(
    "--plot",
    "plot_path",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    callback=_checked_plot,
    metavar="FILE.png",
    help="Draw requests, tokens and host time by step, and where violations are.",
)
@click.option(
    "--inject",
    type=click.Choice(list(KINDS)),
    help="Break one step on purpose, to see that it is found (exit 1).",
)
@click.option("--canary", is_flag=True, help="Stamp and verify KV slots, too.")
@click.option("--page-size", type=POSITIVE, default=DEFAULTS.page_size, show_default=True, help="KV slots in a page.")
@click.option(
    "--perturb",
    type=click.Choice(list(PERTURBATIONS)),
    help="Break a KV slot on purpose, to see that the canary finds it (exit 1).",
)
def replay_command(
    trace: Path | None,
    requests: int | None,
    json_path: Path | None,
    plot_path: Path | None,
    **settings: str | int | bool | None,
) -> None:
    """Replay a serving trace through a small scheduler, and check every token in the pool.

    TRACE is an Azure LLM inference CSV or a Mooncake JSONL, told apart by content; without it a
    seeded synthetic trace is made. Requests come in the order of the trace, as fast as the device
    takes them: the trace's clock is not waited for.

    Exit code 0: all is right. 1: verification or a guard found something. 2: a bad call, or a trace
    that cannot be read.
    """
    chosen = ReplaySettings(**settings)  # type: ignore[arg-type] # click has checked the types
    if trace is None:
        source = synthetic_trace(requests or SYNTHETIC_REQUESTS, seed=chosen.seed)
    else:
        try:
            source = read_trace(trace, limit=requests)
        except TraceError as error:
            raise _BadCall(str(error)) from None
    with _progress(len(source)) as on_step:
        try:
            result = replay(source, chosen, on_step=on_step)
        except MemoryError as error:
            raise _BadCall(str(error)) from None
    if json_path is not None:
        _write_json(json_path, result)
    if plot_path is not None:
        _write_plot(plot_path, result)
    _print_table(result)
    for finding in result.findings:
        click.echo(finding, err=True)
    if result.violations > len(result.findings):
        click.echo(f"and {result.violations - len(result.findings)} more", err=True)
    if result.findings:
        sys.exit(FOUND)
    if result.interrupted:
        click.echo("interrupted: the figures are those up to there", err=True)
        sys.exit(INTERRUPTED)


@main.command("doctor", short_help="Break a small canary in every way, and see that it sees.")
@click.option(
    "--device", default=DEFAULTS.device, show_default=True, callback=_checked_device, help="cpu, cuda, cuda:1."
)
def doctor_command(device: str) -> None:
    """Run the canary's self-test. Exit code 0: it sees everything. 1: it does not."""
    trials = selftest(device)
    table = Table(box=None, pad_edge=False)
    for heading in ("perturbation", "", "found", "first"):
        table.add_column(heading)
    for trial in trials:
        table.add_row(trial.name, "ok" if trial.passed else "FAILED", str(trial.found), trial.first)
    Console(markup=False).print(table)
    if not all(trial.passed for trial in trials):
        sys.exit(FOUND)


@contextmanager
def _progress(num_requests: int) -> Iterator[Callable[[Scheduler], None] | None]:
    """A bar of finished and refused requests on a terminal; nothing where anything is piped."""
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        yield None
        return
    columns = (TextColumn("replay"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("replay", total=num_requests)

        def on_step(scheduler: Scheduler) -> None:
            done = scheduler.num_finished + sum(scheduler.refused.values())
            progress.update(task, completed=done)

        yield on_step


def _write_json(path: Path, result: ReplayResult) -> None:
    try:
        path.write_text(json.dumps(result.to_json(), indent=2) + "\n")
    except OSError as error:
        raise _BadCall(f"{path}: cannot be written: {error.strerror}") from None


def _write_plot(path: Path, result: ReplayResult) -> None:
    try:
        plot(result, path)
    except (OSError, ValueError) as error:
        raise _BadCall(f"{path}: cannot be drawn: {error}") from None


def _print_table(result: ReplayResult) -> None:
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
