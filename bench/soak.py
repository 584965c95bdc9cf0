"""``python -m bench soak``: a token pool against a plain dictionary of lists, over a very long random run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from random import Random

from kv_canary import TokenPool, ViolationLog
from ragged import RaggedBatch

MAX_REQS, MAX_CONTEXT_LEN, TAIL = 9, 48, 4
"""So small that rows are recycled, filled and cut deeper than the tail all the time."""
LOOK_EVERY = 16
"""Steps from one comparison of all cells to the next; a difference stays, so none is missed."""


class Difference(AssertionError):
    """The pool is not what the dictionary says."""


class World:
    """A pool, and what it must hold. Every method is one thing that a scheduler does.

    Attributes:
        running: row -> row, id and tokens: the scheduler's own triples and lists, which ``sync`` is given.
        held: row -> tokens: what the pool must hold now.
    """

    def __init__(self, *, device: str = "cpu", backend: str = "auto", tail: int | None = TAIL) -> None:
        self.pool = TokenPool.allocate(MAX_REQS, MAX_CONTEXT_LEN, device=device, backend=backend, tail=tail)
        self.log = ViolationLog.allocate(device)
        self.running: dict[int, tuple[int, str, list[int]]] = {}
        self.held: dict[int, list[int]] = {}
        self._numbers = count(1)
        self._shortened: set[int] = set()  # rows whose tail is shorter than TAIL until the next sync

    def fresh(self, length: int) -> list[int]:
        """Tokens that were never seen before, so that whatever is stale shows."""
        return [next(self._numbers) % 2**31 for _ in range(length)]

    def free(self) -> list[int]:
        """Rows without a request; the padding row, 0, is none of them."""
        return [row for row in range(1, MAX_REQS) if row not in self.running]

    def settled(self) -> list[int]:
        """Rows that hold exactly their request's tokens."""
        return [row for row, (_, _, tokens) in self.running.items() if self.held.get(row, []) == tokens]

    def admit(self, row: int, length: int) -> None:
        """A request takes a row, free or, after a preemption that nobody told the pool of, another's."""
        self.running[row] = (row, f"r{next(self._numbers)}", self.fresh(length))

    def grow(self, row: int, length: int) -> None:
        tokens = self.running[row][2]
        tokens += self.fresh(min(length, MAX_CONTEXT_LEN - len(tokens)))

    def cut(self, row: int, length: int) -> None:
        """The scheduler shortens a request, and tells nobody."""
        del self.running[row][2][length:]

    def rewrite(self, row: int, back: int) -> None:
        """The scheduler changes one of the last ``TAIL`` tokens that the pool holds, and tells nobody."""
        tokens, held = self.running[row][2], len(self.held.get(row, []))
        if row not in self._shortened and 0 <= held - back < len(tokens):
            [tokens[held - back]] = self.fresh(1)

    def decode(self) -> int:
        """A token more for everybody who has room; their triples are the old ones, or others that hold the same."""
        for row, (_, req_id, tokens) in list(self.running.items()):
            self.grow(row, 1)
            if next(self._numbers) % 3 == 0:
                self.running[row] = (row, req_id, tokens)
        return self.sync()

    def sync(self) -> int:
        sent = self.pool.sync(list(self.running.values()))
        known = {row: self.held.get(row, []) for row in self.running}
        fewest = sum(
            len(tokens) - (len(known[row]) if known[row] == tokens[: len(known[row])] else 0)
            for row, (_, _, tokens) in self.running.items()
            if tokens != known[row][: len(tokens)]
        )
        self._shortened -= set(self.running)
        self.held |= {row: list(tokens) for row, (_, _, tokens) in self.running.items()}
        if sent.num_tokens < fewest:
            raise Difference(f"sync says it sent {sent.num_tokens} tokens, {fewest} were new")
        return sent.num_tokens

    def truncate(self, row: int, length: int) -> None:
        """A settled row is rolled back."""
        self.pool.truncate([row], [length])
        self._shortened.add(row)
        del self.running[row][2][length:]
        del self.held[row][length:]

    def release(self, row: int) -> None:
        self.pool.release([row])
        self.running.pop(row, None)
        self.held.pop(row, None)

    def fork(self, source: int, target: int, length: int) -> None:
        """A free row becomes the beginning of another."""
        self.pool.fork(source, target, length)
        self._shortened.add(target)
        self.held[target] = self.held[source][:length]
        self.running[target] = (target, f"r{next(self._numbers)}", list(self.held[target]))

    def write(self, row: int, length: int) -> None:
        self.admit(row, length)
        self.pool.write(self._batch(row, self.running[row][2], 0))
        self.held[row] = list(self.running[row][2])

    def append(self, row: int, length: int) -> None:
        """A settled row is extended by a batch."""
        before = len(self.held[row])
        self.grow(row, length)
        tokens = self.running[row][2]
        self.pool.append(self._batch(row, tokens[before:], before))
        self.held[row] = list(tokens)

    def check(self) -> None:
        """Every valid cell, both copies of the valid lengths, and what ``verify`` says of them."""
        lens = [len(self.held.get(row, [])) for row in range(MAX_REQS)]
        if self.pool.valid_lens.tolist() != lens or self.pool.host_valid_lens.tolist() != lens:
            raise Difference(f"valid lengths are {self.pool.valid_lens.tolist()}, must be {lens}")
        cells = self.pool.tokens.tolist()
        for row, tokens in self.held.items():
            if cells[row][: len(tokens)] != tokens:
                raise Difference(f"row {row} holds {cells[row][: len(tokens)]}, must hold {tokens}")
        compared = self.log.compared()
        self.pool.verify([(row, None, tokens) for row, tokens in self.held.items()], report=self.log)
        self.log.raise_if_any()
        if self.log.compared() - compared != sum(lens):
            raise Difference(f"verify compared {self.log.compared() - compared} of {sum(lens)} tokens")

    def _batch(self, row: int, tokens: list[int], start: int) -> RaggedBatch:
        return RaggedBatch.from_sequences(
            [tokens], req_pool_indices=[row], prefix_lens=[start], device=self.pool.tokens.device
        )


