"""The 64-bit mixing that stamps are made of, in Python and in torch: how a token's place in its request is told.

The chain hash of the token at position i is ``ANCHOR + sum over j < i of mix(token_j, position_j)``, modulo 2^64: one
exclusive prefix sum over a request, where a chain of hashes would be a serial walk. ``mix`` is splitmix64's finaliser
(Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014, with the constants of Vigna's
splitmix64.c) on one word, then on the sum of that and the other: one to one in the position, and so strong in both that
a changed, swapped or shifted token moves every hash behind it.
"""

from __future__ import annotations

import torch

from kv_canary.kinds import FIRST, GOLDEN, SECOND

MASK = 2**64 - 1


def signed(value: int) -> int:
    """A number modulo 2^64 as an int64 holds it."""
    value &= MASK
    return value - 2**64 if value >> 63 else value


def finalise(z: int) -> int:
    """splitmix64's finaliser, on Python integers."""
    z &= MASK
    z = (z ^ (z >> 30)) * FIRST & MASK
    z = (z ^ (z >> 27)) * SECOND & MASK
    return z ^ (z >> 31)


def mix(token_id: int, position: int) -> int:
    """A token and its position as one int64."""
    return signed(finalise(finalise(token_id + GOLDEN) + position))


def mix_word(word: int, place: int) -> int:
    """A word of KV bytes at its place, as int64; one to one in the word, so that no single change goes unseen."""
    return signed(finalise(word ^ (place * GOLDEN)))


def finalise_all(z: torch.Tensor) -> torch.Tensor:
    """``finalise`` of int64 tensors; their products wrap like the hardware's."""
    z = (z ^ _shifted(z, 30)) * signed(FIRST)
    z = (z ^ _shifted(z, 27)) * signed(SECOND)
    return z ^ _shifted(z, 31)


def mix_all(token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """``mix`` of int64 tensors."""
    return finalise_all(finalise_all(token_ids + signed(GOLDEN)) + positions)


def mix_words(words: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """``mix_word`` of int64 tensors."""
    return finalise_all(words ^ (places * signed(GOLDEN)))


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical shift: int64's own drags the sign in."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
