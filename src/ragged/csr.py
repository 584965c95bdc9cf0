"""CSR offsets from outside: the lengths that they say, or what is wrong with them."""

from __future__ import annotations

import numpy as np

from ragged.convert import Int64Array
from ragged.errors import RaggedValueError


def lengths_of(offsets: Int64Array) -> Int64Array:
    """int64 ``[num_reqs]`` from CSR ``offsets``; raises RaggedValueError where they are not CSR offsets."""
    if len(offsets) == 0:
        raise RaggedValueError(
            "offsets length 0 must be at least 1: zero requests have offsets [0]", argument="offsets", got=0, bound=1
        )
    if offsets[0] != 0:
        raise RaggedValueError(
            f"offsets must start at 0, got {offsets[0]} at request 0",
            argument="offsets",
            request=0,
            got=int(offsets[0]),
            bound=0,
        )
    decreases = offsets[1:] < offsets[:-1]
    if decreases.any():
        request = int(decreases.argmax())
        start, end = int(offsets[request]), int(offsets[request + 1])
        raise RaggedValueError(
            f"offsets must not decrease, got {start} then {end} at request {request}",
            argument="offsets",
            request=request,
            got=end,
            bound=start,
        )
    return np.diff(offsets)
