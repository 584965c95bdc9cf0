"""Suite scatter: device time of the kernel alone, every provider, against the floor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs

from bench.cases import SHAPE, Case, select
from bench.inputs import FEWEST_SETS, Inputs, make_inputs, set_bytes
from bench.providers import PROVIDERS, Provider, Unavailable, WrongResult
from bench.results import Row, compare_to
from bench.suites.base import Settings, Suite
from bench.timing import kernel_time

BASELINE = "floor"
LONG_US, LIMIT_LONG, LIMIT_SHORT = 3.0, 1.25, 1.6
"""Target of issue 3: ours against the floor where that takes 3 us or longer, and where it is shorter."""

MOST_NODES = 8192
"""Kernels in a graph; a provider with many launches a call takes turns among fewer sets."""


def run(settings: Settings) -> Iterator[Row]:
    names = [name for name in PROVIDERS if settings.wants(name) or name == BASELINE]
    for case in select(*settings.cases, quick=settings.quick, traces=settings.traces):
        for row in compare_to(time_case("scatter", case, names, settings), BASELINE):
            yield attrs.evolve(row, limit=_limit(row) if settings.has_targets else None)


def _limit(row: Row) -> float | None:
    if row.provider != "ours" or row.group != SHAPE or not row.ratio or not row.median:
        return None
    return LIMIT_LONG if row.median / row.ratio >= LONG_US else LIMIT_SHORT


def time_case(suite: str, case: Case, names: Iterable[str], settings: Settings) -> Iterator[Row]:
    """A row a provider: checked, then timed; or why not. One that is wrong or breaks costs no other its turn."""
    inputs = make_inputs(case, settings.device)
    batch = inputs.sets[0].batch
    for name in names:
        row = Row(suite, case.name, name, "kernel", case.group, batch.num_reqs, batch.num_tokens)
        try:
            yield _time(row, PROVIDERS[name](), inputs, settings)
        except Unavailable as reason:
            yield attrs.evolve(row, missing=str(reason))
        except Exception as error:  # WrongResult, its own refusal, or whatever the driver says of it
            missing = f"{type(error).__name__}: {error}".splitlines()[0]
            failed = isinstance(error, WrongResult) or name.startswith("ours")
            yield attrs.evolve(row, missing=missing, failed=failed)


def _time(row: Row, provider: Provider, inputs: Inputs, settings: Settings) -> Row:
    provider.require(settings.device)
    first = provider.prepare(inputs.sets[0])
    provider.check(first, inputs.sets[0], inputs.expected)
    sets = inputs.sets[: max(FEWEST_SETS, MOST_NODES // provider.launches(inputs.sets[0]))]
    calls = [first, *(provider.prepare(each) for each in sets[1:])]
    sample = kernel_time(calls, settings.device, graph=provider.graph, quick=settings.quick)
    # Once more: a report has seen all launches by now, and nobody may have changed the inputs.
    provider.check(provider.prepare(inputs.sets[0]), inputs.sets[0], inputs.expected)
    moved = len(sets) * set_bytes(row.num_tokens, row.num_reqs)
    return attrs.evolve(row.timed(sample), num_sets=len(sets), set_bytes=moved)


SUITE = Suite("scatter", "device time of the scatter kernel, by CUDA-graph replay; ratio to the floor", run)
