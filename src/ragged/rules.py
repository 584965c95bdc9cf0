"""What an array must be, as values: dimensions, dtype, length, device, strides, overlap.

A rule names its argument, holds or does not, and says so in words. Rules read only metadata (shape, dtype, strides,
device), never elements, so applying them costs no device sync. numpy arrays and torch tensors are both understood.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import attrs
import numpy as np
import torch

from ragged.errors import RaggedError, RaggedTypeError, RaggedValueError

Arrays = Mapping[str, Any]

INT64 = "int64"
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1


class Rule(Protocol):
    """One demand on one argument."""

    @property
    def argument(self) -> str: ...

    def broken(self, arrays: Arrays) -> RaggedError | None:
        """The error to raise, or None where the rule holds."""
        ...


def apply(rules: Iterable[Rule], arrays: Arrays, *, where: str = "") -> None:
    """Raise the first broken rule's error, its message prefixed by ``where``."""
    for rule in rules:
        error = rule.broken(arrays)
        if error is not None:
            error.args = (where + error.args[0],)
            raise error


def dtype_name(array: Any) -> str:
    """``int64`` for both ``np.int64`` and ``torch.int64``; ``>i8`` for a big-endian array."""
    return str(array.dtype).removeprefix("torch.")


def device_of(array: Any) -> torch.device:
    """The device of a tensor; the CPU for a numpy array."""
    return array.device if isinstance(array, torch.Tensor) else torch.device("cpu")


