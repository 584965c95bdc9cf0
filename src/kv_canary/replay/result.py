"""What a replay is told, and what it says afterwards."""

from __future__ import annotations

import platform
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

__all__ = ["ReplayResult", "ReplaySettings", "Watched"]


@attrs.frozen(kw_only=True)
class ReplaySettings:
    """How to replay. The pool is int32 `[max_running + 1, max_context]`; row 0 is padding.

    `prefill_budget` is tokens a step; `verify_every` is steps; `inject` is a kind of fault
    (`inject.KINDS`) or None. `seed` decides where a fault strikes. `canary` stamps KV slots in pages of
    `page_size`, and `perturb` is a kind of fault of theirs (`watch.PERTURBATIONS`) or None.
    """

    max_running: int = 256
    max_context: int = 16384
    prefill_budget: int = 8192
    device: str = "cpu"
    mode: str = "strict"
    seed: int = 0
    verify_every: int = 100
    inject: str | None = None
    canary: bool = False
    perturb: str | None = None
    page_size: int = 16


@attrs.frozen
class Watched:
    """What a canary did in a replay.

    `counts` are comparisons by kind, slots written and skipped; `period` is how many calls looked at
    everything, at the last step; `perturbed` says what was broken and when, None where nothing was.
    """

    counts: dict[str, int]
    period: int
    perturbed: str | None


@attrs.frozen(kw_only=True, eq=False)
class ReplayResult:
    """What a replay did, and what it found.

    `findings` are lines for people, each naming a culprit; the run is clean when there is none.
    `violations` counts cells that differ and guards that fired, also those without a line of their
    own; `violation_cells`, int64 `[n, 2]`, are the row and column of as many as were kept. Of every
    step, `[steps]` each: `host_us`, float64, is host time in `sync`, which is what the library costs
    (planning, making up tokens and verifying are not in it); `running` and `step_tokens`, int64, are
    requests that held a row and tokens that were sent. `rescatter_tokens` and `rescatter_bytes` are
    what sending every request's whole history at every step would have come to.
    """

    trace: str
    settings: ReplaySettings
    requests: int
    steps: int
    requests_finished: int
    refused_reasons: dict[str, int]
    tokens_scattered: int
    bytes_copied: int
    rescatter_tokens: int
    rescatter_bytes: int
    host_us: npt.NDArray[np.float64] = attrs.field(repr=False)
    running: npt.NDArray[np.int64] = attrs.field(repr=False)
    step_tokens: npt.NDArray[np.int64] = attrs.field(repr=False)
    violation_cells: npt.NDArray[np.int64] = attrs.field(repr=False)
    canary: Watched | None
    tokens_verified: int
    requests_verified: int
    violations: int
    findings: tuple[str, ...]
    interrupted: bool
    seconds: float

    @property
    def requests_refused(self) -> int:
        """Requests that could not be run, whatever the reason."""
        return sum(self.refused_reasons.values())

    def host_us_at(self, percentile: float) -> float:
        """Host microseconds a step at a percentile; 0 when there was no step."""
        return float(np.percentile(self.host_us, percentile)) if len(self.host_us) else 0.0

    def per_step(self) -> dict[str, float]:
        """Means of what was sent, and of what a full re-scatter would have sent."""
        steps = max(self.steps, 1)
        return {
            "tokens": self.tokens_scattered / steps,
            "bytes": self.bytes_copied / steps,
            "rescatter_tokens": self.rescatter_tokens / steps,
            "rescatter_bytes": self.rescatter_bytes / steps,
        }

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values for `json.dump`."""
        fields = attrs.asdict(self, filter=lambda _, value: not isinstance(value, np.ndarray))
        fields["settings"] |= {"trace": self.trace, "requests": self.requests}
        return fields | {
            "findings": list(self.findings),
            "requests_refused": self.requests_refused,
            **{f"{name}_per_step": round(value, 1) for name, value in self.per_step().items()},
            "host_us_p50": round(self.host_us_at(50), 1),
            "host_us_p99": round(self.host_us_at(99), 1),
            "versions": {
                "python": platform.python_version(),
                "numpy": np.__version__,
                "torch": torch.__version__,
            },
            "device_name": _device_name(self.settings.device),
        }


def _device_name(device: str) -> str:
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()
