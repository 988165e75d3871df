"""What was tried, how often, and what was lost: the lines of the table."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

_EXAMPLES = 5  # of what was lost, kept per line


@dataclass(frozen=True)
class Line:
    """One line of the table.

    Attributes:
        group: Crashes, disk, files or input.
        what: What was tried.
        tried: How often.
        lost: How often something was lost, wrong, or ended in a traceback.
        outcomes: How the trials ended, in words -> how often.
        examples: The first of what was lost.
        seconds: How long it took.
        skipped: Why it was not tried; empty where it was.
    """

    group: str
    what: str
    tried: int
    lost: int
    outcomes: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)
    seconds: float = 0.0
    skipped: str = ""


class Tally:
    """Counts the trials of one line."""

    def __init__(self, group: str, what: str) -> None:
        self.group, self.what = group, what
        self._outcomes: Counter[str] = Counter()
        self._lost, self._examples = 0, list[str]()
        self._started = time.perf_counter()

    def add(self, outcome: str, times: int = 1) -> None:
        """Trials that ended as they should, as `outcome`."""
        self._outcomes[outcome] += times

    def lose(self, example: str, *, counted: bool = False) -> None:
        """A trial that lost something. `counted` if `add` was already called for it."""
        self._lost += 1
        if not counted:
            self._outcomes["lost"] += 1
        if len(self._examples) < _EXAMPLES:
            self._examples.append(example[:2000])

    @property
    def tried(self) -> int:
        """How many trials were counted."""
        return sum(self._outcomes.values())

    def outcome(self, name: str) -> int:
        """How many trials ended so."""
        return self._outcomes[name]

    def line(self) -> Line:
        """The line of the table."""
        seconds = round(time.perf_counter() - self._started, 1)
        outcomes = dict(sorted(self._outcomes.items(), key=lambda item: -item[1]))
        args = (self.group, self.what, self.tried, self._lost, outcomes, self._examples)
        return Line(*args, seconds)


def as_markdown(lines: Sequence[Line]) -> str:
    """The table, and below it what was lost."""
    rows = ["| | what was tried | times | how it ended | lost |", "|---|---|---:|---|---:|"]
    for line in lines:
        ends = line.skipped and f"not tried here: {line.skipped}"
        ends = ends or ", ".join(f"{how} {times:,}" for how, times in line.outcomes.items())
        rows.append(f"| {line.group} | {line.what} | {line.tried:,} | {ends} | {line.lost:,} |")
    tried, lost = sum(line.tried for line in lines), sum(line.lost for line in lines)
    rows.append(f"| **all** | | **{tried:,}** | | **{lost:,}** |")
    for line in lines:
        rows += ["", *(f"- lost, {line.what}: {text!r}" for text in line.examples)]
    return "\n".join(rows).rstrip() + "\n"
