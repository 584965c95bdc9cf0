"""Which backend runs, and what is said where it cannot."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kv_canary import backends, launch_scatter_req_token_ids_kernel, scatter
from ragged import RaggedBatch, RaggedValueError

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a machine that has no triton."""
    monkeypatch.setattr(backends, "has_triton", lambda: False)
    backends._resolve.cache_clear()
    yield
    backends._resolve.cache_clear()


@pytest.fixture
def not_interpreting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(backends, "has_triton", lambda: True)
    backends._resolve.cache_clear()
    yield
    backends._resolve.cache_clear()


def test_auto_is_torch_on_the_cpu() -> None:
    assert backends.resolve("auto", CPU).__name__ == "kv_canary.torch_backend"
    assert backends.resolve("torch", CPU).__name__ == "kv_canary.torch_backend"


def test_auto_is_torch_everywhere_without_triton(without_triton: None) -> None:
    assert backends.resolve("auto", CPU).__name__ == "kv_canary.torch_backend"
    assert backends.resolve("auto", CUDA).__name__ == "kv_canary.torch_backend"


def test_auto_is_triton_on_cuda() -> None:
    pytest.importorskip("triton")
    assert backends.resolve("auto", CUDA).__name__ == "kv_canary.triton_backend"


def test_triton_that_is_not_installed_is_an_error_and_no_other_backend(refused: Any, without_triton: None) -> None:
    for device in (CPU, CUDA):
        with refused(RaggedValueError, "backend triton is not installed", argument="backend", got="triton"):
            backends.resolve("triton", device)


def test_triton_on_the_cpu_says_what_to_set(refused: Any, not_interpreting: None) -> None:
    note = "set TRITON_INTERPRET=1 before triton is imported, or use backend='torch'"
    pool = torch.full((1, 2), -7, dtype=torch.int32)
    batch = RaggedBatch.from_sequences([[1]], req_pool_indices=[0])
    says = "backend triton cannot run on the CPU"
    with refused(RaggedValueError, says, argument="backend", got="triton", note=note):
        scatter(batch, pool, backend="triton")
    assert pool.tolist() == [[-7, -7]]


@pytest.mark.parametrize("backend", ["cuda", "Triton", "", None, 1, ["triton"]])
def test_an_unknown_backend_is_refused_by_both_entries(refused: Any, backend: Any) -> None:
    pool = torch.full((1, 2), -7, dtype=torch.int32)
    batch = RaggedBatch.from_sequences([[1]], req_pool_indices=[0])
    text = f"backend must be one of auto, triton, torch, got {backend!r}"
    with refused(RaggedValueError, text, argument="backend", got=backend):
        scatter(batch, pool, backend=backend)
    columns = {"flat_in": batch.token_ids, "offsets": batch.offsets, "req_pool_indices": batch.req_pool_indices}
    with refused(RaggedValueError, text, argument="backend", got=backend):
        launch_scatter_req_token_ids_kernel(**columns, pool_out=pool, backend=backend)
    assert pool.tolist() == [[-7, -7]]


def test_a_backend_that_compares_like_an_array_is_refused_too() -> None:
    batch = RaggedBatch.from_sequences([[1]], req_pool_indices=[0])
    names: Any = np.array(["auto", "torch"])
    with pytest.raises(RaggedValueError, match=r"^backend must be one of auto, triton, torch, got array\(") as caught:
        scatter(batch, torch.zeros((1, 2), dtype=torch.int32), backend=names)
    assert caught.value.argument == "backend"


@pytest.mark.gpu
def test_auto_on_a_gpu_runs_triton_and_says_the_same_as_torch() -> None:
    batch = RaggedBatch.from_sequences([[1, 2], [3]], req_pool_indices=[1, 0], device="cuda")
    pools = {backend: torch.full((2, 3), -7, dtype=torch.int32, device="cuda") for backend in backends.BACKENDS}
    for backend, pool in pools.items():
        scatter(batch, pool, backend=backend)
    assert {backend: pool.tolist() for backend, pool in pools.items()} == {
        backend: [[3, -7, -7], [1, 2, -7]] for backend in backends.BACKENDS
    }
