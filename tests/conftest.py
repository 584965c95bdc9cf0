"""What every test shares: hypothesis profiles, the gpu and interpreter markers, the traces."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent

# No deadline in either: a first call may compile or warm up, and no test depends on timing.
# ci draws the same examples every time, so that a red gate is the change's fault; fuzz draws new
# ones and many more (make fuzz).
settings.register_profile("ci", max_examples=50, derandomize=True, deadline=None)
settings.register_profile(
    "fuzz",
    max_examples=2000,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],  # the interpreter is slow, and fuzz has time
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


def _why_not(item: pytest.Item) -> str | None:
    """Why this test cannot run here, or None."""
    if item.get_closest_marker("gpu"):
        if INTERPRETING:
            return "gpu: TRITON_INTERPRET=1 is set, so nothing would be compiled for the GPU"
        if not torch.cuda.is_available():
            return "gpu: torch sees no CUDA device"
    if item.get_closest_marker("interpreter"):
        if not INTERPRETING:
            return "interpreter: needs a process of its own with TRITON_INTERPRET=1"
        if find_spec("triton") is None:
            return "interpreter: triton is not installed"
    return None


@pytest.hookimpl(tryfirst=True)  # before any fixture touches a device
def pytest_runtest_setup(item: pytest.Item) -> None:
    # Skipped here rather than by a mark, so that one summary line counts all of a kind.
    reason = _why_not(item)
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def traces() -> Path:
    """The folder of real serving traces; it lies beside the checkout, not in it."""
    folder = ROOT.parent / "shared" / "traces"
    if not folder.is_dir():
        pytest.skip(f"no real traces here: {folder} does not exist")
    return folder


@contextmanager
def _no_sync() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(scope="session")
def no_sync() -> Any:
    """``with no_sync():`` torch raises where it would wait for the GPU."""
    return _no_sync
