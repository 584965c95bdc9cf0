"""How each kind of input becomes int64, and the record of what was converted.

Strict takes only what is int64 already (and Python integers, which have no width). Coerce also takes what can become
int64 without losing anything, and records it. Neither takes a bool or a float for a number.
"""

from __future__ import annotations

import array
import enum
import logging
import re
import sys
from collections.abc import Sequence
from typing import Any, Self

import attrs
import numpy as np
import numpy.typing as npt
import torch
import torch.utils.dlpack

from ragged.errors import (
    RaggedError,
    RaggedOverflowError,
    RaggedTypeError,
    RaggedValueError,
    request_name,
)
from ragged.integers import is_number
from ragged.rules import INT64_MAX, HasDtype, HasNDim, IsContiguous, IsDense, IsInteger, OnDevice, device_of, dtype_name

Int64Array = npt.NDArray[np.int64]

logger = logging.getLogger(__name__)
_said: set[tuple[str, str, str, str, int]] = set()


class Choice(enum.Enum):
    """An enum that is also taken by name or value, in any case: ``Mode("strict")``."""

    @classmethod
    def _missing_(cls, value: object) -> Self:
        for choice in cls:
            if isinstance(value, str) and value.lower() == choice.value:
                return choice
        names = ", ".join(repr(choice.value) for choice in cls)
        argument = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()  # WideTokens is passed as wide_tokens
        raise RaggedValueError(
            f"{argument} must be one of {names}, got {value!r}", argument=argument, got=value, bound=names
        )


class Mode(Choice):
    """What happens to an input that is wrong but could be converted without loss."""

    STRICT = "strict"
    COERCE = "coerce"


@attrs.frozen
class Coercion:
    """One conversion that was paid for: ``argument`` went ``source`` -> ``target``, ``nbytes`` bytes written."""

    argument: str
    source: str
    target: str
    nbytes: int


def _call_site() -> tuple[str, int]:
    """File and line of the nearest frame outside this project."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in ("ragged", "kv_canary"):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def _log_once(coercion: Coercion) -> None:
    """One debug line per kind of conversion and call site."""
    if not logger.isEnabledFor(logging.DEBUG):
        return
    filename, line = _call_site()
    kind = (coercion.argument, coercion.source, coercion.target, filename, line)
    if kind not in _said:
        _said.add(kind)
        logger.debug("%s converted from %s to %s at every call of %s:%d", *kind)


def is_plain(value: Any, ndim: int = 1) -> bool:
    """An int64 numpy array, contiguous: nothing to convert."""
    return type(value) is np.ndarray and value.ndim == ndim and value.dtype == np.int64 and value.flags.c_contiguous


@attrs.define
class Converter:
    """Turns the inputs of one call into int64, in one mode, and keeps the record.

    Args of its methods: ``argument`` is the name for messages; ``request`` and ``req_id`` name whose tokens they are,
    or are None where the array is indexed by request itself: then ``first_request`` and ``req_ids`` name its elements.

    Raises: RaggedTypeError, RaggedValueError, RaggedOverflowError, as the table in DESIGN section 4 says.
    """

    mode: Mode
    coercions: list[Coercion] = attrs.field(factory=list)
    first_request: int = 0
    req_ids: Sequence[object] | None = None

    def host(self, value: Any, argument: str, request: int | None = None, req_id: object = None) -> Int64Array:
        """int64, 1-D, contiguous, on the host; a view of ``value`` wherever that is possible."""
        if is_plain(value):
            return value  # type: ignore[no-any-return]
        if isinstance(value, list | tuple | range):
            return self._from_numbers(value, argument, request, req_id)
        subject = _subject(argument, request, req_id)
        try:
            return self._from_array(_as_array(value, subject), subject, argument)
        except RaggedError as error:
            error.argument, error.request, error.req_id = argument, request, req_id
            raise

    def device(
        self, tensor: torch.Tensor, subject: str, device: torch.device, argument: str | None = None
    ) -> torch.Tensor:
        """int64, contiguous, on ``device``; the dimensions are the caller's to check.

        ``subject`` is the name in messages, ``argument`` the one in the record where that is shorter.
        """
        argument = argument or subject
        self._demand(IsDense(subject), tensor)
        self._demand(IsInteger(subject), tensor)
        if dtype_name(tensor) != "int64":
            self._demand_or(HasDtype(subject), tensor)
            if tensor.dtype == torch.uint64:
                _refuse_large(tensor.cpu().numpy(), subject)  # syncs: the price of coercing uint64
            tensor = self._record(tensor, tensor.to(torch.int64), argument, dtype_name)
        if tensor.device != device:
            self._demand_or(OnDevice(subject, "the batch", lambda _: device), tensor)
            _refuse_meta(tensor, subject)
            tensor = self._record(tensor, tensor.to(device), argument, lambda t: str(t.device))
        if not tensor.is_contiguous():
            if tensor.dim() == 1:
                self._demand_or(IsContiguous(subject), tensor)
            tensor = self._record(tensor, tensor.contiguous(), argument, _how_strided)
        return tensor

    def _from_array(self, value: Any, subject: str, argument: str) -> Int64Array:
        """A numpy array or a tensor, in the order dimensions, dtype, device, strides."""
        self._demand(IsDense(subject), value)
        self._demand(HasNDim(subject, 1), value)
        self._demand(IsInteger(subject), value)
        if dtype_name(value) != "int64":
            self._demand_or(HasDtype(subject), value)
        if isinstance(value, torch.Tensor):
            if value.device.type != "cpu":
                cpu = torch.device("cpu")
                self._demand_or(OnDevice(subject, "host data", lambda _: cpu), value)
                _refuse_meta(value, subject)
                value = self._record(value, value.cpu(), argument, lambda t: str(t.device))
            value = value.numpy()
        if value.dtype != np.int64:
            if value.dtype.kind == "u" and value.dtype.itemsize == 8:
                _refuse_large(value, subject)
            value = self._record(value, value.astype(np.int64), argument, dtype_name)
        if not value.flags.c_contiguous:
            self._demand_or(IsContiguous(subject), value)
            value = self._record(value, np.ascontiguousarray(value), argument, _how_strided)
        array_: Int64Array = value
        return array_

    def _from_numbers(self, values: Sequence[Any], argument: str, request: int | None, req_id: object) -> Int64Array:
        """A list, tuple or range of integers: Python's or numpy's scalars, whose values carry their own width."""
        try:
            if isinstance(values, range):
                return np.arange(values.start, values.stop, values.step, dtype=np.int64)
            if not set(map(type, values)) <= {int}:
                for position, value in enumerate(values):
                    if not is_number(value):
                        says, error = f"must be integers, got {type(value).__name__} {value!r}", RaggedTypeError
                        raise self._at(error, says, value, "int64", argument, request, req_id, position)
            return np.array(values, dtype=np.int64)
        except OverflowError:
            position = next(i for i, value in enumerate(values) if not -INT64_MAX - 1 <= value <= INT64_MAX)
            says, value = f"must fit int64, got {values[position]}", values[position]
            raise self._at(RaggedOverflowError, says, value, INT64_MAX, argument, request, req_id, position) from None

    def _at(
        self,
        error: type[RaggedError],
        says: str,
        got: Any,
        bound: Any,
        argument: str,
        request: int | None,
        req_id: object,
        position: int,
    ) -> RaggedError:
        """The refusal of one element: of a request's tokens, of flat tokens, or of a column that has one a request."""
        if request is not None:
            where = f"{request_name(request, req_id)}, position {position}"
        elif argument == "token_ids":
            where = f"position {position}"
        else:
            request = self.first_request + position
            req_id = self.req_ids[position] if self.req_ids is not None and position < len(self.req_ids) else None
            where = request_name(request, req_id)
        message = f"{argument} {says} at {where}"
        return error(message, argument=argument, request=request, req_id=req_id, got=got, bound=bound)

    def _demand(self, rule: Any, value: Any) -> None:
        error = rule.broken({rule.argument: value})
        if error is not None:
            raise error

    def _demand_or(self, rule: Any, value: Any) -> None:
        """A demand that coerce mode meets by converting."""
        if self.mode is Mode.STRICT:
            self._demand(rule, value)

    def _record(self, before: Any, after: Any, argument: str, aspect: Any) -> Any:
        coercion = Coercion(argument, aspect(before), aspect(after), int(after.nbytes))
        self.coercions.append(coercion)
        _log_once(coercion)
        return after


