"""What a run found, and the JSON it is kept in."""

from __future__ import annotations

import json
import math
import platform
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from bench.cases import SHAPE
from bench.timing import Sample

FORMAT = 1
"""Counted up when the JSON changes its meaning."""
CLOCKS = ("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "temperature.gpu", "power.draw")


@attrs.frozen
class Row:
    """One measurement, or why there is none (``missing``). Times in microseconds a call.

    ``num_sets`` input sets took turns, which move ``set_bytes`` together: cached where the L2 is larger.
    ``failed``: it is missing because its result was wrong or it broke, not because it does not apply here.
    ``ratio`` is to the ``baseline`` provider on the same case; ``limit`` bounds what ``limit_on`` names: the ratio or
    the median.
    """

    suite: str
    case: str
    provider: str
    metric: str
    group: str = ""
    num_reqs: int = 0
    num_tokens: int = 0
    median: float | None = None
    p10: float | None = None
    p90: float | None = None
    repeats: int = 0
    baseline: str | None = None
    ratio: float | None = None
    limit: float | None = None
    limit_on: str = "ratio"
    missing: str | None = None
    failed: bool = False
    num_sets: int = 0
    set_bytes: int = 0

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.suite, self.case, self.provider, self.metric

    @property
    def within(self) -> bool | None:
        """Whether the limit is kept; None where there is none."""
        value = self.ratio if self.limit_on == "ratio" else self.median
        return None if self.limit is None or value is None else value <= self.limit

    @property
    def sample(self) -> Sample:
        """What was measured; only where it was."""
        assert self.median is not None and self.p10 is not None and self.p90 is not None
        return Sample(self.median, self.p10, self.p90, self.repeats)

    def timed(self, sample: Sample) -> Row:
        return attrs.evolve(self, **attrs.asdict(sample))


def compare_to(rows: Iterable[Row], baseline: str) -> list[Row]:
    """The rows with their ratio to ``baseline`` on the same case and metric, where that was measured."""
    rows = list(rows)
    base = {(row.case, row.metric): row.median for row in rows if row.provider == baseline}
    made = []
    for row in rows:
        against = base.get((row.case, row.metric))
        ratio = row.median / against if row.median is not None and against else None
        made.append(attrs.evolve(row, baseline=baseline, ratio=ratio))
    return made


def geometric_means(rows: Iterable[Row]) -> dict[str, dict[str, float]]:
    """Suite, provider, geometric mean of the ratios: over the shapes, over all cases where none is a shape."""
    rows = [row for row in rows if row.ratio]
    means: dict[str, dict[str, float]] = {}
    for suite in dict.fromkeys(row.suite for row in rows):
        mine = [row for row in rows if row.suite == suite]
        mine = [row for row in mine if row.group == SHAPE] or mine
        for provider in dict.fromkeys(row.provider for row in mine):
            logs = [math.log(row.ratio) for row in mine if row.provider == provider and row.ratio]
            means.setdefault(suite, {})[provider] = math.exp(sum(logs) / len(logs))
    return means


@attrs.frozen
class Results:
    """Rows, and the machine that they are of."""

    rows: list[Row]
    environment: dict[str, Any]

    def save(self, path: Path) -> None:
        document = {
            "format": FORMAT,
            "environment": self.environment,
            "results": [{**attrs.asdict(row), "within": row.within} for row in self.rows],
            "geometric_mean_ratio": geometric_means(self.rows),
        }
        path.write_text(json.dumps(document, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Results:
        document = json.loads(path.read_text())
        if document.get("format") != FORMAT:
            raise ValueError(f"{path}: format {document.get('format')}, expected {FORMAT}")
        names = {field.name for field in attrs.fields(Row)}
        rows = [Row(**{name: entry[name] for name in names if name in entry}) for entry in document["results"]]
        return cls(rows, document["environment"])


def environment(device: torch.device, *, quick: bool) -> dict[str, Any]:
    """Device, versions, clocks, date."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else (platform.processor() or platform.machine()),
        "device_type": device.type,
        "l2_bytes": getattr(torch.cuda.get_device_properties(device), "L2_cache_size", None) if cuda else None,
        "clocks": clocks(device),
        "threads": torch.get_num_threads(),
        "quick": quick,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": _version("triton"),
            "numpy": np.__version__,
            "ragged-kv-canary": _version("ragged-kv-canary"),
        },
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def clocks(device: torch.device) -> dict[str, str] | None:
    """As nvidia-smi reads them; None where it cannot, and on a CPU. Only read, never set."""
    if device.type != "cuda":
        return None
    command = ["nvidia-smi", f"--query-gpu={','.join(CLOCKS)}", "--format=csv,noheader"]
    try:
        command.append(f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}")
        line = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError, AttributeError):
        return None
    return dict(zip(CLOCKS, (field.strip() for field in line.strip().split(",")), strict=False))
