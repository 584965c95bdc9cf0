"""The cases: shapes of batches, as data. A case is added by adding an entry to CASES."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import attrs
import numpy as np
import numpy.typing as npt

from kv_canary.replay.trace import read_trace

Int64Array = npt.NDArray[np.int64]
Draw = Callable[[np.random.Generator], Int64Array]

SHAPE, GROWTH, QUICK, TRACE = "shape", "growth", "quick", "trace"
TRACE_REQS = 256
"""Requests of a batch that is taken from a trace."""


class Segments(NamedTuple):
    """One drawn batch: int64 ``[num_reqs]`` each."""

    lengths: Int64Array
    prefix_lens: Int64Array


@attrs.frozen
class Case:
    """A shape. ``draw`` gives the lengths; the pool has one row a request, of ``max_context_len`` columns.

    ``group`` is shape (those of the issue's table), growth, quick, or trace.
    """

    name: str
    group: str
    draw: Draw
    max_context_len: int
    prefix_lens: tuple[int, ...] | None = None

    def segments(self, seed: int = 0) -> Segments:
        """The same seed draws the same batch."""
        lengths = np.asarray(self.draw(np.random.default_rng(seed)), np.int64)
        prefix_lens = np.zeros_like(lengths) if self.prefix_lens is None else np.array(self.prefix_lens, np.int64)
        return Segments(lengths, prefix_lens)


# ---- how lengths are drawn ---------------------------------------------------------------


def even(num_reqs: int, length: int) -> Draw:
    """All of one length."""
    return lambda rng: np.full(num_reqs, length, np.int64)


def total(num_reqs: int, num_tokens: int) -> Draw:
    """As even as ``num_tokens`` allows."""
    return lambda rng: np.diff(np.arange(num_reqs + 1, dtype=np.int64) * num_tokens // num_reqs)


def long_among(num_long: int, long: int, num_short: int, shortest: int, longest: int) -> Draw:
    """``num_long`` of ``long`` at random places among ``num_short`` of ``shortest`` to ``longest`` tokens."""

    def draw(rng: np.random.Generator) -> Int64Array:
        lengths = rng.integers(shortest, longest + 1, num_long + num_short)
        lengths[rng.choice(len(lengths), num_long, replace=False)] = long
        return lengths

    return draw


def log_normal(num_reqs: int, mean: float, sigma: float, longest: int) -> Draw:
    """Log-normal lengths, at least 1, cut at ``longest``."""
    return lambda rng: np.minimum(np.exp(rng.normal(mean, sigma, num_reqs)).astype(np.int64) + 1, longest)


def listed(*lengths: int) -> Draw:
    """These lengths."""
    return lambda rng: np.array(lengths, np.int64)


# ---- the registry ------------------------------------------------------------------------

CASES = (
    Case("1_of_8192", SHAPE, even(1, 8192), 8192),
    Case("64_of_128", SHAPE, even(64, 128), 8192),
    Case("64_of_8192", SHAPE, even(64, 8192), 8192),
    Case("256_of_128", SHAPE, even(256, 128), 8192),
    Case("256_of_2048", SHAPE, even(256, 2048), 8192),
    Case("256_of_8192", SHAPE, even(256, 8192), 8192),
    Case("256_of_32768", SHAPE, even(256, 32768), 131072),
    Case("4096_of_512", SHAPE, even(4096, 512), 8192),
    Case("decode_4096", SHAPE, even(4096, 1), 8192),
    Case("decode_256", SHAPE, even(256, 1), 131072),
    Case("one_long_among_short", SHAPE, long_among(1, 32768, 255, 0, 3), 32768),
    Case("few_long_among_short", SHAPE, long_among(4, 16384, 252, 0, 3), 16384),
    Case("log_normal_510", SHAPE, log_normal(510, 6.2, 1.6, 131072), 131072),
    Case("one_huge_among_short", SHAPE, long_among(1, 1_000_000, 255, 3, 3), 1_000_064),
    Case("tokens_1e4", GROWTH, total(256, 10**4), 40_000),
    Case("tokens_1e5", GROWTH, total(256, 10**5), 40_000),
    Case("tokens_1e6", GROWTH, total(256, 10**6), 40_000),
    Case("tokens_1e7", GROWTH, total(256, 10**7), 40_000),
    # A million tokens each, so that only the number of requests grows.
    Case("requests_1e0", GROWTH, total(1, 10**6), 10**6),
    Case("requests_1e2", GROWTH, total(10**2, 10**6), 10**4),
    Case("requests_1e4", GROWTH, total(10**4, 10**6), 1024),
    Case("requests_1e5", GROWTH, total(10**5, 10**6), 1024),
    Case("quick_mixed", QUICK, listed(3, 0, 2, 17, 1), 32),
    Case("quick_with_prefix", QUICK, listed(3, 0, 2, 1), 32, (4, 7, 0, 31)),
    Case("quick_one_long_among_short", QUICK, long_among(1, 600, 15, 0, 3), 640),
    Case("quick_decode", QUICK, even(16, 1), 64),
)


def select(*globs: str, quick: bool = False, traces: Path | None = None) -> list[Case]:
    """Cases whose names match a glob, all where none is given; with ``quick`` the tiny ones instead of all others."""
    known = [case for case in CASES if (case.group == QUICK) == quick]
    if traces is not None and not quick:
        known += from_traces(traces)
    return [case for case in known if any(fnmatchcase(case.name, glob) for glob in globs or ("*",))]


def from_traces(folder: Path) -> list[Case]:
    """For each trace file: the prefill of its first requests, and a decode step of the same."""
    cases = []
    for path in sorted([*folder.glob("*.csv"), *folder.glob("*.jsonl")]):
        contexts = read_trace(path, limit=TRACE_REQS).context_lens
        room = int(contexts.max()) + 64
        ends = tuple(contexts.tolist())
        cases.append(Case(f"{path.stem}_prefill", TRACE, listed(*ends), room))
        cases.append(Case(f"{path.stem}_decode", TRACE, even(len(ends), 1), room, ends))
    return cases