def _subject(argument: str, request: int | None, req_id: object) -> str:
    return argument if request is None else f"{argument} of {request_name(request, req_id)}"


def _as_array(value: Any, subject: str) -> Any:
    """A tensor or numpy array over the same memory, for anything that can be read as one."""
    if isinstance(value, np.ma.MaskedArray):  # as an array it would lose its mask
        raise _not_a_sequence(value, subject)
    if isinstance(value, torch.Tensor | np.ndarray):
        return value
    if isinstance(value, np.generic | str) or value is None:
        raise _not_a_sequence(value, subject)
    is_buffer = isinstance(value, array.array | bytes | bytearray | memoryview) or hasattr(value, "__buffer__")
    if not is_buffer and hasattr(value, "__dlpack__"):
        return _from_dlpack(value, subject)
    try:
        return np.asarray(memoryview(value))  # Python 3.11 cannot be asked whether an object exports a buffer
    except TypeError:
        raise _not_a_sequence(value, subject) from None
    except (ValueError, BufferError) as cause:
        raise RaggedValueError(f"{subject} could not be read as a buffer: {cause}", got=type(value).__name__) from cause


def _from_dlpack(value: Any, subject: str) -> Any:
    """numpy for host memory (it takes read-only exports), torch for a device's."""
    try:
        on_host = not hasattr(value, "__dlpack_device__") or value.__dlpack_device__()[0] in (1, 3)
        return np.from_dlpack(value) if on_host else torch.utils.dlpack.from_dlpack(value)
    except Exception as cause:  # an exporter may raise anything; all of it is one refusal here
        raise RaggedValueError(
            f"{subject} could not be read through __dlpack__: {cause}", got=type(value).__name__
        ) from cause


def _not_a_sequence(value: Any, subject: str) -> RaggedTypeError:
    return RaggedTypeError(
        f"{subject} must be a list, tuple, range, array or tensor of integers, got {type(value).__name__}",
        got=type(value).__name__,
    )


def _refuse_large(value: npt.NDArray[np.uint64], subject: str) -> None:
    too_large = value > INT64_MAX
    if too_large.any():
        position = int(too_large.argmax())
        raise RaggedOverflowError(
            f"{subject} must fit int64, got {value[position]} at position {position}",
            argument=subject,
            got=int(value[position]),
            bound=INT64_MAX,
        )


def _refuse_meta(tensor: torch.Tensor, subject: str) -> None:
    if device_of(tensor).type == "meta":
        raise RaggedValueError(f"{subject} is on meta, which holds no data", argument=subject, got="meta")


def _how_strided(value: Any) -> str:
    contiguous = value.is_contiguous() if isinstance(value, torch.Tensor) else value.flags.c_contiguous
    return "contiguous" if contiguous else "strided"
