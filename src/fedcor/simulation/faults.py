"""Simulated faults, drawn from streams of (seed, round): every selector meets the same ones."""

from __future__ import annotations

import dataclasses
import math
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
from fedcor.core.errors import ConfigError
from fedcor.core.rng import stream
from fedcor.core.types import BoolArray, FloatArray, IntArray
from fedcor.simulation.clock import Devices, device_speeds
from fedcor.simulation.traces import AvailabilityTrace, DeviceTrace, read_availability, read_devices

MOST_OVER_SELECTION = 100.0
# Those of the first records; a record has the others only where they are used.
_ALWAYS = ("availability", "dropout", "stragglers")


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
        """Sorted ids of the clients that can be reached; if there is none, one drawn at random.

        Only of those who are `eligible`, (N,), where that is given; and one that can be reached in
        some round.
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
        """C', how many clients are chosen where C = `needed` are, of so many."""
        # A product such as 1.1 x 10 must not become 12 by its last bit.
        wanted = math.ceil(self.over_selection * needed * (1 - 1e-12))
        return max(needed, min(wanted, clients))

    def check_for(self, clients: int, eligible: BoolArray | None = None) -> None:
        """Refuse lists and traces that are not of so many clients.

        Args:
            clients: N.
            eligible: (N,) Who may be chosen; None for everyone.

        Raises:
            ConfigError: They are of more or of fewer clients, or none of those who may be chosen
                can ever be reached.
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
        """As plain values for a record. What is newer than the first records is there if used."""
        plain = Faults()
        return {
            key: value.describe() if isinstance(value, DeviceTrace) else _plain(value)
            for key, value in self.settings().items()
            if key in _ALWAYS or value != getattr(plain, key)
        }

    @property
    def fixed_devices(self) -> Devices | DeviceTrace | None:
        """How fast clients are, as `devices` holds it once it is checked."""
        assert not isinstance(self.devices, str | Mapping), "__post_init__ has read it"
        return self.devices

    def settings(self) -> dict[str, Any]:
        """Setting -> what it holds."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def _availability_at(self, round: int, clients: int) -> float | FloatArray:
        given = self.availability
        if isinstance(given, AvailabilityTrace):
            return given.at(round, clients)
        return np.array(given) if isinstance(given, tuple) else float(given)

    def _ever_available(self, clients: int) -> BoolArray:
        given = self.availability
        if isinstance(given, AvailabilityTrace):
            return given.ever(clients)
        return np.broadcast_to(np.asarray(given, dtype=np.float64) > 0, (clients,))


def _as_availability(given: Any) -> float | tuple[float, ...] | AvailabilityTrace:
    """A number, one number per client, or a trace."""
    if isinstance(given, AvailabilityTrace):
        return given
    if isinstance(given, str):
        return read_availability("availability", given)
    if isinstance(given, np.ndarray):
        given = given.tolist()
    if isinstance(given, Sequence):
        for one in given:
            check_fraction("availability", one, closed=True)
        numbers = tuple(float(one) for one in given)
        if not any(numbers):
            allowed = "must have a number above 0, or nobody could ever train"
            raise ConfigError("availability", given, allowed)
        return numbers
    check_fraction("availability", given, closed=True)
    if given == 0.0:
        raise ConfigError("availability", 0.0, "must be above 0, or nobody could ever train")
    return float(given)


def _as_devices(given: Any) -> Devices | DeviceTrace | None:
    """Devices, of a table or a file too."""
    if given is None or isinstance(given, Devices | DeviceTrace):
        return given
    if isinstance(given, str):
        return read_devices("devices", given)
    if not isinstance(given, Mapping):
        allowed = "must be fedcor.Devices, a table of its settings, or the path of a trace file"
        raise ConfigError("devices", given, allowed)
    try:
        return build_dataclass(Devices, given)
    except ConfigError as error:
        raise error.under("devices") from None


def _plain(value: Any) -> Any:
    return value.describe() if isinstance(value, Devices) else describe(value)
