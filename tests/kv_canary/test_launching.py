"""Kept launches: a variant's second launch skips Triton's own path, and only where that is the same launch."""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kv_canary import GuardReport, KVCanary, TokenPool, launch_scatter_req_token_ids_kernel, scatter, warmup
from ragged import RaggedBatch, RaggedError, RaggedLayout

pytest.importorskip("triton")

from kv_canary import backends, launching, stamps_triton, triton_backend


class FakeKernel:
    """A JIT function that writes down how it was launched: ``jit`` through Triton, ``kept`` directly."""

    def __init__(self, device: SimpleNamespace) -> None:
        self.device = device
        self.calls: list[tuple[Any, ...]] = []
        self.fn = object()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any) -> Any:
            self.calls.append(("jit", self.device.current, grid, arguments))
            function = f"function on {self.device.current}"
            return SimpleNamespace(run=self.run, function=function, packed_metadata="metadata")

        return launch

    def run(self, *arguments: Any) -> None:
        self.calls.append(("kept", self.device.current, *arguments))

    @property
    def ways(self) -> list[str]:
        return [call[0] for call in self.calls]


class Host:
    """A fake Triton and fake devices around the real ``launching.launch``."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.device = SimpleNamespace(current=0)
        self.streams = {0: 1000, 1: 2000}
        self.kernel = FakeKernel(self.device)
        self.asked_for_tensors = 0
        self.hooks = SimpleNamespace(
            launch_enter_hook=SimpleNamespace(calls=[]), launch_exit_hook=SimpleNamespace(calls=[])
        )
        active = SimpleNamespace(get_current_stream=lambda index: self.streams[index])
        fake = SimpleNamespace(
            runtime=SimpleNamespace(driver=SimpleNamespace(active=active)), knobs=SimpleNamespace(runtime=self.hooks)
        )
        patch.setattr(launching, "triton", fake)
        patch.setattr(launching, "_ready", {})
        patch.setattr(launching, "_is_known", True)
        patch.setattr(torch.cuda, "current_device", lambda: self.device.current)
        patch.setattr(torch.cuda, "device", self._on)

    @contextmanager
    def _on(self, device: torch.device) -> Iterator[None]:
        before, self.device.current = self.device.current, device.index
        try:
            yield
        finally:
            self.device.current = before

    def launch(
        self, device: str = "cuda:0", programs: int = 5, constants: tuple[Any, ...] = (True, 512), variant: int = 0
    ) -> None:
        def tensors() -> tuple[Any, ...]:
            self.asked_for_tensors += 1
            return ("flat", "pool")

        launching.launch(
            self.kernel, torch.device(device), programs, tensors, (0xF00, 0xB00), (7, 1), constants, variant
        )


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


def test_the_second_launch_is_kept_and_gets_addresses_where_the_first_got_tensors(host: Host) -> None:
    host.launch()
    host.launch(programs=9)
    assert host.kernel.calls == [
        ("jit", 0, (5,), ("flat", "pool", 7, 1, True, 512)),
        (
            "kept", 0, 9, 1, 1, 1000, "function on 0", "metadata", None, None, None,
            0xF00, 0xB00, 7, 1, True, 512,
        ),
    ]  # fmt: skip
    assert host.asked_for_tensors == 1


def test_a_kept_launch_goes_to_the_stream_that_is_current_then(host: Host) -> None:
    host.launch()
    for stream in (1000, 31, 1000):
        host.streams[0] = stream
        host.launch()
    assert [call[5] for call in host.kernel.calls[1:]] == [1000, 31, 1000]


@pytest.mark.parametrize("other", [{"device": "cuda:1"}, {"constants": (False, 512)}, {"variant": 8}], ids=str)
def test_what_selects_another_variant_is_launched_through_triton_once(host: Host, other: dict[str, Any]) -> None:
    host.launch()
    host.launch(**other)
    host.launch(**other)
    host.launch()
    assert host.kernel.ways == ["jit", "jit", "kept", "kept"]


def test_another_kernel_with_the_same_constants_is_another_variant(host: Host) -> None:
    host.launch()
    host.kernel = FakeKernel(host.device)
    host.launch()
    assert host.kernel.ways == ["jit"]


def test_an_unknown_triton_takes_ordinary_launches_and_its_knobs_are_left_alone(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "_is_known", False)
    monkeypatch.delattr(launching.triton, "knobs")  # Triton before 3.4 has none
    host.launch()
    host.launch()
    assert host.kernel.ways == ["jit", "jit"]
    assert launching._ready == {}


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profilers_hook_gets_ordinary_launches_as_long_as_it_is_there(host: Host, name: str) -> None:
    host.launch()
    getattr(host.hooks, name).calls.append(print)
    host.launch()
    getattr(host.hooks, name).calls.clear()
    host.launch()
    assert host.kernel.ways == ["jit", "jit", "kept"]


# Case 13
def test_tensors_on_another_device_are_launched_there_and_the_current_one_comes_back(host: Host) -> None:
    host.launch("cuda:1")
    host.launch("cuda:1")
    assert [call[:2] for call in host.kernel.calls] == [("jit", 1), ("kept", 1)]
    assert host.kernel.calls[1][5:7] == (2000, "function on 1")
    assert host.device.current == 0


# Case 38
def test_the_current_device_comes_back_after_an_error_too(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("out of resources")

    host.launch("cuda:1")
    host.kernel.run = fails  # type: ignore[method-assign]
    launching._ready = {key: (fails, *rest) for key, (_, *rest) in launching._ready.items()}
    with pytest.raises(RuntimeError, match="out of resources"):
        host.launch("cuda:1")
    assert host.device.current == 0


def test_the_interpreter_has_nothing_to_keep(host: Host) -> None:
    host.launch("cpu")
    host.launch("cpu")
    assert host.kernel.ways == ["jit", "jit"]
    assert launching._ready == {}


# --- on a GPU: the kept launch is the same launch ---------------------------------------------------------------------

LENGTHS = {
    "one": [1] * 40,
    "short": [16, 0, 3] * 5,
    "middle": [512, 17, 0, 200],
    "long": [3000, 1025, 0, 1],
    "listed": [200_000, *[1] * 200],
}


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_ready", {})


def _by_batch(lengths: list[int], report: GuardReport | None) -> torch.Tensor:
    batch = RaggedBatch.from_sequences(
        [range(100 * r, 100 * r + length) for r, length in enumerate(lengths)],
        req_pool_indices=range(1, len(lengths) + 1),
        prefix_lens=[r % 3 for r in range(len(lengths))],
        device="cuda",
    )
    memory = torch.full((len(lengths) + 3, max(lengths) + 8), -7, dtype=torch.int32, device="cuda")
    scatter(batch, memory[1:-1, 2:-2], report=report, backend="triton")
    return memory.cpu()


def _by_launcher(lengths: list[int], report: GuardReport | None, shift: int = 0) -> torch.Tensor:
    offsets = torch.tensor([0, *lengths], dtype=torch.int64, device="cuda").cumsum(0)
    flat = torch.arange(sum(lengths) + shift, dtype=torch.int64, device="cuda")[shift:]
    memory = torch.full((len(lengths) + 2, max(lengths) + 8), -7, dtype=torch.int32, device="cuda")
    launch_scatter_req_token_ids_kernel(
        flat_in=flat,
        offsets=offsets,
        req_pool_indices=torch.arange(len(lengths), dtype=torch.int64, device="cuda"),
        pool_out=memory[1:-1, 2:-2],
        report=report,
        backend="triton",
    )
    return memory.cpu()


@pytest.mark.gpu
@pytest.mark.parametrize("with_report", [True, False])
@pytest.mark.parametrize("lengths", list(LENGTHS))
@pytest.mark.parametrize("way", [_by_batch, _by_launcher])
def test_a_kept_launch_equals_an_ordinary_one(
    fresh: None, monkeypatch: pytest.MonkeyPatch, way: Any, lengths: str, with_report: bool
) -> None:
    def report() -> GuardReport | None:
        return GuardReport.allocate("cuda") if with_report else None

    ordinary = way(LENGTHS[lengths], report())
    assert len(launching._ready) == int(launching._is_known)
    again = report()
    kept = way(LENGTHS[lengths], again)
    assert len(launching._ready) == int(launching._is_known)
    monkeypatch.setattr(launching, "_is_known", False)
    monkeypatch.setattr(launching, "_ready", {})
    through_triton = way(LENGTHS[lengths], report())
    assert launching._ready == {}
    assert torch.equal(ordinary, kept)
    assert torch.equal(ordinary, through_triton)
    assert again is None or again.first() is None


@pytest.mark.gpu
def test_a_kept_launch_reports_what_an_ordinary_one_reports(fresh: None) -> None:
    pool = torch.full((4, 8), -7, dtype=torch.int32, device="cuda")
    for row in (2**40, -1, 4):
        report = GuardReport.allocate("cuda")
        launch_scatter_req_token_ids_kernel(
            flat_in=torch.tensor([1, 2, 3], dtype=torch.int64, device="cuda"),
            offsets=torch.tensor([0, 1, 3], dtype=torch.int64, device="cuda"),
            req_pool_indices=torch.tensor([row, 2], dtype=torch.int64, device="cuda"),
            pool_out=pool,
            report=report,
            backend="triton",
        )
        offender = report.first()
        assert offender is not None
        assert (offender.kind, offender.request, offender.value) == ("row", 0, row)
    assert pool.tolist() == [[-7] * 8, [-7] * 8, [2, 3, *[-7] * 6], [-7] * 8]


# Cases 14, 41
@pytest.mark.gpu
def test_tokens_aligned_to_8_bytes_only_are_right_after_aligned_ones_and_before_them(fresh: None) -> None:
    lengths = [700, 0, 5, 1300]
    for shift in (0, 1, 0, 1, 2, 3):
        memory = _by_launcher(lengths, None, shift)[1:-1, 2:-2]
        start = shift
        for row, length in enumerate(lengths):
            assert memory[row, :length].tolist() == list(range(start, start + length))
            assert (memory[row, length:] == -7).all()
            start += length


@pytest.mark.gpu
def test_a_hook_sees_every_launch_of_a_kept_variant(fresh: None) -> None:
    if not launching._is_known:
        pytest.skip("this Triton takes ordinary launches anyway")
    hook, seen = launching.triton.knobs.runtime.launch_enter_hook, []
    _by_batch([1, 2], None)
    hook.add(seen.append)
    try:
        _by_batch([1, 2], None)
        _by_batch([1, 2], None)
    finally:
        hook.remove(seen.append)
    assert len(seen) == 2
    _by_batch([1, 2], None)
    assert len(seen) == 2


@pytest.mark.gpu
def test_a_kept_launch_waits_for_its_own_stream_only(fresh: None) -> None:
    _by_batch([3, 4], None)
    side = torch.cuda.Stream()
    batch = RaggedBatch.from_sequences([[5, 6, 7]], req_pool_indices=[1], device="cuda")
    # The same variant as above: requests of up to 16 tokens, without a report.
    pool = torch.full((3, 4), -7, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    with torch.cuda.stream(side):
        scatter(batch, pool, backend="triton")
        seen = pool.to("cpu", non_blocking=False)
        busy = not torch.cuda.default_stream().query()
    assert seen.tolist() == [[-7] * 4, [5, 6, 7, -7], [-7] * 4]
    assert busy
    torch.cuda.synchronize()


# Cases 14, 41, 58: the number of variants is small, and warmup has seen them all.
@pytest.mark.gpu
def test_after_warmup_no_size_or_alignment_makes_a_new_variant(fresh: None) -> None:
    from kv_canary.kernels import scatter as kernels

    def variants() -> int:
        index = torch.cuda.current_device()
        return sum(len(kernel.device_caches[index][0]) for kernel in (kernels.scatter_flat, kernels.scatter_tiles))

    warmup("cuda")
    kept, compiled = len(launching._ready), variants()
    assert kept <= 80
    for report in (None, GuardReport.allocate("cuda")):
        for num_reqs in (1, 2, 3, 16, 17, 511, 512, 513, 4096):
            for length in (1, 2, 16, 17, 129):
                _by_batch([length] * num_reqs, report)
                _by_launcher([length] * num_reqs, report, num_reqs % 2)
        for lengths in LENGTHS.values():
            _by_batch(lengths, report)
            _by_launcher(lengths, report)
            _by_launcher(lengths, report, 1)
    assert (len(launching._ready), variants()) == (kept, compiled)


def _use_canaries(device: str) -> None:
    """Batches and tables of all sizes, in full, by a window and on a budget, with a pool and without."""
    table = torch.full((400, 3000), -1, dtype=torch.int32, device=device)
    for pool in (None, TokenPool.allocate(400, 3000, device=device, padding_row=None)):
        canary = KVCanary.allocate(300, device=device, pool=pool)
        for lengths in (*LENGTHS.values(), [100, 30]):
            rows, num_tokens = range(len(lengths)), sum(lengths)
            tokens = torch.zeros(num_tokens, dtype=torch.int64)
            batch = RaggedBatch.from_lengths(tokens, lengths, req_pool_indices=rows, device=device)
            for seeds in (None, [-1] * len(lengths)):
                canary.write(batch, torch.full((num_tokens,), -1), seed_slots=seeds)
            lens = [min(length, 3000) for length in lengths]
            for options in ({}, {"window": 7}, {"budget": 400}):
                canary.verify(table, rows, lens, **options)
        whole = torch.arange(400, device=device), torch.full((400,), 3000, device=device)
        for budget in (None, 600_000, 1000):
            canary.verify(table, *whole, budget=budget)
        canary.sweep([[1, -1, 0], [2, 1, 1]])


@pytest.mark.gpu
def test_after_warmup_a_canary_compiles_nothing(fresh: None) -> None:
    warmup("cuda")
    kept = len(launching._ready)
    _use_canaries("cuda")
    assert len(launching._ready) == kept


def test_warmup_takes_every_variant_that_a_canary_does(monkeypatch: pytest.MonkeyPatch) -> None:
    variants: set[Hashable] = set()

    def launched(kernel: Any, _: Any, __: Any, ___: Any, ____: Any, _____: Any, constants: Any, *more: Any) -> None:
        variants.add((kernel.fn.__name__, constants, *more))

    stamps = ("write_stamps", "sum_tiles", "plan_checks", "check_requests", "check_triples")
    modules = {"": triton_backend, "stamps": stamps_triton}
    monkeypatch.setattr(backends, "resolve", lambda _, __, operation="": modules[operation])
    monkeypatch.setattr(launching, "launch", lambda *arguments, variant=None: launched(*arguments))
    warmup("cpu")
    warm = {found for found in variants if found[0] in stamps}
    variants.clear()
    _use_canaries("cpu")
    assert variants == warm


# Issue 3, cases 14 and 58.
def test_ten_thousand_batches_of_random_sizes_take_at_most_twelve_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    variants: set[Hashable] = set()

    def launched(kernel: Any, *arguments: Any, variant: Hashable = None) -> None:
        variants.add((kernel.fn.__name__, arguments[-1], variant))

    monkeypatch.setattr(triton_backend.launching, "launch", launched)
    random = np.random.default_rng(0)
    pool = torch.empty(1, 1, dtype=torch.int32)
    for _ in range(10_000):
        num_reqs = int(2 ** random.uniform(0, 8))
        longest = 2 ** random.uniform(0, 14, size=num_reqs if random.random() < 0.5 else 1)
        lengths = random.integers(0, longest + 1, size=num_reqs)
        layout = RaggedLayout(lengths=lengths, req_pool_indices=np.arange(num_reqs))
        batch = RaggedBatch(layout, torch.empty(len(layout.header) + layout.num_tokens, dtype=torch.int64))
        report = torch.empty(1) if random.random() < 0.5 else None
        triton_backend.scatter_batch(batch, pool, report, 1)
    assert len(variants) == 12  # all six tiles, with and without a report; a number of its own for no size


# Case 59: one error that names the folder and the variable, and no other backend.
@pytest.mark.parametrize(
    ("folder", "failed_at"),
    [("/cache/of/triton", "/cache/of/triton/ab12"), ("/file/sub", "/file/sub"), ("/file/sub/sub", "/file/sub")],
    ids=["inside", "itself", "a_parent"],
)
def test_a_cache_folder_that_cannot_be_written_is_named(
    host: Host, monkeypatch: pytest.MonkeyPatch, folder: str, failed_at: str
) -> None:
    cause = PermissionError(13, "Permission denied", failed_at)
    monkeypatch.setenv("TRITON_CACHE_DIR", folder)
    monkeypatch.setattr(FakeKernel, "__getitem__", _fails_with(cause))
    with pytest.raises(RaggedError) as caught:
        host.launch()
    assert str(caught.value) == (
        f"kv-canary: triton cannot use its cache folder {folder}: {cause}; set TRITON_CACHE_DIR to one that can be "
        "written"
    )
    assert (caught.value.argument, caught.value.got) == ("TRITON_CACHE_DIR", folder)
    assert caught.value.__cause__ is cause


def test_any_other_error_of_the_system_is_left_as_it_is(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/cache/of/triton")
    for cause in (FileNotFoundError(2, "No such file", "/usr/bin/gcc"), OSError("no name")):
        monkeypatch.setattr(FakeKernel, "__getitem__", _fails_with(cause))
        with pytest.raises(OSError) as caught:
            host.launch()
        assert caught.value is cause


def _fails_with(error: Exception) -> Any:
    def getitem(_: FakeKernel, __: Any) -> Any:
        def launch(*_arguments: Any) -> None:
            raise error

        return launch

    return getitem
