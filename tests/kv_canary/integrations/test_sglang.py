"""Our launcher in SGLang's place, on a stand-in with SGLang's names and signature."""

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from kv_canary import launch_scatter_req_token_ids_kernel as ours
from kv_canary.integrations import sglang
from ragged import RaggedError


def theirs(
    *, flat_in: torch.Tensor, offsets: torch.Tensor, req_pool_indices: torch.Tensor, pool_out: torch.Tensor
) -> None:
    raise AssertionError("SGLang's own was called")


@pytest.fixture(params=sglang.MODULES)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ModuleType]]:
    """``engine(launcher)``: a stand-in for SGLang with this launcher, and a module that imports it from there."""

    def make(launcher: Any = theirs) -> ModuleType:
        parts = request.param.split(".")
        for depth in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType(".".join(parts[:depth])))
        module, user = sys.modules[request.param], ModuleType("sglang.srt.kv_canary.runner")
        for each in (module, user):
            vars(each)[sglang.LAUNCHER] = launcher
        monkeypatch.setitem(sys.modules, user.__name__, user)
        return user

    yield make
    sglang.uninstall()


def test_whoever_has_imported_the_launcher_calls_ours_from_then_on(engine: Callable[..., ModuleType]) -> None:
    user = engine()
    assert sglang.install() == 2
    pool = torch.full((4, 4), -7, dtype=torch.int32)
    vars(user)[sglang.LAUNCHER](
        flat_in=torch.tensor([5, 6]),
        offsets=torch.tensor([0, 2]),
        req_pool_indices=torch.tensor([3]),
        pool_out=pool,
    )
    assert pool[3].tolist() == [5, 6, -7, -7]


def test_it_can_be_undone_and_done_again(engine: Callable[..., ModuleType]) -> None:
    user = engine()
    for _ in range(2):
        sglang.install()
        assert vars(user)[sglang.LAUNCHER] is ours
        sglang.uninstall()
        assert vars(user)[sglang.LAUNCHER] is theirs


def test_installing_again_finds_what_was_imported_since(
    engine: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine()
    sglang.install()
    late = ModuleType("late")
    vars(late)[sglang.LAUNCHER] = theirs
    monkeypatch.setitem(sys.modules, "late", late)
    assert sglang.install() == 3
    assert vars(late)[sglang.LAUNCHER] is ours


def test_another_signature_is_refused_and_nothing_replaced(engine: Callable[..., ModuleType]) -> None:
    def other(flat_in: Any, offsets: Any, pool: Any) -> None: ...

    user = engine(other)
    with pytest.raises(RaggedError, match=r"is not a version that is known: .* takes \(flat_in, offsets, pool\), not"):
        sglang.install()
    assert vars(user)[sglang.LAUNCHER] is other


def test_without_sglang_it_says_so() -> None:
    with pytest.raises(
        RaggedError, match="SGLang's launch_scatter_req_token_ids_kernel was not found: No module named"
    ):
        sglang.install()
