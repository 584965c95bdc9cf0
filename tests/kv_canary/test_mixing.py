"""The 64-bit mixing: known numbers, and the same ones in Python and in torch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_canary import kinds
from kv_canary.mixing import finalise, mix, mix_all, mix_word, mix_words, signed

INT64 = st.integers(-(2**63), 2**63 - 1)


def test_the_finaliser_is_splitmix64s() -> None:
    # The first numbers of splitmix64 from seed 0, as its reference gives them.
    assert [finalise(i * kinds.GOLDEN) for i in (1, 2, 3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


@given(INT64, st.integers(0, 2**40))
def test_torch_mixes_as_python_does(token_id: int, position: int) -> None:
    tokens, positions = torch.tensor([token_id]), torch.tensor([position])
    assert mix_all(tokens, positions).tolist() == [mix(token_id, position)]
    assert mix_words(tokens, positions).tolist() == [mix_word(token_id, position)]


@given(INT64, st.integers(0, 2**40), st.integers(0, 63))
def test_a_flipped_bit_moves_about_half_of_the_others(token_id: int, position: int, bit: int) -> None:
    flipped = signed(token_id ^ (1 << bit))
    assert 8 <= ((mix(token_id, position) ^ mix(flipped, position)) % 2**64).bit_count() <= 56
    assert mix_word(token_id, position) != mix_word(flipped, position)


@pytest.mark.parametrize("step", [1, 2, 1000])
def test_a_token_at_another_position_is_another_term(step: int) -> None:
    assert len({mix(7, position) for position in range(0, 1000 * step, step)}) == 1000
