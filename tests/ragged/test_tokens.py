"""Which token ids are allowed, and how many special ones there are."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragged import RaggedError, RaggedTypeError, RaggedValueError
from ragged.tokens import PLACEHOLDER, TokenCounts, TokenRules

INT32_MAX = 2**31 - 1
WIDE = 1_000_000 + 2**61  # case 49: SGLang's multimodal sentinels
PLACEHOLDER_HINT = "pass allow_placeholders=True where -1 means 'not known yet'"
WIDE_HINT = "pass wide_tokens='opaque' where wider ids are meant"


def check(rules: TokenRules, *sequences: list[int], **place: Any) -> TokenCounts:
    flat = np.array([token for sequence in sequences for token in sequence], dtype=np.int64)
    offsets = np.cumsum([0, *map(len, sequences)], dtype=np.int64)
    return rules.check(flat, offsets, **place)


TAKEN: dict[str, tuple[dict[str, Any], list[int], TokenCounts]] = {
    "nothing": ({}, [], TokenCounts()),
    "plain": ({}, [0, 5, INT32_MAX], TokenCounts()),
    # Case 57 and 36: the last id of a vocabulary.
    "last_of_the_vocabulary": ({"vocab_size": 32000}, [0, 31999], TokenCounts()),
    "large_without_vocabulary": ({}, [2**30 + 12345, INT32_MAX], TokenCounts()),
    "placeholders": ({"allow_placeholders": True}, [7, -1, -1], TokenCounts(placeholders=2)),
    "placeholders_with_vocabulary": ({"allow_placeholders": True, "vocab_size": 8}, [7, -1], TokenCounts(1)),
    "wide": ({"wide_tokens": "opaque"}, [5, WIDE, 6, 2**31], TokenCounts(wide=2)),
    "wide_beyond_the_vocabulary": ({"wide_tokens": "opaque", "vocab_size": 8}, [5, WIDE], TokenCounts(wide=1)),
    "both": ({"wide_tokens": "opaque", "allow_placeholders": True}, [-1, WIDE, 5], TokenCounts(1, 1)),
    "vocabulary_beyond_int32": ({"vocab_size": 2**40}, [INT32_MAX], TokenCounts()),
}


@pytest.mark.parametrize(("options", "tokens", "counts"), TAKEN.values(), ids=TAKEN)
def test_allowed_tokens_are_counted(options: dict[str, Any], tokens: list[int], counts: TokenCounts) -> None:
    assert check(TokenRules(**options), tokens) == counts


REFUSED: dict[str, tuple[dict[str, Any], int, str, int, str | None]] = {
    # Case 12, 36: -1 in a batch meant for model input.
    "placeholder": ({}, -1, "must not be negative", 0, PLACEHOLDER_HINT),
    "negative": ({}, -2, "must not be negative", 0, None),
    "most_negative": ({}, -(2**63), "must not be negative", 0, None),
    # Case 57: -9 and -2 with allow_placeholders.
    "negative_beside_placeholders": ({"allow_placeholders": True}, -2, "must not be negative", 0, None),
    "very_negative_beside_placeholders": ({"allow_placeholders": True}, -9, "must not be negative", 0, None),
    "negative_beside_wide": ({"wide_tokens": "opaque"}, -2, "must not be negative", 0, None),
    "placeholder_beside_wide": ({"wide_tokens": "opaque"}, -1, "must not be negative", 0, PLACEHOLDER_HINT),
    "one_beyond_the_vocabulary": ({"vocab_size": 5}, 5, "must be below vocab_size 5", 5, None),
    "large_beyond_the_vocabulary": ({"vocab_size": 5}, INT32_MAX, "must be below vocab_size 5", 5, None),
    "below_wide_but_beyond_the_vocabulary": (
        {"vocab_size": 5, "wide_tokens": "opaque"},
        INT32_MAX,
        "must be below vocab_size 5",
        5,
        None,
    ),
    "one_beyond_int32": ({}, 2**31, f"must be at most {INT32_MAX}", INT32_MAX, WIDE_HINT),
    # Case 49: refused by name by default.
    "multimodal": ({}, WIDE, f"must be at most {INT32_MAX}", INT32_MAX, WIDE_HINT),
    "wide_inside_a_wide_vocabulary": (
        {"vocab_size": 2**40},
        2**31,
        f"must be at most {INT32_MAX}",
        INT32_MAX,
        WIDE_HINT,
    ),
}


@pytest.mark.parametrize(("options", "token", "reason", "bound", "note"), REFUSED.values(), ids=REFUSED)
def test_a_refused_token_is_named_with_its_request_and_position(
    refused: Any, options: dict[str, Any], token: int, reason: str, bound: int, note: str | None
) -> None:
    with refused(
        RaggedValueError,
        f"token_ids {reason}, got {token} at request 12 (id 'c'), position 1",
        argument="token_ids",
        request=12,
        req_id="c",
        got=token,
        bound=bound,
        note=note,
    ):
        check(TokenRules(**options), [0, 1], [], [2, token, 3], first_request=10, req_ids=("a", "b", "c"))


def test_the_first_refused_token_is_the_one_that_is_named() -> None:
    with pytest.raises(RaggedValueError, match=r"got -5 at request 1, position 0$"):
        check(TokenRules(), [1], [-5, 2**40], [-6])


@pytest.mark.parametrize("vocab_size", [True, 5.0, "5"], ids=repr)
def test_a_vocabulary_size_is_an_integer(refused: Any, vocab_size: Any) -> None:
    text = f"vocab_size must be an int, got {type(vocab_size).__name__} {vocab_size!r}"
    with refused(RaggedTypeError, text, argument="vocab_size", got=vocab_size):
        TokenRules(vocab_size=vocab_size)


@pytest.mark.parametrize("vocab_size", [0, -1])
def test_a_vocabulary_has_at_least_one_token(refused: Any, vocab_size: int) -> None:
    text = f"vocab_size must be at least 1, got {vocab_size}"
    with refused(RaggedValueError, text, argument="vocab_size", got=vocab_size, bound=1):
        TokenRules(vocab_size=vocab_size)


def test_a_vocabulary_size_may_be_numpys() -> None:
    assert TokenRules(vocab_size=np.int64(5)) == TokenRules(vocab_size=5)


@pytest.mark.parametrize("allow", ["false", 1, None], ids=repr)
def test_whether_placeholders_are_allowed_is_a_bool(refused: Any, allow: Any) -> None:
    text = f"allow_placeholders must be a bool, got {type(allow).__name__} {allow!r}"
    with refused(RaggedTypeError, text, argument="allow_placeholders", got=allow):
        TokenRules(allow_placeholders=allow)
    assert TokenRules(allow_placeholders=np.bool_(True)).allow_placeholders


def test_counts_add_up() -> None:
    assert TokenCounts(1, 2) + TokenCounts(3, 4) == TokenCounts(4, 6)


def allowed(token: int, vocab_size: int | None, placeholders: bool, opaque: bool) -> bool:
    """One token at a time, by the words of the table."""
    if token == PLACEHOLDER:
        return placeholders
    if token < 0:
        return False
    if token > INT32_MAX:
        return opaque
    return vocab_size is None or token < vocab_size


EDGES = (-(2**63), -2, -1, 0, 4, 5, 6, INT32_MAX, 2**31, 2**62, 2**63 - 1)


@given(
    sequences=st.lists(st.lists(st.sampled_from(EDGES) | st.integers(0, 6), max_size=4), max_size=6),
    vocab_size=st.sampled_from([None, 1, 5, INT32_MAX, 2**31, 2**40]),
    placeholders=st.booleans(),
    opaque=st.booleans(),
)
def test_the_vectorised_pass_agrees_with_one_token_at_a_time(
    sequences: list[list[int]], vocab_size: int | None, placeholders: bool, opaque: bool
) -> None:
    rules = TokenRules(vocab_size, placeholders, "opaque" if opaque else "refuse")
    culprit = None
    for request, sequence in enumerate(sequences):
        for token in sequence:
            if culprit is None and not allowed(token, vocab_size, placeholders, opaque):
                culprit = (request, token)
    try:
        counts = check(rules, *sequences)
    except RaggedError as error:
        assert (error.request, error.got) == culprit
    else:
        flat = [token for sequence in sequences for token in sequence]
        assert culprit is None
        assert counts == TokenCounts(flat.count(-1), sum(token > INT32_MAX for token in flat))
