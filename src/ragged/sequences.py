"""Many token sequences at once: their lengths and int64 parts, without a Python call a request where they agree."""

from __future__ import annotations

import array
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from ragged.convert import Converter, Int64Array, is_plain
from ragged.errors import RaggedError, RaggedTypeError, RaggedValueError, request_name
from ragged.rules import IsDense, apply

SMALL_JOIN = 65_536
"""Bytes up to which array.array parts are joined as bytes: 256 parts of 1 token in 3 us, a numpy view of each takes
100 us (one core of an AMD EPYC)."""

_shape_of = attrgetter("dtype", "ndim", "strides")
_PLAIN = {(np.dtype(np.int64), 1, (8,))}


class Sequences(NamedTuple):
    """Token sequences of consecutive requests.

    Attributes:
        lengths: int64 ``[num_reqs]``.
        parts: on the host: int64 arrays whose concatenation is all tokens, in order; views of the caller's memory.
        device_parts: on the device: int64 tensors likewise. One of the two is empty.
    """

    lengths: Int64Array
    parts: list[Int64Array]
    device_parts: list[torch.Tensor]


def count(sequences: Any) -> int:
    """How many sequences there are; raises for what is no sequence of sequences."""
    if isinstance(sequences, np.ndarray | torch.Tensor):
        if isinstance(sequences, torch.Tensor):
            apply([IsDense("sequences")], {"sequences": sequences})
        if sequences.ndim == 0:
            raise RaggedValueError(
                "sequences must be a sequence of sequences, got shape ()", argument="sequences", got=(), bound=2
            )
    elif isinstance(sequences, str | bytes) or not isinstance(sequences, Sequence):
        raise RaggedTypeError(
            f"sequences must be a sequence of sequences, got {type(sequences).__name__}",
            argument="sequences",
            got=type(sequences).__name__,
        )
    return len(sequences)


def read_sequences(
    sequences: Any,
    convert: Converter,
    device: torch.device,
    req_ids: Sequence[object] | None = None,
    first_request: int = 0,
) -> Sequences:
    """Read one sequence a request, numbered from ``first_request``; ``count`` has taken them.

    A 2-D array or tensor is as many sequences of one length as it has rows.
    """
    if is_plain(sequences, ndim=2):
        return Sequences(_equal(sequences), [sequences.reshape(-1)], [])
    # Rows that lie apart go one by one: each is contiguous or refused by itself.
    if isinstance(sequences, np.ndarray | torch.Tensor) and sequences.ndim == 2 and _is_contiguous(sequences):
        flat = read_flat(sequences.reshape(-1), convert, device)
        return Sequences(_equal(sequences), flat.parts, flat.device_parts)
    plain = _read_plain(sequences)
    if plain is not None:
        return plain
    parts, device_parts, lengths = [], [], []
    for request, value in enumerate(sequences, first_request):
        req_id = None if req_ids is None else req_ids[request - first_request]
        part = read_part(value, convert, device, request, req_id)
        lengths.append(part.shape[0])
        if part.shape[0] == 0:
            continue  # nothing comes from anywhere
        if isinstance(part, torch.Tensor):
            device_parts.append(part)
        else:
            parts.append(part)
        if device_parts and parts:
            raise mixed_devices(request, req_id, device)
    return Sequences(np.array(lengths, dtype=np.int64), parts, device_parts)


def read_flat(token_ids: Any, convert: Converter, device: torch.device) -> Sequences:
    """Read all tokens of all requests as one flat sequence; ``lengths`` has its one length."""
    part = read_part(token_ids, convert, device)
    lengths = np.array([part.shape[0]], dtype=np.int64)
    if isinstance(part, torch.Tensor):
        return Sequences(lengths, [], [part])
    return Sequences(lengths, [part], [])


def read_part(
    value: Any, convert: Converter, device: torch.device, request: int | None = None, req_id: object = None
) -> Int64Array | torch.Tensor:
    """One sequence: an int64 array on the host, or, where it came in on a device, a tensor on the batch's device."""
    if isinstance(value, torch.Tensor) and value.device.type != "cpu" and device.type != "cpu":
        name = "token_ids" if request is None else f"token_ids of {request_name(request, req_id)}"
        if value.dim() != 1:
            raise RaggedValueError(
                f"{name} must be 1-D, got shape {tuple(value.shape)}",
                argument="token_ids",
                request=request,
                req_id=req_id,
                got=tuple(value.shape),
                bound=1,
            )
        try:
            return convert.device(value, name, device, "token_ids")
        except RaggedError as error:
            error.argument, error.request, error.req_id = "token_ids", request, req_id
            raise
    return convert.host(value, "token_ids", request, req_id)


def mixed_devices(request: int, req_id: object, device: torch.device) -> RaggedValueError:
    """The error for a batch whose tokens come partly from the host and partly from the device."""
    return RaggedValueError(
        f"token_ids of one batch must all come from the host or all from {device}, got both at "
        f"{request_name(request, req_id)}",
        argument="token_ids",
        request=request,
        req_id=req_id,
        hint=f"move them to {device} first, or all of them to the host",
    )


def _read_plain(sequences: Any) -> Sequences | None:
    """All lists, all int64 numpy arrays or all ``array('q')``: no Python call a request. None where they differ."""
    kinds = set(map(type, sequences))
    if kinds == {list} or kinds == {tuple}:
        flat = list(chain.from_iterable(sequences))
        if set(map(type, flat)) <= {int}:
            try:
                part = np.array(flat, dtype=np.int64)
            except OverflowError:
                return None  # the slow path finds and names it
            return Sequences(_lengths(sequences), [part], [])
    elif kinds == {np.ndarray} and set(map(_shape_of, sequences)) == _PLAIN:
        return Sequences(_lengths(sequences), list(sequences), [])
    elif kinds == {array.array} and {part.typecode for part in sequences} <= {"q", "l"}:
        lengths = _lengths(sequences)
        num_bytes = 8 * int(lengths.sum(dtype=np.int64))
        if 0 < num_bytes <= SMALL_JOIN:
            parts = [np.frombuffer(b"".join(sequences), dtype=np.int64)]
        else:
            parts = [np.frombuffer(part, dtype=np.int64) for part in sequences if part]
        return Sequences(lengths, parts, [])
    return None


def _lengths(sequences: Any) -> Int64Array:
    return np.array(list(map(len, sequences)), dtype=np.int64)


def _equal(rows: Any) -> Int64Array:
    """The lengths of the rows of a 2-D array."""
    lengths = np.empty(rows.shape[0], dtype=np.int64)
    lengths.fill(rows.shape[1])
    return lengths


def _is_contiguous(array: Any) -> bool:
    return bool(array.is_contiguous() if isinstance(array, torch.Tensor) else array.flags.c_contiguous)
