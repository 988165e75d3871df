"""Simulated faults: unavailable, failing, slow and late clients.

They are drawn from streams of (seed, round), so that every selector meets the same ones.

    Faults          the settings
    Attendance      the faults of one round
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedcor.core.config import (
    build_dataclass,
    check_between,
    check_fraction,
    check_positive,
    plain_keywords,
)
from fedcor.core.describe import describe
from fedcor.core.errors import ConfigError, errors_under
from fedcor.core.rng import stream
from fedcor.core.types import BoolArray, FloatArray, IntArray
from fedcor.rounds.state_machine import over_selected
from fedcor.simulation.clock import EVALUATION, Devices, Speeds, device_speeds, wait
from fedcor.simulation.traces import AvailabilityTrace, DeviceTrace, read_availability, read_devices

MOST_OVER_SELECTION = 100.0
# Why a client that was chosen did not take part.
DROPPED = "dropped"
LATE = "late"
REFUSED = "refused"


@plain_keywords
@dataclass(frozen=True)
class Faults:
    """What goes wrong in a simulated federation; by default, nothing.

    Args:
        availability: probability that a client can be reached in a round: a number for all, a list
            with one number per client, or the path of a trace file (`fedcor.simulation.traces`).
        dropout: probability that a client fails in a round although it looks reachable: it is
            sent models, but neither returns an update nor answers a question.
        stragglers: probability that a client has time for only a part of its local steps; the
            part is drawn uniformly.
        training_dropout: probability that a client fails while it trains: it receives the model
            and answers questions, but returns no update.
        silence: probability that a client does not answer questions in a round, although it would
            train.
        devices: how fast clients are: `Devices(...)` or a table of its settings, or the path of a
            trace file. Where it is given, rounds take simulated time, which the record shows.
        deadline: seconds that the server waits for a training, or for answers to a question; who is
            later counts as `late`. It needs `devices`.
        over_selection: how many times as many clients are chosen as are needed, at least 1. A round
            ends when as many as are needed are back; the others are `late`. Without `devices`,
            who is back first is drawn at random.

    Example:
        >>> from fedcor import Faults
        >>> Faults(availability=0.9, dropout=0.1).available(seed=1, round=0, clients=5)
        array([0, 1, 2, 3, 4])
        >>> Faults(over_selection=1.3).choose(10, clients=100)
        13
    """

    availability: float | tuple[float, ...] | str | AvailabilityTrace = 1.0
    dropout: float = 0.0
    stragglers: float = 0.0
    training_dropout: float = 0.0
    silence: float = 0.0
    devices: Devices | Mapping[str, Any] | str | DeviceTrace | None = None
    deadline: float | None = None
    over_selection: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "availability", _as_availability(self.availability))
        object.__setattr__(self, "devices", _as_devices(self.devices))
        for key in ("dropout", "stragglers", "training_dropout", "silence"):
            check_fraction(key, getattr(self, key), closed=True)
        if self.deadline is not None:
            check_positive("deadline", self.deadline)
            if self.devices is None:
                raise ConfigError("deadline", self.deadline, "needs devices, or nobody is late")
        check_between("over_selection", self.over_selection, 1.0, MOST_OVER_SELECTION)

    def available(
        self, seed: int, round: int, clients: int, eligible: BoolArray | None = None
    ) -> IntArray:
        """Sorted ids of the clients that can be reached in a round, at least one.

        If none can, one is drawn at random from the clients that can be reached in some round.

        Args:
            seed: Random seed.
            round: The number of the round.
            clients: N.
            eligible: (N,) Which clients count; None for all.
        """
        probability = self._availability_at(round, clients)
        reached = stream(seed, "availability", round).random(clients) < probability
        may = np.ones(clients, dtype=bool) if eligible is None else eligible
        if (reached & may).any():
            return np.flatnonzero(reached & may)
        ids = np.flatnonzero(may & self._ever_available(clients))
        return ids[stream(seed, "last resort", round).integers(len(ids), size=1)]

    def dropped(self, seed: int, round: int, clients: int) -> BoolArray:
        """(N,) which clients fail in this round."""
        return stream(seed, "drop-out", round).random(clients) < self.dropout

    def training_dropped(self, seed: int, round: int, clients: int) -> BoolArray:
        """(N,) which clients fail while they train."""
        return stream(seed, "training drop-out", round).random(clients) < self.training_dropout

    def silent(self, seed: int, round: int, clients: int) -> BoolArray:
        """(N,) which clients answer no question in this round."""
        return stream(seed, "silence", round).random(clients) < self.silence

    def steps(self, seed: int, round: int, clients: int, local_steps: int) -> IntArray:
        """(N,) local steps that each client has time for, at least one."""
        rng = stream(seed, "stragglers", round)
        slow = rng.random(clients) < self.stragglers
        return np.where(slow, rng.integers(1, local_steps + 1, size=clients), local_steps)

    def choose(self, needed: int, clients: int) -> int:
        """C', how many of `clients` are chosen where C = `needed` must come back."""
        return over_selected(needed, self.over_selection, clients)

    def check_for(self, clients: int, eligible: BoolArray | None = None) -> None:
        """Refuse lists and traces for another number of clients.

        Args:
            clients: N.
            eligible: (N,) Which clients may be chosen; None for all.

        Raises:
            ConfigError: The number differs, or no eligible client can ever be reached.
        """
        given = self.availability
        if isinstance(given, tuple) and len(given) != clients:
            allowed = f"has {len(given)} numbers, but there are {clients} clients"
            raise ConfigError("availability", given, allowed)
        if isinstance(given, AvailabilityTrace) and (last := int(given.clients.max())) >= clients:
            allowed = f"has a client {last}, but the clients are 0 to {clients - 1}"
            raise ConfigError("availability", given.file, allowed)
        if eligible is not None and not (eligible & self._ever_available(clients)).any():
            shown = describe(given)
            raise ConfigError("availability", shown, "nobody who is eligible can ever be reached")
        if isinstance(self.devices, DeviceTrace):
            device_speeds(self.devices, 0, clients)

    def describe(self) -> dict[str, Any]:
        """The settings as plain values, for a record."""
        return {key: describe(value) for key, value in vars(self).items()}

    @property
    def fixed_devices(self) -> Devices | DeviceTrace | None:
        """`devices`, which is no longer a table or a path once it is checked."""
        assert not isinstance(self.devices, str | Mapping)
        return self.devices

    def _availability_at(self, round: int, clients: int) -> FloatArray:
        given = self.availability
        if isinstance(given, AvailabilityTrace):
            return given.at(round, clients)
        return np.broadcast_to(np.asarray(given, dtype=np.float64), (clients,))

    def _ever_available(self, clients: int) -> BoolArray:
        if isinstance(self.availability, AvailabilityTrace):
            return self.availability.ever(clients)
        return self._availability_at(0, clients) > 0


