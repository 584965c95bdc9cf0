"""What one request is held against: the invariants of a layout, request by request, and their words."""

from __future__ import annotations

from typing import Any

import attrs

from ragged.convert import Choice
from ragged.errors import RaggedOverflowError, RaggedTypeError, RaggedValueError, request_name
from ragged.integers import as_int
from ragged.rules import INT64_MAX


class Overflow(Choice):
    """What happens to a segment that reaches beyond ``max_context_len``: an error, or its tail is dropped."""

    RAISE = "raise"
    TRUNCATE = "truncate"


def _as_shape(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, tuple | list) or len(value) != 2:
        error = RaggedValueError if isinstance(value, tuple | list) else RaggedTypeError
        raise error(f"pool_shape must be (max_reqs, max_context_len), got {value!r}", argument="pool_shape", got=value)
    return as_int(value[0], "pool_shape", least=0), as_int(value[1], "pool_shape", least=0)


def _as_row(value: Any) -> int | None:
    return None if value is None else as_int(value, "padding_row", least=0)


def _as_max_reqs(value: Any) -> int:
    return as_int(value, "max_reqs", least=0)


def _as_max_tokens(value: Any) -> int:
    return as_int(value, "max_tokens", least=0)


@attrs.frozen
class Capacity:
    """Sizes of the buffers that every batch of a builder is packed into, so that their addresses never change.

    Args:
        max_reqs: requests; those that a batch does not use are empty, and point to the padding row.
        max_tokens: tokens of all requests together.
    """

    max_reqs: int = attrs.field(converter=_as_max_reqs)
    max_tokens: int = attrs.field(converter=_as_max_tokens)


def _as_capacity(value: Any) -> Capacity | None:
    if value is None or isinstance(value, Capacity):
        return value
    got = type(value).__name__
    raise RaggedTypeError(f"capacity must be a Capacity, got {got}", argument="capacity", got=got)


@attrs.frozen
class Bounds:
    """What a layout is held against.

    Args:
        pool_shape: ``(max_reqs, max_context_len)``, or None where the pool is not known yet.
        overflow: what a segment that ends beyond ``max_context_len`` means.
        padding_row: a row that only empty requests may use, any number of them; None where there is none.
        capacity: sizes that a batch must fit, or None for batches that are as large as they are.
    """

    pool_shape: tuple[int, int] | None = attrs.field(default=None, converter=_as_shape)
    overflow: Overflow = attrs.field(default=Overflow.RAISE, converter=Overflow)
    padding_row: int | None = attrs.field(default=None, converter=_as_row)
    capacity: Capacity | None = attrs.field(default=None, converter=_as_capacity)

    def check_sizes(self, num_reqs: int, num_tokens: int) -> None:
        """That a whole batch fits the capacity. Raises: RaggedValueError."""
        if self.capacity is None:
            return
        limits = {
            "num_reqs": (num_reqs, "max_reqs", self.capacity.max_reqs),
            "num_tokens": (num_tokens, "max_tokens", self.capacity.max_tokens),
        }
        for argument, (got, name, bound) in limits.items():
            if got > bound:
                says = f"{argument} must not exceed the capacity's {name} {bound}, got {got}"
                raise RaggedValueError(says, argument=argument, got=got, bound=bound)

    def check(self, request: int, row: int, length: int, prefix_len: int, req_id: object = None) -> None:
        """Every invariant of one request. The only place that words them.

        Raises: RaggedValueError, or RaggedOverflowError where ``prefix_len + length`` leaves int64.
        """

        def refuse(argument: str, says: str, got: int, bound: int, error: Any = RaggedValueError) -> None:
            message = f"{argument} {says}, got {got} at {request_name(request, req_id)}"
            raise error(message, argument=argument, request=request, req_id=req_id, got=got, bound=bound)

        end = prefix_len + length
        if length < 0:
            refuse("lengths", "must not be negative", length, 0)
        if row < 0:
            refuse("req_pool_indices", "must not be negative", row, 0)
        if prefix_len < 0:
            refuse("prefix_lens", "must not be negative", prefix_len, 0)
        if end > INT64_MAX:
            refuse("prefix_lens", "plus length must fit int64", end, INT64_MAX, RaggedOverflowError)
        if row == self.padding_row and length > 0:
            refuse("req_pool_indices", f"must not be padding_row {row} for a request with tokens", row, row)
        if self.pool_shape is None:
            return
        max_reqs, max_context_len = self.pool_shape
        if row >= max_reqs:
            refuse("req_pool_indices", f"must be below max_reqs {max_reqs}", row, max_reqs)
        if prefix_len > max_context_len:
            says = f"must not exceed max_context_len {max_context_len}"
            refuse("prefix_lens", says, prefix_len, max_context_len)
        if end > max_context_len and self.overflow is Overflow.RAISE:
            says = f"({prefix_len}) plus length ({length}) must not exceed max_context_len {max_context_len}"
            refuse("prefix_lens", says, end, max_context_len)


def duplicate_row(
    row: int, first: int, second: int, first_id: object = None, second_id: object = None
) -> RaggedValueError:
    """The error for two requests with tokens that claim one row."""
    return RaggedValueError(
        f"req_pool_indices must be unique among requests with tokens, got {row} at both "
        f"{request_name(first, first_id)} and {request_name(second, second_id)}",
        argument="req_pool_indices",
        request=second,
        req_id=second_id,
        got=row,
        bound=first,
    )
