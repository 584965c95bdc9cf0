"""The providers, one file each. A provider is added by adding its file, with one Provider of its own."""

from __future__ import annotations

import importlib
import pkgutil

from bench.providers.base import Provider, Unavailable, WrongResult

FIRST = ("ours", "ours_no_report", "ours_launcher", "ours_torch", "floor")
"""Shown first, in this order; the others follow by name."""


def _discover() -> dict[str, type[Provider]]:
    found: dict[str, type[Provider]] = {}
    for file in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{file.name}")
        for thing in vars(module).values():
            own = isinstance(thing, type) and issubclass(thing, Provider) and thing.__module__ == module.__name__
            if own and thing is not Provider:
                found[thing.name] = thing
    first = [name for name in FIRST if name in found]
    return {name: found[name] for name in [*first, *sorted(set(found) - set(first))]}


PROVIDERS = _discover()

__all__ = ["PROVIDERS", "Provider", "Unavailable", "WrongResult"]
