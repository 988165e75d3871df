"""Who can be reached in a round, who fails, who is late, and how long the server waits."""

from __future__ import annotations

import numpy as np

from fedcor.core.rng import stream
from fedcor.core.types import BoolArray, FloatArray, IntArray
from fedcor.simulation.clock import Speeds, wait
from fedcor.simulation.faults import Faults

# Why a client that was chosen did not take part.
DROPPED = "dropped"
LATE = "late"
REFUSED = "refused"


class Attendance:
    """The faults of one round.

    Args:
        faults: What goes wrong.
        seed: Fixes what is drawn.
        round: The number of the round.
        clients: N, the number of clients.
        local_steps: E, of a client that has time for all of them.
        eligible: (N,) Who may be asked and chosen; None for everyone.
        speeds: How fast clients are; None without a clock.
        goal: How many trainings are enough; None for all.

    Attributes:
        available: Sorted ids of the clients that look reachable.
        unreachable: How many of those who are eligible do not.
        receives: (N,) Who receives what it is sent.
        trains: (N,) Who returns an update when it is told to train, in time or late.
        steps: (N,) Local steps of each.
        took: (N,) Seconds until the update of each was back; NaN without a clock, and where none
            was.
        seconds: How long the server has waited in this round; None without a clock.
    """

    def __init__(
        self,
        faults: Faults,
        seed: int,
        round: int,
        clients: int,
        local_steps: int,
        *,
        eligible: BoolArray | None = None,
        speeds: Speeds | None = None,
        goal: int | None = None,
    ) -> None:
        self._deadline, self._speeds, self._goal = faults.deadline, speeds, goal
        self.available = faults.available(seed, round, clients, eligible)
        may = clients if eligible is None else int(eligible.sum())
        self.unreachable = may - len(self.available)
        self.receives = ~faults.dropped(seed, round, clients)
        self.trains = self.receives & ~faults.training_dropped(seed, round, clients)
        self._answers = self.receives & ~faults.silent(seed, round, clients)
        self.steps = faults.steps(seed, round, clients, local_steps)
        # Who is first where several are back at the same moment.
        self._order = None if goal is None else stream(seed, "arrival", round).permutation(clients)
        self.took = np.full(clients, np.nan)
        self.seconds = None if speeds is None else 0.0
        self._asked: set[int] = set()  # to train
        self._arrived: set[int] = set()  # of them, whose update was back in time
        self._counted: set[int] = set()  # in the last training

    def answered(
        self, clients: IntArray, sent: IntArray, batches: IntArray, returned: int
    ) -> BoolArray:
        """(len(clients),) who answers a question in time.

        Args:
            clients: Who is asked.
            sent: (len(clients),) Bytes that each is sent.
            batches: (len(clients),) Mini-batches that each evaluates.
            returned: Bytes of an answer.
        """
        if self._speeds is None:
            return self._answers[clients]
        times = self._speeds.answer(clients, sent, batches, returned)
        return self._wait(np.where(self._answers[clients], times, np.inf))

    def replied(self, clients: IntArray) -> int:
        """How many of `clients` answer a question at all, in time or late."""
        return int(self._answers[clients].sum())

    def trained(
        self, clients: IntArray, counts: IntArray, sent: IntArray, returned: int
    ) -> BoolArray:
        """(m,) whose update counts, of the clients that are told to train.

        One that was told so before in this round does not train again: if its update was back in
        time then, it is there at once.

        Args:
            clients: (m,) Who is told to train, each once.
            counts: (m,) How often each was chosen.
            sent: (m,) Bytes that each is sent.
            returned: Bytes that each returns.
        """
        if self._speeds is None:
            times = np.zeros(len(clients))
        else:
            times = self._speeds.training(clients, sent, self.steps[clients], returned)
        asked = np.isin(clients, list(self._asked))
        there = np.isin(clients, list(self._arrived))
        if self._speeds is not None:
            sending = ~asked & self.trains[clients]
            self.took[clients[sending]] = times[sending]
        times = np.where(self.trains[clients] & ~asked, times, np.where(there, 0.0, np.inf))
        # Nobody waits for those who failed before in this round.
        expected = ~asked | there
        back = np.zeros(len(clients), dtype=bool)
        back[expected] = self._wait(times[expected], counts[expected], clients[expected])
        self._asked.update(clients.tolist())
        self._counted = {*clients[back].tolist()}
        self._arrived |= self._counted
        return back

    def missing(self, chosen: IntArray, participants: IntArray) -> dict[str, list[int]]:
        """Why chosen clients did not take part in the last training: reason -> sorted clients."""
        found: dict[str, list[int]] = {}
        for client in np.setdiff1d(chosen, participants).tolist():
            late = LATE if self.trains[client] else DROPPED
            reason = REFUSED if client in self._counted else late
            found.setdefault(reason, []).append(client)
        return {reason: found[reason] for reason in sorted(found)}

    def durations(self, participants: IntArray) -> FloatArray | None:
        """(m,) seconds that each participant took; None without a clock."""
        return None if self._speeds is None else self.took[participants]

    def _wait(
        self, times: FloatArray, counts: IntArray | None = None, clients: IntArray | None = None
    ) -> BoolArray:
        """Who is back when the server stops waiting; the clock goes on. A training has counts."""
        goal = None if counts is None else self._goal
        order = None if self._order is None or clients is None else self._order[clients]
        deadline = None if self._speeds is None else self._deadline
        back, seconds = wait(times, goal=goal, deadline=deadline, counts=counts, order=order)
        if self.seconds is not None:
            self.seconds += seconds
        return back
