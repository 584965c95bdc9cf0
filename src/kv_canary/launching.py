"""Launching a kernel again without Triton's per-call specialisation.

A JIT launch binds, specialises and looks up its kernel at every call. Here the first call of a variant is an ordinary
JIT launch; the compiled kernel that it returns is kept under everything that selects a variant, and called directly
from then on, with addresses instead of tensors. Sizes select nothing: the kernels declare them int64 and unspecialised.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from typing import Any

import torch
import triton

from ragged import RaggedError

KNOWN_TRITON = ("3.6",)
"""Versions whose compiled kernels were seen to be launched right this way on a GPU; others take ordinary launches."""

_is_known = triton.__version__.rpartition(".")[0] in KNOWN_TRITON
_ready: dict[Hashable, tuple[Callable[..., None], int, Any, Callable[[int], int]]] = {}


def launch(
    kernel: Any,
    device: torch.device,
    programs: int,
    tensors: Callable[[], tuple[torch.Tensor, ...]],
    addresses: tuple[int, ...],
    sizes: tuple[int, ...],
    constants: tuple[Hashable, ...],
    variant: Hashable = None,
) -> None:
    """Launch ``programs`` programs on ``device``, on its current stream, whichever device is current.

    Args:
        kernel: a JIT function whose parameters are tensors, sizes, constants, in this order.
        tensors: gives the tensors; called only for an ordinary launch.
        addresses: the same tensors' ``data_ptr()``; the caller keeps their memory alive during the call.
        sizes: Python ints.
        constants: constexpr values.
        variant: what else selects a compiled kernel, such as the alignment of a pointer that specialises on it.
    """
    index = device.index
    if index is not None and index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, device, programs, tensors, addresses, sizes, constants, variant)
        return
    key = (kernel.fn, index, constants, variant)
    ready = _ready.get(key)
    if ready is None or _is_profiled():
        try:
            compiled = kernel[(programs,)](*tensors(), *sizes, *constants)
        except OSError as cause:
            _name_cache_folder(cause)
            raise
        if _is_known and index is not None:
            stream_of = triton.runtime.driver.active.get_current_stream
            _ready[key] = (compiled.run, compiled.function, compiled.packed_metadata, stream_of)
        return
    run, function, metadata, stream_of = ready
    run(programs, 1, 1, stream_of(index), function, metadata, None, None, None, *addresses, *sizes, *constants)


def _name_cache_folder(cause: OSError) -> None:
    """Raise a RaggedError where Triton's cache is what could not be used; return where it is something else."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    folder = os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache")
    at = str(cause.filename or "")
    if at and (at.startswith(folder) or folder.startswith(at)):
        raise RaggedError(
            f"kv-canary: triton cannot use its cache folder {folder}: {cause}; set TRITON_CACHE_DIR to one that can be "
            "written",
            argument="TRITON_CACHE_DIR",
            got=folder,
        ) from cause


def _is_profiled() -> bool:
    """A profiler's hooks want what only the ordinary launch gives them."""
    hooks = triton.knobs.runtime
    return bool(hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls)
