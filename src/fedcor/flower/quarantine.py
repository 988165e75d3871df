"""Quarantine: a client that fails again and again is left alone, for longer each time.

What a client is asked to do is a *task*: to train, to answer a question (`probe`), to evaluate.
Faults in a row are counted for each task by itself, at most one per round, since a client may
answer every question and fail in every training. One usable reply to the task ends its count.

    no reply        the node is gone or late: left alone for 1, 2, 4, then 8 rounds. A line comes
                    back by itself, and each try costs a deadline. A dead node fails at every task:
                    such a fault counts on from the longest row of faults, whatever their task.
    a useless one   an error, or a reply that cannot be used: the first may be chance; from the
                    second in a row on for 1, 2, 4, ... up to 64 rounds. Most such clients stay
                    broken until somebody mends them.

So a client is left alone for about as long as it has been failing already. While it is left alone,
it is neither chosen nor asked anything. A useless reply to the strategy's `evaluate` is less: a
client may train well and have no test data. It is then not evaluated, and not asked for losses,
which the same function of the client answers; but it may be chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias, get_args

import numpy as np

from fedcor.types import Array

__all__ = ["LONGEST_SILENT", "LONGEST_USELESS", "Quarantine", "Task", "rounds_alone"]

Task: TypeAlias = Literal["train", "probe", "evaluate"]
TASKS: tuple[Task, ...] = get_args(Task)
# Rounds for which a client that does not reply, or replies uselessly, is left alone at most.
LONGEST_SILENT, LONGEST_USELESS = 8, 64


def rounds_alone(faults: int, *, replied: bool) -> int:
    """Rounds for which a client with so many faults in a row is left alone; 0 for not at all.

    Args:
        faults: In a row, of one task, the last one included; at least 1.
        replied: Whether the last one was a useless reply, and not a missing one.

    Example:
        >>> [rounds_alone(faults, replied=False) for faults in range(1, 7)]
        [1, 2, 4, 8, 8, 8]
        >>> [rounds_alone(faults, replied=True) for faults in range(1, 11)]
        [0, 1, 2, 4, 8, 16, 32, 64, 64, 64]
    """
    doublings = faults - 2 if replied else faults - 1
    longest = LONGEST_USELESS if replied else LONGEST_SILENT
    return 0 if doublings < 0 else min(longest, 1 << min(doublings, 30))


class Quarantine:
    """Who is left alone until when. Clients are the numbers 0, 1, ... in the order of `add`."""

    def __init__(self) -> None:
        # task -> (N,) faults in a row; the round before which the client is left alone, and that
        # before which it is for a missing reply; the round of the last fault.
        self._faults: dict[Task, list[int]] = {task: [] for task in TASKS}
        self._until: dict[Task, list[int]] = {task: [] for task in TASKS}
        self._silent: dict[Task, list[int]] = {task: [] for task in TASKS}
        self._last: dict[Task, list[int]] = {task: [] for task in TASKS}

    def add(self) -> None:
        """One more client, who has not failed."""
        for task in TASKS:
            self._faults[task].append(0)
            self._until[task].append(0)
            self._silent[task].append(0)
            self._last[task].append(-1)

    def until(self, client: int, task: Task = "train") -> int:
        """The round from which on the client may be asked to do `task`: to train, if chosen."""
        evaluate = self._silent if task == "train" else self._until
        rows = (self._until["train"], self._until["probe"], evaluate["evaluate"])
        return max(row[client] for row in rows)

    def faults(self, client: int, task: Task) -> int:
        """How often in a row it failed at `task`."""
        return self._faults[task][client]

    def failed(self, client: int, task: Task, round: int, *, replied: bool) -> bool:
        """The client failed at `task` in `round`; returns whether it is left alone for longer now.

        A second fault in the same round does not count: the round is tried again at once, and one
        outage is one fault.
        """
        counted = [one for one in TASKS if self._last[one][client] == round]
        if replied:
            self._faults[task][client] += task not in counted
        else:
            # Useless evaluations do not say that a node is dead.
            gone = [one for one in TASKS if one != "evaluate" or self._silent[one][client]]
            longest = max(self._faults[one][client] for one in (task, *gone))
            self._faults[task][client] = longest + (not counted)
        self._last[task][client] = round
        alone = rounds_alone(self._faults[task][client], replied=replied)
        before = self.until(client, task)
        if alone:
            for until in (self._until,) if replied else (self._until, self._silent):
                until[task][client] = max(until[task][client], round + 1 + alone)
        return self.until(client, task) > before

    def succeeded(self, client: int, task: Task) -> None:
        """The client did `task` well: its faults there are forgotten."""
        self._faults[task][client] = self._until[task][client] = self._silent[task][client] = 0

    def forgive(self, client: int, task: Task, round: int) -> bool:
        """A fault of this `round` was not the client's, and another one in it counts anew.

        Returns whether there was one.
        """
        if self._last[task][client] != round:
            return False
        self._faults[task][client] = max(0, self._faults[task][client] - 1)
        # It was asked in this round, so it was not left alone before the fault.
        self._until[task][client], self._last[task][client] = 0, -1
        return True

    def to_arrays(self) -> dict[str, Array]:
        """What a checkpoint keeps, one row per task."""
        return {
            "failures": np.array([self._faults[task] for task in TASKS], dtype=np.int64),
            "barred": np.array([self._until[task] for task in TASKS], dtype=np.int64),
            "silent": np.array([self._silent[task] for task in TASKS], dtype=np.int64),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> Quarantine:
        """As `to_arrays` gave it.

        Earlier versions had one row, for all tasks together, and did not know what was silence.
        """
        quarantine = cls()
        failures, barred = np.atleast_2d(arrays["failures"]), np.atleast_2d(arrays["barred"])
        for _ in range(failures.shape[1]):
            quarantine.add()
        for row, task in enumerate(TASKS[: len(failures)]):
            quarantine._faults[task] = failures[row].tolist()
            quarantine._until[task] = barred[row].tolist()
            if "silent" in arrays:
                quarantine._silent[task] = arrays["silent"][row].tolist()
        return quarantine