def _as_availability(given: Any) -> float | tuple[float, ...] | AvailabilityTrace:
    """A number, one number per client, or a trace."""
    if isinstance(given, AvailabilityTrace):
        return given
    if isinstance(given, str):
        return read_availability("availability", given)
    given = given.tolist() if isinstance(given, np.ndarray) else given
    numbers = given if isinstance(given, Sequence) else [given]
    for value in numbers:
        check_fraction("availability", value, closed=True)
    if not any(numbers):
        raise ConfigError("availability", given, "must be above 0, or nobody could ever train")
    return tuple(map(float, given)) if isinstance(given, Sequence) else float(given)


def _as_devices(given: Any) -> Devices | DeviceTrace | None:
    """Devices, of a table or a file too."""
    if given is None or isinstance(given, Devices | DeviceTrace):
        return given
    if isinstance(given, str):
        return read_devices("devices", given)
    if not isinstance(given, Mapping):
        allowed = "must be fedcor.Devices, a table of its settings, or the path of a trace file"
        raise ConfigError("devices", given, allowed)
    with errors_under("devices"):
        return build_dataclass(Devices, given)


class Attendance:
    """Which clients can be reached, fail or are late in one round, and how long the server waits.

    Args:
        faults: Which faults are simulated.
        seed: Random seed.
        round: The number of the round.
        clients: N, the number of clients.
        local_steps: E, of a client that has time for all of them.
        eligible: (N,) Which clients may be asked and chosen; None for all.
        speeds: How fast clients are; None without a clock.
        goal: How many trainings are enough; None for all.

    Attributes:
        available: Sorted ids of the clients that look reachable.
        unreachable: How many eligible clients do not.
        receives: (N,) Which clients receive what they are sent.
        trains: (N,) Which clients return an update, in time or late.
        steps: (N,) Local steps of each.
        took: (N,) Seconds until the update of each was back; NaN without a clock, or an update.
        seconds: How long the server has waited in this round; None without a clock.
    """

    def __init__(
        self,
        faults: Faults,
        seed: int,
        round: int,
        *,
        clients: int,
        local_steps: int,
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
        # The order of clients that are back at the same moment.
        self._order = None if goal is None else stream(seed, "arrival", round).permutation(clients)
        self.took = np.full(clients, np.nan)
        self.seconds = None if speeds is None else 0.0
        self._asked: set[int] = set()  # to train
        self._arrived: set[int] = set()  # with their update, in time
        self._counted: set[int] = set()  # in the last training

    def answered(
        self, clients: IntArray, sent: IntArray, batches: IntArray, returned: int
    ) -> BoolArray:
        """(len(clients),) which clients answer a question in time.

        Args:
            clients: The clients that are asked.
            sent: (len(clients),) Bytes that each is sent.
            batches: (len(clients),) Mini-batches that each evaluates.
            returned: Bytes of an answer.
        """
        if self._speeds is None:
            return self._answers[clients]
        times = self._speeds.round_trip(clients, sent, EVALUATION * batches, returned)
        return self._wait(np.where(self._answers[clients], times, np.inf))

    def replied(self, clients: IntArray) -> int:
        """How many of `clients` answer a question at all, in time or late."""
        return int(self._answers[clients].sum())

    def trained(
        self, clients: IntArray, counts: IntArray, sent: IntArray, returned: int
    ) -> BoolArray:
        """(m,) which of the clients that are asked to train return an update that counts.

        A client that was asked before in this round does not train again. If its update was back in
        time then, the server has it at once.

        Args:
            clients: (m,) The clients that are asked to train, each once.
            counts: (m,) How often each was chosen.
            sent: (m,) Bytes that each is sent.
            returned: Bytes that each returns.
        """
        asked = np.isin(clients, list(self._asked))
        arrived = np.isin(clients, list(self._arrived))
        times = np.zeros(len(clients))
        if self._speeds is not None:
            times = self._speeds.round_trip(clients, sent, self.steps[clients], returned)
            sending = ~asked & self.trains[clients]
            self.took[clients[sending]] = times[sending]
        times = np.where(self.trains[clients] & ~asked, times, np.where(arrived, 0.0, np.inf))
        # The server does not wait for clients that failed before in this round.
        expected = ~asked | arrived
        back = np.zeros(len(clients), dtype=bool)
        back[expected] = self._wait(times[expected], counts[expected], clients[expected])
        self._asked.update(clients.tolist())
        self._counted = {*clients[back].tolist()}
        self._arrived |= self._counted
        return back

    def missing(self, chosen: IntArray, participants: IntArray) -> dict[str, list[int]]:
        """Why chosen clients did not take part in the last training: reason -> sorted clients."""
        missing: dict[str, list[int]] = {}
        for client in np.setdiff1d(chosen, participants).tolist():
            late = LATE if self.trains[client] else DROPPED
            reason = REFUSED if client in self._counted else late
            missing.setdefault(reason, []).append(client)
        return dict(sorted(missing.items()))

    def durations(self, participants: IntArray) -> FloatArray | None:
        """(m,) seconds that each participant took; None without a clock."""
        return None if self._speeds is None else self.took[participants]

    def _wait(
        self, times: FloatArray, counts: IntArray | None = None, clients: IntArray | None = None
    ) -> BoolArray:
        """Which clients are back when the server stops waiting; only a training has counts."""
        goal = None if counts is None else self._goal
        order = None if self._order is None or clients is None else self._order[clients]
        back, seconds = wait(times, goal=goal, deadline=self._deadline, counts=counts, order=order)
        if self.seconds is not None:
            self.seconds += seconds
        return back
