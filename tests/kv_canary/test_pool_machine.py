"""A token pool against a dictionary of lists, whatever a scheduler does, in whatever order."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bench.soak import MAX_CONTEXT_LEN, TAIL, World, soak

LENGTHS = st.sampled_from([0, 1, 2, 5, MAX_CONTEXT_LEN])


class PoolMachine(RuleBasedStateMachine):
    """Each rule is one thing that a scheduler does; ``bench.soak.World`` does it, and keeps the dictionary."""

    @initialize(tail=st.sampled_from([TAIL, None]))
    def start(self, tail: int | None) -> None:
        self.world = World(tail=tail)

    @invariant()
    def the_pool_is_what_the_dictionary_says(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    @rule()
    def sync(self) -> None:
        self.world.sync()
        assert self.world.sync() == 0, "nothing has changed since"

    @precondition(lambda self: self.world.running)
    @rule(steps=st.integers(1, 2 * TAIL))
    def decode(self, steps: int) -> None:
        for _ in range(steps):
            self.world.decode()

    @precondition(lambda self: self.world.free())
    @rule(data=st.data(), length=LENGTHS)
    def admit(self, data: st.DataObject, length: int) -> None:
        self.world.admit(data.draw(st.sampled_from(self.world.free())), length)

    @precondition(lambda self: self.world.running)
    @rule(data=st.data(), length=LENGTHS)
    def take_over(self, data: st.DataObject, length: int) -> None:
        self.world.admit(data.draw(st.sampled_from(sorted(self.world.running))), length)

    @precondition(lambda self: self.world.running)
    @rule(data=st.data(), length=LENGTHS)
    def grow(self, data: st.DataObject, length: int) -> None:
        self.world.grow(data.draw(st.sampled_from(sorted(self.world.running))), length)

    @precondition(lambda self: self.world.running)
    @rule(data=st.data(), length=LENGTHS)
    def cut(self, data: st.DataObject, length: int) -> None:
        self.world.cut(data.draw(st.sampled_from(sorted(self.world.running))), length)

    @precondition(lambda self: self.world.running)
    @rule(data=st.data(), back=st.integers(1, TAIL))
    def rewrite(self, data: st.DataObject, back: int) -> None:
        self.world.rewrite(data.draw(st.sampled_from(sorted(self.world.running))), back)

    @rule(row=st.integers(1, 8))
    def release(self, row: int) -> None:
        self.world.release(row)

    @precondition(lambda self: self.world.free())
    @rule(data=st.data(), length=LENGTHS)
    def write(self, data: st.DataObject, length: int) -> None:
        self.world.write(data.draw(st.sampled_from(self.world.free())), length)

    @precondition(lambda self: self._held())
    @rule(data=st.data(), length=LENGTHS)
    def append(self, data: st.DataObject, length: int) -> None:
        self.world.append(data.draw(st.sampled_from(self._held())), length)

    @precondition(lambda self: self._held())
    @rule(data=st.data(), length=LENGTHS)
    def truncate(self, data: st.DataObject, length: int) -> None:
        row = data.draw(st.sampled_from(self._held()))
        self.world.truncate(row, min(length, len(self.world.held[row])))

    @precondition(lambda self: self._held() and self.world.free())
    @rule(data=st.data(), length=LENGTHS)
    def fork(self, data: st.DataObject, length: int) -> None:
        source = data.draw(st.sampled_from(self._held()))
        target = data.draw(st.sampled_from(self.world.free()))
        self.world.fork(source, target, min(length, len(self.world.held[source])))

    def _held(self) -> list[int]:
        return [row for row in self.world.settled() if row in self.world.held]


TestPoolMachine = PoolMachine.TestCase


def test_a_short_soak_finds_no_difference() -> None:
    assert soak(1500, seed=7) > 0
