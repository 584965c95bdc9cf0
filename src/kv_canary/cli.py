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
from kv_canary.replay.ranks import replay_ranks
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

    from kv_canary.printing import print_ranks, print_replay, print_trials
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
@click.option("--ranks", type=POSITIVE, help="Broadcast each step's batch to N processes, and compare their pools.")
def replay_command(
    trace: Path | None,
    requests: int | None,
    json_path: Path | None,
    plot_path: Path | None,
    ranks: int | None,
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
    if ranks is not None:
        alone = {
            "inject": chosen.inject,
            "canary": chosen.canary,
            "perturb": chosen.perturb,
            "json": json_path,
            "plot": plot_path,
        }
        if given := [f"--{name}" for name, value in alone.items() if value]:
            raise _BadCall(f"--ranks does not go with {', '.join(given)}")
        try:
            result_of_ranks = replay_ranks(source, chosen, ranks)
        except ValueError as error:
            raise _BadCall(str(error)) from None
        print_ranks(source.name, result_of_ranks)
        sys.exit(0 if result_of_ranks.agrees else FOUND)
    with _progress(len(source)) as on_step:
        try:
            result = replay(source, chosen, on_step=on_step)
        except MemoryError as error:
            raise _BadCall(str(error)) from None
    if json_path is not None:
        _write_json(json_path, result)
    if plot_path is not None:
        _write_plot(plot_path, result)
    print_replay(result)
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
    print_trials(trials)
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