def strides_of(array: Any) -> tuple[int, ...]:
    """Strides in elements."""
    if isinstance(array, torch.Tensor):
        return array.stride()
    return tuple(stride // array.itemsize for stride in array.strides)


def extent_of(array: torch.Tensor) -> tuple[int, int]:
    """First byte and one past the last byte that the elements of a tensor can touch."""
    if array.numel() == 0:
        return (0, 0)
    last = sum((size - 1) * stride for size, stride in zip(array.shape, array.stride(), strict=True))
    return array.data_ptr(), array.data_ptr() + (last + 1) * array.element_size()


def _shape(array: Any) -> tuple[int, ...]:
    return tuple(array.shape)


@attrs.frozen
class HasNDim:
    """``argument`` has ``ndim`` dimensions."""

    argument: str
    ndim: int

    def broken(self, arrays: Arrays) -> RaggedError | None:
        array = arrays[self.argument]
        if array.ndim == self.ndim:
            return None
        return RaggedValueError(
            f"{self.argument} must be {self.ndim}-D, got shape {_shape(array)}",
            argument=self.argument,
            got=_shape(array),
            bound=self.ndim,
        )


@attrs.frozen
class HasDtype:
    """``argument`` has exactly this dtype, by name."""

    argument: str
    dtype: str = INT64

    def broken(self, arrays: Arrays) -> RaggedError | None:
        array = arrays[self.argument]
        if dtype_name(array) == self.dtype:
            return None
        return RaggedTypeError(
            f"{self.argument} must be {self.dtype}, got {array.dtype}",
            argument=self.argument,
            got=str(array.dtype),
            bound=self.dtype,
            hint="make it int64 where it is made, or pass mode='coerce'" if self.dtype == INT64 else None,
        )


@attrs.frozen
class HasLength:
    """``argument`` has as many elements as ``expected(arrays)`` says; ``meaning`` spells that number out."""

    argument: str
    meaning: str
    expected: Callable[[Arrays], int]

    def broken(self, arrays: Arrays) -> RaggedError | None:
        got, bound = int(arrays[self.argument].shape[0]), self.expected(arrays)
        if got == bound:
            return None
        return RaggedValueError(
            f"{self.argument} length {got} != {self.meaning} ({bound})",
            argument=self.argument,
            got=got,
            bound=bound,
        )


@attrs.frozen
class OnDevice:
    """``argument`` is on the device that ``expected(arrays)`` names."""

    argument: str
    whose: str
    expected: Callable[[Arrays], torch.device]

    def broken(self, arrays: Arrays) -> RaggedError | None:
        got, bound = device_of(arrays[self.argument]), self.expected(arrays)
        if got == bound:
            return None
        return RaggedValueError(
            f"{self.argument} is on {got}, {self.whose} is on {bound}",
            argument=self.argument,
            got=str(got),
            bound=str(bound),
            hint=f"move {self.argument} to {bound}, or pass mode='coerce'",
        )


@attrs.frozen
class IsContiguous:
    """``argument`` lies without gaps, row by row."""

    argument: str

    def broken(self, arrays: Arrays) -> RaggedError | None:
        array = arrays[self.argument]
        strides = strides_of(array)
        expected = tuple(math.prod(array.shape[axis + 1 :]) for axis in range(len(strides)))
        facts = zip(array.shape, strides, expected, strict=True)
        if 0 in array.shape or all(size < 2 or stride == wanted for size, stride, wanted in facts):
            return None
        return RaggedValueError(
            f"{self.argument} must be contiguous, got strides {strides}",
            argument=self.argument,
            got=strides,
            bound=expected,
            hint=f"call .contiguous() on {self.argument}, or pass mode='coerce'",
        )


@attrs.frozen
class HasOwnRows:
    """``argument``, 2-D, has a last stride of 1 and rows that share no cell: a write lands where it is meant."""

    argument: str

    def broken(self, arrays: Arrays) -> RaggedError | None:
        array = arrays[self.argument]
        (rows, columns), (row_stride, column_stride) = array.shape, array.stride()
        if (columns < 2 or column_stride == 1) and (rows < 2 or row_stride >= columns):
            return None
        return RaggedValueError(
            f"{self.argument} must have a last stride of 1 and a row stride of at least {columns}, "
            f"got strides {(row_stride, column_stride)}",
            argument=self.argument,
            got=(row_stride, column_stride),
            bound=(columns, 1),
            hint=f"pass the table itself: a copy of {self.argument} would swallow the write",
        )


@attrs.frozen
class HasColumns:
    """``argument``, 2-D, has so many columns, and rows enough."""

    argument: str
    columns: int
    least_rows: int = 0

    def broken(self, arrays: Arrays) -> RaggedError | None:
        rows, columns = _shape(arrays[self.argument])
        if columns == self.columns and rows >= self.least_rows:
            return None
        which = "columns" if columns != self.columns else "rows at least"
        got, bound = (columns, self.columns) if columns != self.columns else (rows, self.least_rows)
        says = f"{self.argument} must have {bound} {which}, got {got}"
        return RaggedValueError(says, argument=self.argument, got=got, bound=bound)


@attrs.frozen
class IsAligned:
    """``argument`` begins at a multiple of so many bytes."""

    argument: str
    num_bytes: int

    def broken(self, arrays: Arrays) -> RaggedError | None:
        got = arrays[self.argument].data_ptr() % self.num_bytes
        if got == 0:
            return None
        says = f"{self.argument} must be aligned to {self.num_bytes} bytes, got an address {got} beyond"
        return RaggedValueError(says, argument=self.argument, got=got, bound=self.num_bytes)


@attrs.frozen
class NoOverlap:
    """``argument`` shares no memory with ``other``."""

    argument: str
    other: str

    def broken(self, arrays: Arrays) -> RaggedError | None:
        first, last = extent_of(arrays[self.argument])
        other_first, other_last = extent_of(arrays[self.other])
        if last <= other_first or other_last <= first:
            return None
        return RaggedValueError(
            f"{self.argument} shares memory with {self.other}",
            argument=self.argument,
            got=(first, last),
            bound=(other_first, other_last),
            hint=f"copy {self.argument} first: the write would change what is still being read",
        )


@attrs.frozen
class IsDense:
    """``argument`` is an array, or a tensor that is neither sparse nor nested: its elements lie where strides say."""

    argument: str

    def broken(self, arrays: Arrays) -> RaggedError | None:
        array = arrays[self.argument]
        if not isinstance(array, torch.Tensor) or (array.layout == torch.strided and not array.is_nested):
            return None
        got = "torch.nested" if array.layout == torch.strided else str(array.layout)
        return RaggedTypeError(
            f"{self.argument} must be a dense tensor, got layout {got}",
            argument=self.argument,
            got=got,
            bound="torch.strided",
        )


@attrs.frozen
class IsInteger:
    """``argument`` holds integers; a bool is none."""

    argument: str

    def broken(self, arrays: Arrays) -> RaggedError | None:
        array = arrays[self.argument]
        if is_integer(array):
            return None
        return RaggedTypeError(
            f"{self.argument} must be int64, got {array.dtype}",
            argument=self.argument,
            got=str(array.dtype),
            bound=INT64,
        )


INTEGER_DTYPES = frozenset({"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"})
"""Names of the dtypes that may become int64; ``bool`` is not a number here."""


def is_integer(array: Any) -> bool:
    """True for signed and unsigned integers of any byte order; false for bool."""
    if isinstance(array, np.ndarray):
        return array.dtype.kind in "iu"
    return dtype_name(array) in INTEGER_DTYPES
