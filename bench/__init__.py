"""The benchmark: suites of cases, timed for several providers. ``python -m bench`` lists them; README.md explains."""
