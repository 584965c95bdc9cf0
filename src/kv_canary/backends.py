"""Which backend runs: resolves ``"auto"``."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from types import ModuleType

import torch

from ragged import RaggedValueError

BACKENDS = ("auto", "triton", "torch")


@functools.cache
def has_triton() -> bool:
    """Whether triton can be imported; it is not imported to find out."""
    try:
        return importlib.util.find_spec("triton") is not None
    except ValueError:  # sys.modules["triton"] is None: made unimportable
        return False


def resolve(backend: str, device: torch.device, operation: str = "") -> ModuleType:
    """The backend's module, of the pool or of another ``operation``; ``"auto"`` is triton on CUDA, else torch.

    Raises: RaggedValueError for an unknown name, and for ``"triton"`` where it cannot run: not installed, or on the CPU
        without ``TRITON_INTERPRET=1``.
    """
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise RaggedValueError(
            f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}", argument="backend", got=backend
        )
    return _resolve(backend, device.type, operation)


@functools.cache
def _resolve(backend: str, device_type: str, operation: str) -> ModuleType:
    if backend == "auto":
        backend = "triton" if device_type == "cuda" and has_triton() else "torch"
    if backend == "triton" and not has_triton():
        raise RaggedValueError("backend triton is not installed", argument="backend", got=backend)
    if backend == "triton" and device_type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise RaggedValueError(
            "backend triton cannot run on the CPU",
            argument="backend",
            got=backend,
            hint="set TRITON_INTERPRET=1 before triton is imported, or use backend='torch'",
        )
    return importlib.import_module(f"kv_canary.{operation}_{backend}" if operation else f"kv_canary.{backend}_backend")
