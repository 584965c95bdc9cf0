"""A replay as a picture: what ran, what was sent, what it cost, and where violations are."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kv_canary.replay.result import ReplayResult

__all__ = ["plot"]

SENT, RESCATTER, WRONG = "#1f5fa8", "#b9b9b9", "#c0392b"


def plot(result: ReplayResult, path: Path) -> None:
    """Draw a replay into a file, of the format that its suffix names.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: the suffix names no format.
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure  # here, so that only a plot needs it

    figure = Figure(figsize=(10, 11), layout="constrained")
    running, tokens, host, cells = figure.subplots(4, 1)
    steps = np.arange(1, len(result.running) + 1)
    verdict = f"{result.violations:,} violations" if result.findings else "clean"
    figure.suptitle(f"{result.trace}: {result.requests:,} requests, {result.steps:,} steps, {verdict}")

    running.plot(steps, result.running, color=SENT, linewidth=1)
    running.set_ylabel("running requests")

    means = result.per_step()
    tokens.plot(steps, result.step_tokens, color=SENT, linewidth=1, label=f"sent, mean {means['tokens']:,.0f}")
    tokens.axhline(
        means["rescatter_tokens"], color=RESCATTER, label=f"full re-scatter, mean {means['rescatter_tokens']:,.0f}"
    )
    tokens.set_yscale("symlog")
    tokens.set_ylabel("tokens a step")
    tokens.legend(loc="upper right", frameon=False)

    host.plot(steps, result.host_us, color=SENT, linewidth=1)
    host.set_yscale("log")
    host.set_ylabel("host us a step")
    for axes in (running, tokens, host):
        axes.set_xlabel("step")
        axes.set_xlim(1, max(len(steps), 2))

    cells.scatter(result.violation_cells[:, 1], result.violation_cells[:, 0], s=6, color=WRONG, marker="s")
    cells.set(
        xlabel="column", ylabel="pool row", title="violations" if len(result.violation_cells) else "no violations"
    )
    cells.set_xlim(0, result.settings.max_context)
    cells.set_ylim(result.settings.max_running + 1, 0)
    figure.savefig(path, dpi=120)
