"""The launcher's host guards: a list of rules, in the order in which they are applied. None of them syncs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kv_canary.kinds import STAMP_FIELDS, VIOLATION_COLUMNS
from ragged import Mode, RaggedError
from ragged.convert import Coercion, Converter
from ragged.rules import (
    Arrays,
    HasColumns,
    HasDtype,
    HasLength,
    HasNDim,
    HasOwnRows,
    IsAligned,
    IsContiguous,
    IsDense,
    IsInteger,
    NoOverlap,
    OnDevice,
    Rule,
    apply,
    extent_of,
)

SCATTER = "kv-canary: scatter_req_token_ids "
"""Starts every message of the scatter; operators search their logs for it."""

POOL = "kv-canary: "
"""Starts every message of the resident pool and its verification."""

INPUTS = ("flat_in", "offsets", "req_pool_indices")
OPTIONAL = "prefix_lens"


def table(name: str) -> list[Rule]:
    """What any pool must be, whatever is done with it."""
    return [IsDense(name), HasNDim(name, 2), HasDtype(name, "int32"), HasOwnRows(name)]


STAMPS: list[Rule] = [
    IsDense("stamps"),
    HasNDim("stamps", 2),
    HasDtype("stamps"),
    IsContiguous("stamps"),
    HasColumns("stamps", STAMP_FIELDS),
    IsAligned("stamps", 16),
]
"""What a canary's stamps must be: kernels take each as a sector of 32 bytes."""

LOG: list[Rule] = [
    IsDense("log"),
    HasNDim("log", 2),
    HasDtype("log"),
    IsContiguous("log"),
    HasColumns("log", VIOLATION_COLUMNS, least_rows=2),
]
"""What the table of a log of token violations must be: kernels take it as a header and a ring of one line at least."""


def _num_reqs(arrays: Arrays) -> int:
    return int(arrays["req_pool_indices"].shape[0])


def _pool_device(arrays: Arrays) -> torch.device:
    device: torch.device = arrays["pool_out"].device
    return device


def _of_inputs(names: Sequence[str]) -> tuple[list[Rule], list[Rule], list[Rule]]:
    """Dimensions; dtypes; then what our own kernel needs besides."""
    dimensions: list[Rule] = [HasNDim(name, 1) for name in names]
    dtypes: list[Rule] = [HasDtype(name) for name in names]
    ours: list[Rule] = [
        *(OnDevice(name, "pool_out", _pool_device) for name in names),
        *(IsContiguous(name) for name in names),
        *(NoOverlap(name, "pool_out") for name in names),
    ]
    return dimensions, dtypes, ours


POOL_SHAPE: list[Rule] = [HasNDim("pool_out", 2)]
POOL_DTYPE: list[Rule] = [HasDtype("pool_out", "int32")]
POOL_MEMORY: list[Rule] = [HasOwnRows("pool_out")]

_dimensions, _dtypes, _ours = _of_inputs(INPUTS)
_prefix_dimensions, _prefix_dtypes, _prefix_ours = _of_inputs([OPTIONAL])

DENSE: list[Rule] = [IsDense(name) for name in (*INPUTS, "pool_out")]
"""First of all: a sparse or nested tensor has no strides, or no shape, that the other rules could read."""
DIMENSIONS: list[Rule] = [*DENSE, *_dimensions, *POOL_SHAPE]
DTYPES: list[Rule] = [*_dtypes, *POOL_DTYPE]
LENGTHS: list[Rule] = [HasLength("offsets", "bs+1", lambda arrays: _num_reqs(arrays) + 1)]
OURS: list[Rule] = [*POOL_MEMORY, *_ours]
PREFIX_DIMENSIONS: list[Rule] = [IsDense(OPTIONAL), *_prefix_dimensions]
PREFIX: list[Rule] = [*_prefix_dtypes, HasLength(OPTIONAL, "bs", _num_reqs)]
PREFIX_OURS = _prefix_ours


