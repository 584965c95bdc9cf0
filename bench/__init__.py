"""The benchmark: suites of cases, timed for several providers. ``python -m bench`` lists them; README.md explains."""

from bench.results import Results, Row
from bench.runner import run

__all__ = ["Results", "Row", "run"]
