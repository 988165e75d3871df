"""A row of the table and whether its goal is reached; timing in turn; the machine.

Machines are shared: what is compared is measured in turn, and the best of several repeats is taken.
What runs in one process is timed by the seconds that the processor worked for it, which other
processes disturb little; on a quiet machine, they are those of the clock.
"""

from __future__ import annotations

import math
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

SIDE = 2048  # of the square matrices whose product is the machine's speed


class DifferentResultsError(Exception):
    """Two things that are to be compared do not give the same."""


@dataclass(frozen=True)
class Result:
    """One row of the table.

    Args:
        what: What is divided by what.
        ratio: The ratio; NaN if it was not measured.
        goal: "at most 2", "at least 2", "above 1", "below 1", or words that are no goal.
        detail: The numbers behind the ratio.
    """

    what: str
    ratio: float
    goal: str
    detail: str

    @property
    def reached(self) -> bool | None:
        """Whether the goal is reached; None without one, or without a measurement."""
        found = re.match(r"(at most|at least|above|below) ([\d.]+)", self.goal)
        if found is None or math.isnan(self.ratio):
            return None
        limit = float(found[2].rstrip("."))
        return {
            "at most": self.ratio <= limit,
            "at least": self.ratio >= limit,
            "above": self.ratio > limit,
            "below": self.ratio < limit,
        }[found[1]]

    def as_json(self) -> dict[str, Any]:
        """The row as plain values."""
        ratio = None if math.isnan(self.ratio) else round(self.ratio, 4)
        return {
            "what": self.what,
            "ratio": ratio,
            "goal": self.goal,
            "reached": self.reached,
            "detail": self.detail,
        }


def skipped(what: str, goal: str, why: str) -> Result:
    """The row of what could not be measured here."""
    return Result(what, math.nan, goal, f"not measured: {why}")


def best(repeats: int, *works: Callable[[], object]) -> list[float]:
    """Processor seconds of each: the best of `repeats`, in turn, without the first of several."""
    seconds = [float("inf")] * len(works)
    for repeat in range(repeats):
        for i, work in enumerate(works):
            started = time.process_time()
            work()
            if repeat or repeats == 1:
                seconds[i] = min(seconds[i], time.process_time() - started)
    return seconds


def multiply() -> Callable[[], object]:
    """The matrix product whose speed is the machine's."""
    import torch  # here, so that a process whose memory is measured does without it

    square = torch.randn(SIDE, SIDE)
    return lambda: square @ square


def flops_per_second(seconds: float) -> float:
    """Operations per second, from the seconds of `multiply`."""
    return 2 * SIDE**3 / seconds


def check(what: str, ours: Any, other: Any, tolerance: float) -> None:
    """Refuse to time two things that do not give the same.

    Raises:
        DifferentResultsError: They differ by more than `tolerance`.
    """
    difference = float(np.max(np.abs(np.asarray(ours) - np.asarray(other)), initial=0.0))
    if not difference <= tolerance:
        raise DifferentResultsError(f"{what}: results differ by {difference:.3g}")


def peak_memory() -> float:
    """The most bytes that this process had in memory.

    On Linux, `ru_maxrss` is at least that of the process that started this one.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        import resource

        unit = 1.0 if sys.platform == "darwin" else 1024.0
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    if found is None:
        raise SystemExit("/proc/self/status does not tell the peak of memory")
    return 1024.0 * int(found[1])


def machine(packages: Sequence[str] = ("torch", "numpy")) -> dict[str, Any]:
    """What the numbers were measured on."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in packages},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or "unknown"
    names = re.findall(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    wide = "AVX-512" if "avx512f" in text else "AVX2" if "avx2" in text else "no AVX2"
    return f"{names[0] if names else 'unknown'}, {wide}"
