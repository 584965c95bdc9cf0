"""What a provider is: one way of scattering a batch into a pool."""

from __future__ import annotations

import torch

from bench.inputs import POISON, InputSet
from bench.timing import Call


class Unavailable(Exception):
    """The provider cannot run here, or not on this case; the text says why."""


class WrongResult(AssertionError):
    """The provider's output is not the expected one; it is not timed."""


class Provider:
    """One way of scattering. A subclass has a name, a summary, and says how a set becomes a call."""

    name: str
    summary: str
    graph = True
    """Whether its work can be captured in a CUDA graph."""

    def require(self, device: torch.device) -> None:
        """Raise Unavailable where it cannot run on this device."""

    def prepare(self, inputs: InputSet) -> Call:
        """A call without arguments that scatters this set; what it needs besides is made here, untimed."""
        raise NotImplementedError

    def launches(self, inputs: InputSet) -> int:
        """About how many kernels a call launches."""
        return 1

    def output(self, inputs: InputSet) -> torch.Tensor:
        """Where the call prepared last leaves its result."""
        return inputs.pool

    def wanted(self, inputs: InputSet, expected: torch.Tensor) -> torch.Tensor:
        """What ``output`` must equal, given the pool that a right scatter leaves."""
        return expected

    def check(self, call: Call, inputs: InputSet, expected: torch.Tensor) -> None:
        """Run the call on a poisoned pool; WrongResult where a single cell differs."""
        output = self.output(inputs)
        output.fill_(POISON)
        call()
        wanted = self.wanted(inputs, expected)
        if not torch.equal(output, wanted):
            wrong = int((output != wanted).sum())
            raise WrongResult(f"{self.name}: {wrong} of {wanted.numel()} cells are wrong")
