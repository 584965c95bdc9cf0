"""A run: suites one after the other, and what they found. The command line and tests start here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from bench.providers import PROVIDERS
from bench.results import Results, Row, clocks, environment
from bench.suites import SUITES, Settings


def run(
    suites: Sequence[str] = (),
    *,
    device: torch.device | str = "cpu",
    providers: Sequence[str] = (),
    quick: bool = False,
    cases: Sequence[str] = (),
    traces: Path | None = None,
    on_row: Callable[[Row, Results], None] | None = None,
) -> Results:
    """Run suites and return what they found.

    >>> results = run(["scatter"], quick=True, providers=["loop"], cases=["quick_mixed"])
    >>> [(row.case, row.provider) for row in results.rows]
    [('quick_mixed', 'floor'), ('quick_mixed', 'loop')]

    Args:
        suites: names; all where none is given.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``.
        providers: names; all where none is given. What a suite compares to runs in any case.
        quick: tiny cases, few repeats: it works, the numbers mean nothing.
        cases: globs on case names; all where none is given.
        traces: a folder of serving traces, whose batches join the cases.
        on_row: called with each row as it comes, and all results so far.

    Raises: ValueError for a name that is none, and for a device that is not there.
    """
    _check_names("suite", suites, list(SUITES))
    _check_names("provider", providers, known_providers())
    place = _resolved(device)
    settings = Settings(place, tuple(providers), tuple(cases) or ("*",), quick, traces)
    results = Results([], environment(place, quick=quick))
    for name in suites or SUITES:
        for row in SUITES[name].run(settings):
            results.rows.append(row)
            if on_row is not None:
                on_row(row, results)
    results.environment["clocks_after"] = clocks(place)
    return results


def known_providers() -> list[str]:
    """Of all suites."""
    return list(dict.fromkeys([*PROVIDERS, *(name for suite in SUITES.values() for name in suite.providers)]))


def _check_names(what: str, names: Sequence[str], known: list[str]) -> None:
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"unknown {what} {', '.join(unknown)}; known: {', '.join(known)}")


def _resolved(device: torch.device | str) -> torch.device:
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"{device!r} is no device: {error}") from None
    if place.type != "cuda":
        return place
    if not torch.cuda.is_available():
        raise ValueError(f"torch {torch.__version__} sees no CUDA device")
    return place if place.index is not None else torch.device("cuda", torch.cuda.current_device())
