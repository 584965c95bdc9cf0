"""The list of tiles is device memory too: where it was overwritten, nothing outside the pool changes."""

from typing import Any

import pytest

INT64_MAX = 2**63 - 1
LENGTHS, ROWS = (30, 1, 0, 9), [5, 6, 7, 3]


@pytest.mark.parametrize("value", [-1, -2, -5, 2**31, 2**32, 2**40, 2**62, INT64_MAX, -(2**62), -(2**63)])
@pytest.mark.parametrize("column", ["request", "tile"])
def test_an_overwritten_line_is_skipped_and_the_others_are_written(target: Any, column: str, value: int) -> None:
    if target.backend == "triton" and not target.tiny:
        pytest.skip("a list needs many tiles; the tiny target has them")
    sequences = [range(100 * r, 100 * r + length) for r, length in enumerate(LENGTHS)]
    with target.tiles():
        batch = target.batch(sequences, ROWS)
        lines = batch.tiles.tolist()
    if target.tiny:
        assert [0, 1] in lines
        batch.tiles[lines.index([0, 1]), ["request", "tile"].index(column)] = value
    framed = target.framed(12, 40)
    target.scatter(batch, framed.pool, target.report())
    framed.assert_border_intact()
    for r, row in enumerate(ROWS):
        expected = [*sequences[r], *[-7] * (40 - LENGTHS[r])]
        if target.tiny and r == 0:
            expected[4:8] = [-7] * 4  # TILE is 4: the skipped line's cells
        assert framed.rows()[row] == expected
    for row in set(range(12)) - set(ROWS):
        assert framed.rows()[row] == [-7] * 40