def check_scatter(arrays: dict[str, Any], mode: Mode) -> tuple[dict[str, Any], list[Coercion]]:
    """The tensors to launch with: those given or, in coerce mode, converted ones, and what was converted.

    The pool is never converted: a copy would swallow the write.

    Raises: RaggedValueError, RaggedTypeError, in the order dimensions, dtypes, lengths, devices, strides, overlap.
    """
    prefix = arrays.get(OPTIONAL) is not None
    apply(DIMENSIONS, arrays, where=SCATTER)
    if prefix:
        apply(PREFIX_DIMENSIONS, arrays, where=SCATTER)
    coercions: list[Coercion] = []
    if mode is Mode.COERCE:
        names = (*INPUTS, OPTIONAL) if prefix else INPUTS
        apply(
            [*(IsInteger(name) for name in INPUTS), *POOL_DTYPE], arrays, where=SCATTER
        )  # before anything is paid for
        arrays = arrays | _converted(arrays, names, Converter(mode, coercions))
    apply(DTYPES, arrays, where=SCATTER)
    apply(LENGTHS, arrays, where=SCATTER)
    if prefix:
        apply(PREFIX, arrays, where=SCATTER)
    apply(OURS, arrays, where=SCATTER)
    if prefix:
        apply(PREFIX_OURS, arrays, where=SCATTER)
    return arrays, coercions


VERIFY: list[Rule] = [
    *DIMENSIONS,
    *PREFIX_DIMENSIONS,
    *DTYPES,
    *LENGTHS,
    *PREFIX,
    *OURS,
    *PREFIX_OURS,
    IsDense("valid_lens"),
    HasNDim("valid_lens", 1),
    HasDtype("valid_lens"),
    IsContiguous("valid_lens"),
    HasLength("valid_lens", "max_reqs", lambda arrays: int(arrays["pool_out"].shape[0])),
    *LOG,
    *(OnDevice(name, "pool_out", _pool_device) for name in ("valid_lens", "log")),
    *(NoOverlap("log", name) for name in (*INPUTS, OPTIONAL, "pool_out", "valid_lens")),
]
"""What a verification of plain tensors needs: a scatter's inputs, valid lengths, and a log's table."""


def _converted(arrays: Arrays, names: Sequence[str], convert: Converter) -> dict[str, Any]:
    device = _pool_device(arrays)
    try:
        return {name: convert.device(arrays[name], name, device) for name in names}
    except RaggedError as error:
        error.args = (SCATTER + error.args[0],)
        raise


BATCH_POOL: list[Rule] = [
    *POOL_SHAPE,
    *POOL_DTYPE,
    *POOL_MEMORY,
    OnDevice("pool_out", "the batch", lambda arrays: arrays["packed"].device),
]
"""What a pool must be for a batch, which needs no checks of its own."""
BATCH_OVERLAP: list[Rule] = [NoOverlap("packed", "pool_out")]
TOKENS_OVERLAP: list[Rule] = [NoOverlap("token_ids", "pool_out")]

_accepted: dict[tuple[Any, ...], int] = {}  # what BATCH_POOL reads of a pool -> bytes that it spans
ACCEPTED_KEPT = 256


def check_pool(packed: torch.Tensor, device_tokens: torch.Tensor | None, pool_out: torch.Tensor) -> None:
    """Hold a pool against BATCH_POOL, once for all pools that look alike, and against the batch's own memory.

    Raises: RaggedValueError, RaggedTypeError.
    """
    arrays = {"packed": packed, "pool_out": pool_out}
    if pool_out.layout is not torch.strided or pool_out.is_nested:
        apply(DENSE[-1:], arrays, where=SCATTER)
    looks = (pool_out.dtype, pool_out.shape, pool_out.stride(), pool_out.device, packed.device)
    span = _accepted.get(looks)
    if span is None:
        apply(BATCH_POOL, arrays, where=SCATTER)
        if len(_accepted) >= ACCEPTED_KEPT:
            _accepted.clear()
        first, last = extent_of(pool_out)
        span = _accepted[looks] = last - first
    begin, pool_begin = packed.data_ptr(), pool_out.data_ptr()
    if begin < pool_begin + span and pool_begin < begin + packed.nbytes:
        apply(BATCH_OVERLAP, arrays, where=SCATTER)
    if device_tokens is not None:
        begin = device_tokens.data_ptr()
        if begin < pool_begin + span and pool_begin < begin + device_tokens.nbytes:
            apply(TOKENS_OVERLAP, {"token_ids": device_tokens, "pool_out": pool_out}, where=SCATTER)