def moves(world: World, rng: Random) -> Iterator[tuple[float, Callable[[], object]]]:
    """What a scheduler could do now: how likely each is, and the call."""
    free, running, settled = world.free(), list(world.running), world.settled()
    length = rng.choice([0, 1, 1, 1, 2, rng.randrange(MAX_CONTEXT_LEN + 1)])
    yield 8, world.sync
    yield 8, world.decode
    if free:
        yield 4, lambda: world.admit(rng.choice(free), length)
        yield 1, lambda: world.write(rng.choice(free), length)
        yield 0.2, lambda: world.release(rng.choice(free))
    if running:
        row = rng.choice(running)
        yield 8, lambda: world.grow(row, length)
        yield 0.5, lambda: world.admit(row, length)
        yield 1, lambda: world.rewrite(row, rng.randint(1, TAIL))
        yield 1, lambda: world.cut(row, rng.randrange(len(world.running[row][2]) + 1))
        yield 2, lambda: world.release(row)
    if settled:
        row = rng.choice(settled)
        most = len(world.running[row][2])
        if row in world.held:
            yield 2, lambda: world.truncate(row, rng.randint(max(most - 6, 0), most))
            yield 3, lambda: world.append(row, length)
            if free:
                yield 1, lambda: world.fork(row, rng.choice(free), rng.randint(0, most))


def soak(steps: int, *, seed: int = 0, on_step: Callable[[int], None] | None = None) -> int:
    """Run so many steps on the CPU; the number of tokens that syncs sent.

    Raises: Difference, CanaryViolation: at the first difference, with the step and the seed in a note.
    """
    rng, world, sent = Random(seed), World(), 0
    for step in range(1, steps + 1):
        try:
            weights, calls = zip(*moves(world, rng), strict=True)
            [call] = rng.choices(calls, weights)
            done = call()
            sent += done if isinstance(done, int) else 0
            if step % LOOK_EVERY == 0:
                world.check()
        except Exception as error:
            error.add_note(f"at step {step} of seed {seed}")
            raise
        if on_step is not None:
            on_step(step)
    world.check()
    return sent
