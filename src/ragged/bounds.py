"""What one request is held against: the invariants of a layout, request by request, and their words."""

from __future__ import annotations

from typing import Any

import attrs

from ragged.convert import Choice
from ragged.errors import RaggedOverflowError, RaggedTypeError, RaggedValueError, request_name
from ragged.rules import INT64_MAX, as_int


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


@attrs.frozen
class Bounds:
    """What a layout is held against.

    Args:
        pool_shape: ``(max_reqs, max_context_len)``, or None where the pool is not known yet.
        overflow: what a segment that ends beyond ``max_context_len`` means.
        padding_row: a row that only empty requests may use, any number of them; None where there is none.
    """

    pool_shape: tuple[int, int] | None = attrs.field(default=None, converter=_as_shape)
    overflow: Overflow = attrs.field(default=Overflow.RAISE, converter=Overflow)
    padding_row: int | None = attrs.field(default=None, converter=_as_row)

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
