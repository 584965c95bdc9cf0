"""The oracle itself, held to numbers worked out by hand, and the plain loop that the issue names."""

from typing import Any

import pytest
import torch
from hypothesis import given
from strategies import RawScatter, raw_scatters

from kv_canary import (
    GuardReport,
    launch_scatter_req_token_ids_kernel,
    reference,
    scatter_req_token_ids_torch_reference,
)

INT64 = torch.int64


def _scatter(
    columns: tuple[list[int], list[int], list[int], list[int] | None], shape: tuple[int, int]
) -> tuple[list[list[int]], list[list[int]]]:
    """Rows of the pool and lines of the report."""
    pool, report = torch.full(shape, -7, dtype=torch.int32), GuardReport.allocate("cpu")
    tensors = [None if column is None else torch.tensor(column, dtype=INT64) for column in columns]
    reference.scatter(*tensors, pool, report.table, 4)  # type: ignore[arg-type]
    return pool.tolist(), report.table.tolist()


NOTHING = [0, 0, 0, 0, 0]


def test_a_sound_scatter_by_hand() -> None:
    pool, lines = _scatter(([1, 2, 3, 4], [0, 3, 3, 4], [2, 0, 1], [0, 0, 1]), (3, 3))
    assert pool == [[-7, -7, -7], [-7, 4, -7], [1, 2, 3]]
    assert lines == [NOTHING] * 5


def test_every_fault_by_hand() -> None:
    # kind: count, launch, request, position, value
    pool, lines = _scatter(
        ([1, 2, 2**31, 4, 5, 6], [0, 2, 4, 3, 6], [0, 5, 1, 2], [2, 0, 4, -1]),
        (4, 3),
    )
    assert pool == [[-7, -7, 1], [-7] * 3, [-7] * 3, [-7] * 3]
    assert lines == [
        [1, 4, 2, 4, 3],  # request 2 goes from 4 to 3
        [1, 4, 1, 0, 5],  # request 1, row 5
        [2, 4, 2, 0, 4],  # request 2, prefix 4, and request 3, prefix -1
        [1, 4, 1, 0, 2**31],  # the third token is the first of request 1
        [1, 4, 0, 1, 1],  # request 0 wrote one token and dropped one
    ]


def test_without_prefixes_every_request_starts_at_column_0() -> None:
    pool, _ = _scatter(([1, 2], [0, 1, 2], [1, 0], None), (2, 2))
    assert pool == [[2, -7], [1, -7]]


# Cases 30, 49: the plain loop and the guarded oracle are two ideas; on sound input they agree.
@given(raw=raw_scatters())
def test_the_plain_loop_the_oracle_and_the_launcher_agree_on_sound_input(raw: RawScatter) -> None:
    shape = (raw.max_reqs, raw.max_context_len)
    loop, launched = torch.full(shape, -7, dtype=torch.int32), torch.full(shape, -7, dtype=torch.int32)
    given_columns = {name: values for name, values in raw.columns.items() if name != "prefix_lens"}
    tensors = {name: torch.tensor(values, dtype=INT64) for name, values in given_columns.items()}
    scatter_req_token_ids_torch_reference(**tensors, pool_out=loop)
    launch_scatter_req_token_ids_kernel(**tensors, pool_out=launched)
    pool, lines = _scatter((*given_columns.values(), None), shape)  # type: ignore[arg-type]
    assert pool == loop.tolist() == launched.tolist()
    assert [line[0] for line in lines[:4]] == [0, 0, 0, 0]


def test_the_plain_loop_truncates_silently_and_takes_four_arguments_by_name() -> None:
    pool = torch.full((2, 3), -7, dtype=torch.int32)
    columns: dict[str, Any] = {"flat_in": [1, 2, 3, 4, 5], "offsets": [0, 4, 5], "req_pool_indices": [1, 0]}
    tensors = {name: torch.tensor(values, dtype=INT64) for name, values in columns.items()}
    scatter_req_token_ids_torch_reference(**tensors, pool_out=pool)
    assert pool.tolist() == [[5, -7, -7], [1, 2, 3]]
    with pytest.raises(TypeError):
        scatter_req_token_ids_torch_reference(*tensors.values(), pool)  # type: ignore[misc]
