"""Our scatter in SGLang's place: its KV canary calls it under its own name, with its own arguments.

Use: ``sglang.install()``, before or after SGLang is imported; ``sglang.uninstall()``.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from kv_canary.scatter import launch_scatter_req_token_ids_kernel
from ragged import RaggedError

LAUNCHER = "launch_scatter_req_token_ids_kernel"
MODULES = (
    "sglang.kernels.ops.kv_canary.scatter_req_token_ids",
    "sglang.jit_kernel.kv_canary.scatter_req_token_ids",
)
"""Where it is defined, newest first: it moved in 2026."""
PARAMETERS = ("flat_in", "offsets", "req_pool_indices", "pool_out")
"""Keyword-only, and no others: another signature is another contract."""

_replaced: list[tuple[ModuleType, Callable[..., Any]]] = []


def install() -> int:
    """Replace SGLang's launcher in its module and wherever else it has been imported already, by name or not.

    Returns: in how many modules. Installing twice changes nothing more than what was imported since.

    Raises: RaggedError where SGLang is not installed, or is a version whose launcher takes other arguments.
    """
    module = _find()
    original: Callable[..., Any] = getattr(module, LAUNCHER)
    if original is launch_scatter_req_token_ids_kernel:
        original = next(before for changed, before in _replaced if changed is module)
    _check(original, module.__name__)
    for other in list(sys.modules.values()):
        if isinstance(other, ModuleType) and vars(other).get(LAUNCHER) is original:
            _replaced.append((other, original))
            setattr(other, LAUNCHER, launch_scatter_req_token_ids_kernel)
    return len(_replaced)


def uninstall() -> None:
    """Put SGLang's launcher back wherever it was replaced; nothing where it was not."""
    while _replaced:
        module, original = _replaced.pop()
        if vars(module).get(LAUNCHER) is launch_scatter_req_token_ids_kernel:
            setattr(module, LAUNCHER, original)


def _find() -> ModuleType:
    reasons = []
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            reasons.append(str(error))
            continue
        if hasattr(module, LAUNCHER):
            return module
        reasons.append(f"{name} has no {LAUNCHER}")
    raise RaggedError(
        f"kv-canary: SGLang's {LAUNCHER} was not found: {'; '.join(dict.fromkeys(reasons))}",
        argument="sglang",
        hint="install sglang 0.5.23 or newer in this environment",
    )


def _check(launcher: Callable[..., Any], where: str) -> None:
    parameters = inspect.signature(launcher).parameters
    known = set(parameters) == set(PARAMETERS)
    if not known or any(each.kind is not inspect.Parameter.KEYWORD_ONLY for each in parameters.values()):
        raise RaggedError(
            f"kv-canary: {where} is not a version that is known: {LAUNCHER} takes ({', '.join(parameters)}), "
            f"not (*, {', '.join(PARAMETERS)})",
            argument="sglang",
            got=tuple(parameters),
            bound=PARAMETERS,
        )
