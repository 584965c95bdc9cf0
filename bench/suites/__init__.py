"""The suites, by name."""

from bench.suites import build, canary, guards, pool, scatter, step
from bench.suites.base import Settings, Suite

SUITES = {module.SUITE.name: module.SUITE for module in (scatter, guards, build, step, pool, canary)}

__all__ = ["SUITES", "Settings", "Suite"]
