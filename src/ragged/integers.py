"""Integer arguments: what is one, and in what words it is refused."""

from __future__ import annotations

from typing import Any

import numpy as np

from ragged.errors import RaggedError, RaggedOverflowError, RaggedTypeError, RaggedValueError, request_name
from ragged.rules import INT64_MAX


def is_number(value: Any) -> bool:
    """True for Python's and numpy's integer scalars; a bool or a time is none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool | np.timedelta64)


def as_int(
    value: Any, argument: str, *, least: int | None = None, request: int | None = None, req_id: object = None
) -> int:
    """An integer argument as a Python int that fits int64 and is not below ``least``.

    Raises: RaggedTypeError, RaggedOverflowError, RaggedValueError, in this order.
    """
    kind: type[RaggedError]
    bound: int | None = None
    if not is_number(value):
        kind, says = RaggedTypeError, f"must be an int, got {type(value).__name__} {value!r}"
    elif not -INT64_MAX - 1 <= value <= INT64_MAX:
        kind, says, bound = RaggedOverflowError, f"must fit int64, got {value}", INT64_MAX
    elif least is not None and value < least:
        kind, says, bound = RaggedValueError, f"must be at least {least}, got {value}", least
    else:
        return int(value)
    where = "" if request is None else f" at {request_name(request, req_id)}"
    raise kind(f"{argument} {says}{where}", argument=argument, request=request, req_id=req_id, got=value, bound=bound)
