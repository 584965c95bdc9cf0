"""Finding the request that owns a token, shared by the kernels."""

import triton
import triton.language as tl


@triton.jit
def count_ends(offsets_ptr, num_reqs, token, WINDOW: tl.constexpr):
    """How many requests end at or before ``token``: the index of the request that owns it.

    A window of ends is loaded and counted, coarse windows first: one load for up to WINDOW requests, two for WINDOW^2,
    instead of a chain of log2(num_reqs) dependent loads. Never beyond [0, num_reqs], whatever the offsets hold.
    """
    lanes = tl.arange(0, WINDOW)
    first = tl.zeros([], dtype=tl.int64)
    left = first + num_reqs
    while left > WINDOW:
        step = (left + WINDOW - 1) // WINDOW
        sampled = (lanes + 1) * step - 1  # [WINDOW] int64
        ends = tl.load(offsets_ptr + 1 + first + sampled, mask=sampled < left, other=token + 1)  # [WINDOW] int64
        skipped = tl.sum((ends <= token).to(tl.int64), axis=0) * step
        first += skipped
        left = tl.minimum(step, left - skipped)
    ends = tl.load(offsets_ptr + 1 + first + lanes, mask=lanes < left, other=token + 1)  # [WINDOW] int64
    return first + tl.sum((ends <= token).to(tl.int64), axis=0)


@triton.jit
def bisect_ends(offsets_ptr, first, last, tokens):
    """For every token, how many requests end at or before it, known to be in [first, last]."""
    low = tl.zeros_like(tokens) + first  # [BLOCK] int64
    high = tl.zeros_like(tokens) + last  # [BLOCK] int64
    left = last - first
    while left > 0:
        middle = (low + high) // 2
        ends = tl.load(offsets_ptr + 1 + middle, mask=low < high, other=0)  # [BLOCK] int64
        right = (ends <= tokens) & (low < high)
        low = tl.where(right, middle + 1, low)
        high = tl.where(right, high, middle)
        left = left // 2
    return low
