"""KVCanary: what an engine sees of it. The stamps themselves are held to the reference in test_stamps."""

import logging
from typing import Any

import numpy as np
import pytest
import torch

from kv_canary import CanaryViolation, KVCanary, KVSource, TokenPool, kinds, selftest
from kv_canary.mixing import mix, signed
from kv_canary.selftest import PERTURBATIONS
from ragged import RaggedBatch, RaggedTypeError, RaggedValueError

NUM_SLOTS = 64


class Engine:
    """A KV pool of bytes, a page table, and requests that grow."""

    def __init__(self, device: str = "cpu", num_slots: int = NUM_SLOTS, backend: str = "auto", **options: Any) -> None:
        self.device = device
        self.canary = KVCanary.allocate(num_slots, device=device, backend=backend, **options)
        self.table = torch.zeros(8, 32, dtype=torch.int32, device=device)
        self.kv = torch.arange(num_slots * 16, device=device).remainder(251).to(torch.uint8).reshape(num_slots, 16)
        self.sources = (KVSource(self.kv, 16),)
        self.lens: dict[int, int] = {}
        self.next_slot = 1

    def feed(self, row: int, tokens: list[int], **more: Any) -> list[int]:
        """Write tokens of one request into fresh slots; the slots."""
        length, slots = self.lens.get(row, 0), list(range(self.next_slot, self.next_slot + len(tokens)))
        self.next_slot += len(tokens)
        batch = RaggedBatch.from_sequences(
            [tokens],
            req_pool_indices=[row],
            prefix_lens=[length],
            req_ids=[f"r{row}"],
            device=self.device,
            allow_placeholders=True,
        )
        seeds = [int(self.table[row, length - 1])] if length else [-1]
        self.canary.write(batch, slots, seed_slots=seeds, **more)
        self.table[row, length : length + len(tokens)] = torch.tensor(slots, dtype=torch.int32)
        self.lens[row] = length + len(tokens)
        return slots

    def verify(self, **more: Any) -> int:
        rows = list(self.lens)
        return self.canary.verify(
            self.table, rows, [self.lens[row] for row in rows], req_ids=[f"r{row}" for row in rows], **more
        )

    def end_step(self) -> dict[str, int]:
        """End a step; what was done in it."""
        self.canary.step()
        if self.device != "cpu":  # the counters of a step come with the next
            torch.cuda.synchronize()
            self.canary.step()
        assert self.canary.last_steps is not None
        return self.canary.last_steps.counts

    def found(self) -> list[tuple[tuple[str, ...], int, int]]:
        """Reasons, slot and position of what is new."""
        return [(v.reasons, v.slot, v.position) for v in self.canary.log.drain()]


@pytest.fixture
def engine(target: Any) -> Engine:
    if target.tiny:
        pytest.skip("tiny tiles are for the stamps themselves")
    return Engine(target.device, backend=target.backend)


def test_a_request_that_continues_is_one_chain(engine: Engine) -> None:
    tokens = [11, 12, 13, 14, 15]
    engine.feed(2, tokens[:3])
    engine.feed(2, tokens[3:4])
    engine.feed(2, tokens[4:])
    chains = [signed(kinds.ANCHOR + sum(mix(t, i) for i, t in enumerate(tokens[:n]))) for n in range(5)]
    assert engine.canary.stamps[1:6, kinds.STAMP_CHAIN].tolist() == chains
    assert engine.verify() == 1
    assert engine.found() == []


def test_counters_say_how_much_was_really_compared(engine: Engine) -> None:
    engine.feed(1, [5, 6, 7])
    engine.feed(2, [8])
    engine.table[2, 0] = -1
    engine.verify(kv_sources=())
    assert engine.canary.counts() == {"chain": 3, "position": 3, "token": 0, "kv": 0, "written": 4, "skipped": 1}


def test_counters_say_what_each_step_really_did(engine: Engine) -> None:
    engine.feed(1, [5, 6, 7])
    assert engine.end_step()["written"] == 3
    for verified in (True, False, True):
        if verified:
            engine.verify()
        counts = engine.end_step()
        assert (counts["position"], counts["chain"], counts["written"]) == (3 * verified, 3 * verified, 0)


