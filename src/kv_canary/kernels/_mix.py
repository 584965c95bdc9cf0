"""The 64-bit mixing that stamps are made of; the same numbers as ``kv_canary.mixing``."""

import triton
import triton.language as tl

from kv_canary import kinds

GOLDEN = tl.constexpr(kinds.GOLDEN)
FIRST = tl.constexpr(kinds.FIRST)
SECOND = tl.constexpr(kinds.SECOND)


@triton.jit
def finalise(z):
    """splitmix64's finaliser, uint64 to uint64, one to one."""
    z = (z ^ (z >> 30)) * FIRST
    z = (z ^ (z >> 27)) * SECOND
    return z ^ (z >> 31)


@triton.jit
def mix(token_ids, positions):
    """A token and its position, int64 each, as one int64."""
    inner = finalise(token_ids.to(tl.uint64, bitcast=True) + GOLDEN)
    return finalise(inner + positions.to(tl.uint64, bitcast=True)).to(tl.int64, bitcast=True)


@triton.jit
def mix_words(words, places):
    """Words of KV bytes and their places, int64 each: a word at its place, as int64, one to one in the word."""
    z = words.to(tl.uint64, bitcast=True) ^ (places.to(tl.uint64, bitcast=True) * GOLDEN)
    return finalise(z).to(tl.int64, bitcast=True)
