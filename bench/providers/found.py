"""Finding other projects' kernels at run time. None of their code is in this repository."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.providers.base import Unavailable


def find(attribute: str, modules: Sequence[str], variable: str) -> tuple[Any, Any]:
    """The attribute and its module: from the file that the environment variable names, else from the first module.

    Raises Unavailable with every reason.
    """
    path = os.environ.get(variable)
    reasons = []
    for source in [path] if path else modules:
        try:
            module = _load(Path(source), f"bench_{variable.lower()}") if path else importlib.import_module(source)
            return getattr(module, attribute), module
        except Exception as error:  # whatever their import raises: missing drivers, versions, files
            reasons.append(f"{type(error).__name__}: {error}".splitlines()[0])
    raise Unavailable(f"{'; '.join(dict.fromkeys(reasons))} (or set {variable} to a file that has it)")


def _load(path: Path, name: str) -> Any:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # a JIT kernel looks its module up
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def require_cuda(kind: str) -> None:
    """Raise Unavailable on a device type that a Triton kernel cannot run on."""
    if kind != "cuda":
        raise Unavailable(f"a Triton kernel, needs a CUDA device, not {kind}")