def test_a_violation_says_what_an_engineer_looks_for_first(engine: Engine) -> None:
    taken = engine.feed(3, [5, 6, 7])
    engine.canary.owns(taken, "r3")
    engine.canary.step()
    other = engine.feed(4, [8, 9])
    engine.canary.owns(other, "r4")
    engine.table[3, 1] = other[1]
    engine.verify(tag="decode")
    [violation, behind] = engine.canary.log.drain()
    assert behind.reasons == ("chain",)  # what follows the wrong slot
    assert str(violation) == (
        "chain at request 0 (id 'r3'), row 3, position 1, slot 5, step 1 (decode), the slot was r4's"
    )
    assert (violation.stored_token, violation.stored_position, violation.owner) == (9, 1, "r4")


def test_a_slot_never_written_is_told_from_one_that_holds_another_position(engine: Engine) -> None:
    engine.feed(1, [5, 6])
    engine.table[1, 1] = 40
    engine.verify()
    [violation] = engine.canary.log.drain()
    assert "the slot never written" in str(violation) or violation.stored_position == -1


def test_padding_and_skipped_slots_are_neither_written_nor_verified(engine: Engine) -> None:
    batch = RaggedBatch.from_sequences([[5, 6, 7]], req_pool_indices=[1], device=engine.device)
    engine.canary.write(batch, [0, -1, 9])
    assert engine.canary.stamps[0].tolist() == [-1] * 4
    assert engine.canary.stamps[9, kinds.STAMP_CHAIN] == signed(kinds.ANCHOR + mix(5, 0) + mix(6, 1))
    engine.table[1, :3] = torch.tensor([0, -1, 9], dtype=torch.int32)
    engine.lens[1] = 3
    engine.verify()
    assert engine.found() == []
    assert engine.canary.counts()["skipped"] == 2


# Case 47.
@pytest.mark.parametrize("slot", [NUM_SLOTS, -2, 2**40])
def test_a_slot_outside_is_contained_and_reported(engine: Engine, slot: int) -> None:
    batch = RaggedBatch.from_sequences([[5, 6]], req_pool_indices=[1], device=engine.device)
    before = engine.canary.stamps.clone()
    engine.canary.write(batch, [slot, 3])
    assert engine.found() == [(("slot",), slot, 0)]
    before[3] = torch.tensor([6, 1, signed(kinds.ANCHOR + mix(5, 0)), 0])
    assert torch.equal(engine.canary.stamps, before)


# Case 63.
def test_stamps_that_move_with_their_slots_stay_right(engine: Engine) -> None:
    engine.feed(1, [5, 6, 7])
    engine.canary.stamps[10:13] = engine.canary.stamps[1:4].clone()
    engine.table[1, :3] = torch.tensor([10, 11, 12], dtype=torch.int32)
    engine.verify()
    assert engine.found() == []
    engine.table[1, :3] = torch.tensor([20, 21, 22], dtype=torch.int32)  # KV moved, stamps not
    engine.verify()
    assert len(engine.found()) == 3


def test_a_window_leaves_its_first_slot_its_predecessor(engine: Engine) -> None:
    engine.feed(1, [5, 6, 7, 8])
    engine.canary.stamps[2] = -1  # evicted, and somebody else's
    engine.verify(window=2)
    assert engine.found() == []
    assert engine.canary.counts()["position"] == 2
    engine.verify(window=3)
    assert [slot for _, slot, _ in engine.found()] == [2, 3]


def test_a_budget_looks_at_everything_within_the_steps_that_it_says(engine: Engine) -> None:
    for row in range(1, 5):
        engine.feed(row, list(range(10 * row, 10 * row + 2 * row + 5)))
    period, seen = engine.verify(budget=10), 0
    for _ in range(period - 1):
        before = engine.canary.counts()["position"]
        engine.canary.step()
        engine.verify(budget=10)
        assert engine.canary.counts()["position"] - before <= 10
    seen = engine.canary.counts()["position"]
    assert (period, seen) == (8, sum(engine.lens.values()))
    assert engine.canary.coverage() == period - 1
    for slot in (1, 9, 20):  # whatever is broken now is seen in as many steps again
        engine.canary.stamps[slot, kinds.STAMP_TOKEN] ^= 4
    engine.canary.step()
    for _ in range(period):
        engine.verify(budget=10)
    assert [slot - 1 for slot in sorted(slot for _, slot, _ in engine.found())] == [1, 9, 20]  # by what follows


