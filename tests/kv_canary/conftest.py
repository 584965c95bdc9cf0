"""What the tests of the scatter share: one test body for every backend and device, and pools framed by poison."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import ragged.tiles
from kv_canary import GuardReport, kinds, launch_scatter_req_token_ids_kernel, reference, scatter
from ragged import RaggedBatch, RaggedError

POISON = -7
"""Fills every pool and what surrounds it; no test scatters it."""
FRAME = 3
"""Rows and columns of poison on each side of a pool."""
TINY = {
    "triton_backend": {"FLAT": ((16, 8, 4), (1 << 62, 16, 4)), "SHAPES": ((1, 4, 1), (2, 4, 2), (4, 2, 4)), "TILE": 4},
    "tiles": {"TILE": 4, "ONE_WAVE": 1},
}
"""Tiles so small that a few tokens fill many blocks, windows, shapes of tile, and lists of tiles."""
PARTS = ("argument", "request", "req_id", "got", "bound")


class Framed:
    """A pool that is a view inside a larger tensor of POISON; ``row_step`` rows of the larger one are a row."""

    def __init__(self, device: str, max_reqs: int, max_context_len: int, row_step: int = 1) -> None:
        shape = ((max_reqs + 2 * FRAME) * row_step, max_context_len + 2 * FRAME)
        self.whole = torch.full(shape, POISON, dtype=torch.int32, device=device)
        self.pool = self.whole[FRAME * row_step : (FRAME + max_reqs) * row_step : row_step, FRAME:-FRAME]
        assert self.pool.shape == (max_reqs, max_context_len)

    def rows(self) -> list[list[int]]:
        """The pool's cells."""
        return self.pool.tolist()

    def assert_border_intact(self) -> None:
        row_step = self.pool.stride(0) // self.whole.stride(0)
        border = self.whole.clone()
        border[FRAME * row_step : FRAME * row_step + self.pool.shape[0] * row_step : row_step, FRAME:-FRAME] = POISON
        assert bool((border == POISON).all()), "written outside the pool"

    def assert_untouched(self) -> None:
        assert bool((self.whole == POISON).all()), "written, though nothing was to be"


@dataclass(frozen=True)
class Target:
    """A backend on a device; ``tiny`` shrinks the Triton backend's tiles while it runs."""

    backend: str
    device: str
    tiny: bool = False

    def ints(self, values: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def buried(self, values: list[int], poison: int, before: int = 1, after: int = 3) -> torch.Tensor:
        """A view whose memory goes on with ``poison`` on both sides: what is read there shows."""
        return self.ints([poison] * before + values + [poison] * after)[before : before + len(values)]

    def framed(self, max_reqs: int, max_context_len: int, row_step: int = 1) -> Framed:
        return Framed(self.device, max_reqs, max_context_len, row_step)

    def report(self) -> GuardReport:
        return GuardReport.allocate(self.device)

    def batch(self, sequences: Any, rows: Any, **options: Any) -> RaggedBatch:
        with self.tiles():
            return RaggedBatch.from_sequences(sequences, req_pool_indices=rows, device=self.device, **options)

    def scatter(self, batch: RaggedBatch, pool: torch.Tensor, report: GuardReport | None = None) -> None:
        with self.tiles():
            scatter(batch, pool, report=report, backend=self.backend)

    def launch(self, **arguments: Any) -> None:
        with self.tiles():
            launch_scatter_req_token_ids_kernel(**{"backend": self.backend, **arguments})

    def raw(self, pool: torch.Tensor, token_ids: Any, offsets: Any, rows: Any, **more: Any) -> None:
        """The launcher on plain lists; ``prefix_lens`` may be one too."""
        if isinstance(more.get("prefix_lens"), list):
            more["prefix_lens"] = self.ints(more["prefix_lens"])
        columns = {"flat_in": token_ids, "offsets": offsets, "req_pool_indices": rows}
        self.launch(**{name: self.ints(values) for name, values in columns.items()}, pool_out=pool, **more)

    @contextmanager
    def tiles(self) -> Iterator[None]:
        if not self.tiny:
            yield
            return
        from kv_canary import triton_backend

        with pytest.MonkeyPatch.context() as patch:
            for module, constants in ((triton_backend, TINY["triton_backend"]), (ragged.tiles, TINY["tiles"])):
                for name, value in constants.items():
                    patch.setattr(module, name, value)
            yield


TARGETS = [
    pytest.param(Target("torch", "cpu"), id="torch_cpu"),
    pytest.param(Target("triton", "cpu"), id="interpreter", marks=pytest.mark.interpreter),
    pytest.param(Target("triton", "cpu", tiny=True), id="interpreter_tiny", marks=pytest.mark.interpreter),
    pytest.param(Target("torch", "cuda"), id="torch_cuda", marks=pytest.mark.gpu),
    pytest.param(Target("triton", "cuda"), id="triton_cuda", marks=pytest.mark.gpu),
    pytest.param(Target("triton", "cuda", tiny=True), id="triton_cuda_tiny", marks=pytest.mark.gpu),
]


@pytest.fixture(scope="session", params=TARGETS)
def target(request: pytest.FixtureRequest) -> Target:
    """Every backend on every device that it runs on here."""
    chosen: Target = request.param
    return chosen


@pytest.fixture(scope="session")
def shipped() -> Any:
    """Targets on the CPU that need no kernels: for what the host alone decides."""
    return Target("torch", "cpu")


@pytest.fixture(scope="session")
def oracle() -> Any:
    """``oracle(columns, framed, launch=1)``: the reference on a CPU twin of a framed pool; the twin and its counts."""

    def run(columns: dict[str, list[int]], like: Framed, launch: int = 1) -> tuple[torch.Tensor, dict[str, int]]:
        row_step = like.pool.stride(0) // like.whole.stride(0)
        twin, report = Framed("cpu", *like.pool.shape, row_step), GuardReport.allocate("cpu")
        tensors = {name: torch.tensor(values, dtype=torch.int64, device="cpu") for name, values in columns.items()}
        reference.scatter(
            tensors["flat_in"],
            tensors["offsets"],
            tensors["req_pool_indices"],
            tensors.get("prefix_lens"),
            twin.pool,
            report.table,
            launch,
        )
        return twin.whole, report.counts()

    return run


def _counts(**found: int) -> dict[str, int]:
    return {name: found.get(name, 0) for name in kinds.GUARDS}


@pytest.fixture(scope="session")
def counts() -> Any:
    """``counts(row=2)``: all counts, 0 where not said."""
    return _counts


@contextmanager
def _refused(kind: type[RaggedError], text: str, *, note: str | None = None, **parts: Any) -> Iterator[Any]:
    with pytest.raises(RaggedError) as caught:
        yield caught
    error = caught.value
    assert (type(error), str(error)) == (kind, text)
    assert set(parts) <= set(PARTS)
    assert {name: getattr(error, name) for name in PARTS} == {name: parts.get(name) for name in PARTS}
    if note is not None:
        assert getattr(error, "__notes__", []) == [note]


@pytest.fixture(scope="session")
def refused() -> Any:
    """``with refused(kind, text, argument=..., got=...)``: type, text and every part; one not given must be None."""
    return _refused
