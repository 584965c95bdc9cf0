"""The ring of a ViolationLog, as kernels see it: every violation counts, the first ones get a line."""

import triton
import triton.language as tl

from kv_canary import kinds

FOUND_COUNT = tl.constexpr(kinds.FOUND_COUNT)
FREED = tl.constexpr(kinds.FREED)
ENTRY_KIND = tl.constexpr(kinds.ENTRY_KIND)
ENTRY_INDEX = tl.constexpr(kinds.ENTRY_INDEX)
ENTRY_LAUNCH = tl.constexpr(kinds.ENTRY_LAUNCH)
ENTRY_REQUEST = tl.constexpr(kinds.ENTRY_REQUEST)


@triton.jit
def claim(log_ptr, capacity, launch, wrong, kind, request, WIDTH: tl.constexpr):
    """Count every wrong lane; the pointers of their lines, WIDTH int64 each, and which lanes have one.

    ``kind`` and ``request`` are int64 of one shape with ``wrong``. A header that was overwritten leads nowhere else: a
    line is always within the ring.
    """
    zero = tl.zeros_like(request)
    index = tl.atomic_add(log_ptr + FOUND_COUNT + zero, zero + 1, mask=wrong)
    stored = wrong & (index >= 0) & (index - tl.load(log_ptr + FREED) < capacity)
    line = log_ptr + (1 + tl.where(stored, index, 0) % capacity) * WIDTH
    tl.store(line + ENTRY_KIND, kind, mask=stored)
    tl.store(line + ENTRY_INDEX, index + 1, mask=stored)
    tl.store(line + ENTRY_LAUNCH, zero + launch, mask=stored)
    tl.store(line + ENTRY_REQUEST, request, mask=stored)
    return line, stored