def test_a_budget_below_the_number_of_requests_is_refused(refused: Any) -> None:
    engine = Engine()
    for row in range(1, 4):
        engine.feed(row, [5])
    text = "kv-canary: budget must be at least 3 for these requests, got 2"
    with refused(RaggedValueError, text, argument="budget", got=2, bound=3):
        engine.verify(budget=2)


def test_a_pool_is_compared_within_its_valid_lengths_and_not_at_placeholders(target: Any) -> None:
    if target.tiny:
        pytest.skip("tiny tiles are for the stamps themselves")
    pool = TokenPool.allocate(8, 32, device=target.device, backend=target.backend)
    engine = Engine(target.device, backend=target.backend, pool=pool)
    engine.feed(1, [5, -1, 7, 8])
    pool.sync([(1, "r1", [5, 6, 7])])
    engine.verify()
    assert engine.found() == []
    assert engine.canary.counts()["token"] == 2  # not the placeholder, not beyond the valid length
    pool.tokens[1, 2] = 9
    engine.verify()
    assert engine.found() == [(("token",), 3, 2)]


def test_the_bytes_of_a_slot_are_part_of_its_stamp(engine: Engine) -> None:
    engine.feed(1, [5, 6, 7], kv_sources=engine.sources)
    engine.verify(kv_sources=engine.sources)
    assert engine.found() == []
    engine.kv[2, 13] ^= 1
    engine.verify(kv_sources=engine.sources)
    assert engine.found() == [(("kv",), 2, 1)]


@pytest.mark.parametrize("layer", range(3))
def test_rotation_watches_every_layer_by_a_share_of_the_slots(target: Any, layer: int) -> None:
    engine = Engine(target.device, backend=target.backend, kv_rotation=1)
    layers = [engine.kv.clone() for _ in range(3)]
    sources = [KVSource(kv, 16) for kv in layers]
    slots = engine.feed(1, [5, 6, 7, 8, 9, 10], kv_sources=sources)
    engine.verify(kv_sources=sources)
    assert engine.found() == []
    assert engine.canary.counts()["kv"] == 6
    layers[layer][:, 3] ^= 1
    engine.verify(kv_sources=sources)
    assert sorted(slot for _, slot, _ in engine.found()) == [slot for slot in slots if slot % 3 == layer]


def test_what_is_written_can_be_held_against_an_oracle(engine: Engine) -> None:
    engine.feed(1, [5, 6, 7], expected=[5, 9, -1])
    assert engine.found() == [(("write-input",), 2, 1)]
    engine.verify()
    assert engine.found() == []  # the chain went on with what was written


def test_cached_slots_are_swept_by_what_the_cache_says(engine: Engine) -> None:
    engine.feed(1, [5, 6, 7])
    engine.canary.sweep([(1, -1, 0), (2, 1, 1), (3, 2, 2)])
    assert engine.found() == []
    engine.canary.sweep([(2, -1, 0), (3, 1, 2)])
    assert [(slot, reasons) for reasons, slot, _ in engine.found()] == [(2, ("chain", "position")), (3, ("chain",))]


def test_step_raises_or_logs(caplog: pytest.LogCaptureFixture) -> None:
    for mode in ("log", "raise"):
        engine = Engine(mode=mode)
        engine.feed(1, [5, 6])
        engine.canary.stamps[1, kinds.STAMP_POSITION] = 7
        engine.verify()
        if mode == "log":
            with caplog.at_level(logging.WARNING, logger="kv_canary"):
                assert len(engine.canary.step()) == 2
            assert "position at request 0 (id 'r1')" in caplog.text
        else:
            with pytest.raises(CanaryViolation, match=r"kv-canary: 2 violations: .*id 'r1'.*the slot holds position 7"):
                engine.canary.step()
        assert engine.canary.step() == []


def test_a_canary_that_checks_nothing_says_so() -> None:
    engine = Engine(max_age=2)
    assert engine.canary.health().problems == (
        "no slot has ever been written",
        "no slot has been verified since health was last asked",
    )
    engine.feed(1, [5, 6])
    engine.verify()
    health = engine.canary.health()
    assert health.is_alive
    assert health.since["position"] == 2
    for _ in range(3):
        engine.canary.step()
    assert engine.canary.health().problems == (
        "no slot has been verified since health was last asked",
        "a position has gone unverified for 3 steps, max_age is 2",
    )


# Case 62.
@pytest.mark.parametrize(("times", "lost"), [([10], 6), ([3, 3, 3], 5), ([4], 0)])
def test_a_full_ring_counts_what_it_loses(times: list[int], lost: int) -> None:
    engine = Engine(ring_capacity=4)
    for number in times:
        engine.canary.sweep([(slot, -1, 0) for slot in range(20, 20 + number)])  # never written
    assert len(engine.canary.log.drain()) == min(4, sum(times))
    assert (engine.canary.log.found, engine.canary.log.lost) == (sum(times), lost)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"out_cache_loc": [1, 2]}, RaggedValueError, "kv-canary: out_cache_loc length 2 != num_tokens (3)"),
        ({"seed_slots": [1, 2]}, RaggedValueError, "kv-canary: seed_slots length 2 != num_reqs (1)"),
        ({"expected": [1]}, RaggedValueError, "kv-canary: expected length 1 != num_tokens (3)"),
        ({"out_cache_loc": [1.5, 2, 3]}, RaggedTypeError, "out_cache_loc must be integers, got float 1.5 at request 0"),
    ],
    ids=["slots", "seeds", "expected", "float"],
)
def test_what_does_not_fit_the_batch_is_refused(arguments: Any, error: Any, text: str) -> None:
    canary = KVCanary.allocate(NUM_SLOTS, device="cpu")
    batch = RaggedBatch.from_sequences([[5, 6, 7]], req_pool_indices=[1])
    with pytest.raises(error) as caught:
        canary.write(batch, **{"out_cache_loc": [1, 2, 3], **arguments})
    assert str(caught.value) == text
    assert bool((canary.stamps == -1).all())


def test_a_request_that_continues_needs_its_seed(refused: Any) -> None:
    canary = KVCanary.allocate(NUM_SLOTS, device="cpu")
    batch = RaggedBatch.from_sequences([[], [7]], req_pool_indices=[1, 2], prefix_lens=[3, 4], req_ids=["a", "b"])
    text = "kv-canary: seed_slots must be given where a request continues: prefix_len is 4 at request 1 (id 'b')"
    with refused(RaggedValueError, text, argument="seed_slots", request=1, req_id="b", bound=4):
        canary.write(batch, [5])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"leading_bytes": 12}, "leading_bytes must be a multiple of 8, got 12"),
        ({"leading_bytes": 24}, "leading_bytes must be at most bytes_per_token 16, got 24"),
        ({"token_stride": 20}, "token_stride must be a multiple of 8, got 20"),
        ({"page_size": 4, "page_stride": 68}, "page_stride must be a multiple of 8, got 68"),
    ],
)
def test_bytes_that_are_no_words_are_refused_with_the_reason(options: dict[str, int], text: str) -> None:
    with pytest.raises(RaggedValueError, match=text):
        KVSource(torch.zeros(1024, dtype=torch.uint8), 16, **options)


@pytest.mark.parametrize(
    ("stamps", "text"),
    [
        (torch.zeros(5, 4, dtype=torch.int32), "stamps must be int64, got torch.int32"),
        (torch.zeros(5, dtype=torch.int64), "stamps must be 2-D, got shape (5,)"),
        (torch.zeros(5, 3, dtype=torch.int64), "stamps must have 4 columns, got 3"),
        (torch.zeros(5, 8, dtype=torch.int64)[:, :4], "stamps must be contiguous, got strides (8, 1)"),
        (
            torch.zeros(21, dtype=torch.int64)[1:].view(5, 4),
            "stamps must be aligned to 16 bytes, got an address 8 beyond",
        ),
    ],
    ids=["dtype", "dimensions", "columns", "strides", "alignment"],
)
def test_stamps_are_what_the_kernels_take_them_for(stamps: torch.Tensor, text: str) -> None:
    with pytest.raises((RaggedTypeError, RaggedValueError), match=r"^kv-canary: ") as caught:
        KVCanary(stamps)
    assert str(caught.value) == f"kv-canary: {text}"


def test_a_source_that_ends_before_the_last_slot_is_refused() -> None:
    engine = Engine()
    with pytest.raises(RaggedValueError, match=r"must hold 1024 bytes for 64 slots, got 1008"):
        engine.feed(1, [5], kv_sources=[KVSource(torch.zeros(1008, dtype=torch.uint8), 16)])


def test_a_hundred_thousand_flipped_bits_are_all_seen() -> None:
    # Issue 6: in stamps, positions, tokens and KV bytes; each alone, in a table of many requests of two tokens.
    random, flips = np.random.default_rng(0), 100_000
    num_slots = 2 * flips + 1
    canary = KVCanary.allocate(num_slots, device="cpu", ring_capacity=4 * flips)
    kv = torch.from_numpy(random.integers(0, 2**62, size=(num_slots, 2)))
    source = (KVSource(kv, 16),)
    slots = 1 + np.arange(2 * flips).reshape(flips, 2)
    batch = RaggedBatch.from_sequences(random.integers(0, 150_000, (flips, 2)), req_pool_indices=np.arange(flips))
    canary.write(batch, slots.reshape(-1), kv_sources=source)
    triples = np.stack([slots, np.stack([np.full(flips, -1), slots[:, 0]], 1), np.tile([0, 1], (flips, 1))], 2)
    canary.sweep(triples.reshape(-1, 3), kv_sources=source)
    assert canary.log.drain() == []
    whose, what, bits = random.integers(0, 2, flips), random.integers(0, 5, flips), random.integers(0, 63, flips)
    victims = slots[np.arange(flips), whose]
    # The second one's token moves no chain that is looked at; its pool, or the next token's chain, would tell.
    what[(what == kinds.STAMP_TOKEN) & (whose == 1)] = kinds.STAMP_POSITION
    masks = torch.from_numpy(1 << bits)
    stamps = what < 4
    canary.stamps[victims[stamps], what[stamps]] ^= masks[stamps]
    kv[victims[~stamps], bits[~stamps] % 2] ^= masks[~stamps]
    canary.sweep(triples.reshape(-1, 3), kv_sources=source)
    seen = {(violation.slot + 1) // 2 for violation in canary.log.drain()}
    assert len(seen) == flips


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_self_test_sees_every_perturbation_and_nothing_in_a_clean_run(device: str) -> None:
    trials = selftest(device)
    assert [trial.name for trial in trials] == ["clean", *PERTURBATIONS]
    assert [trial.passed for trial in trials] == [True] * 7
    assert trials[0].found == 0


@pytest.mark.gpu
def test_a_replayed_graph_verifies_what_is_in_its_buffers_now() -> None:
    # SGLang's replayed decode steps compare no token at all.
    pool = TokenPool.allocate(8, 32, device="cuda")
    engine = Engine("cuda", pool=pool)
    engine.feed(1, [5, 6, 7, 8])
    pool.sync([(1, "r1", [5, 6, 7, 8])])
    rows = torch.tensor([1, 0], device="cuda")
    lens = torch.tensor([2, 0], device="cuda")
    engine.canary.verify(engine.table, rows, lens)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        engine.canary.verify(engine.table, rows, lens)
    engine.end_step()
    for length in (1, 3, 4):
        before = engine.canary.counts()
        lens.copy_(torch.tensor([length, 0]))
        graph.replay()
        after = engine.canary.counts()
        assert [after[name] - before[name] for name in ("position", "chain", "token")] == [length] * 3
        counts = engine.end_step()
        assert [counts[name] for name in ("position", "chain", "token")] == [length] * 3
    assert engine.found() == []
    pool.tokens[1, 3] = 77
    graph.replay()
    assert engine.found() == [(("token",), 4, 3)]
