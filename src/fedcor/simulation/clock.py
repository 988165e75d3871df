"""The simulated clock: how long clients take, and when the server stops waiting for them.

Notation
    s_k         seconds of one local step of client k
    down_k, up_k    its bandwidth, in Mbit/s
    E_k         local steps that it does
    n_k, B      its samples, and the samples of a mini-batch

    training    bytes sent / down_k  +  E_k s_k  +  bytes returned / up_k
    a question  bytes sent / down_k  +  ceil(n_k / B) s_k / 3  +  bytes of the answer / up_k

An evaluation only goes forward. A training step goes forward and back, which costs about three
times as much (FedScale's rule, Lai et al., ICML 2022).

The server waits in *stretches*: one for each question to a group of clients, and one for each
training. They follow each other, and a round takes as long as all of its stretches.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from fedcor.core.config import check_between, check_one_of, check_positive, plain_keywords
from fedcor.core.describe import Described
from fedcor.core.errors import ConfigError
from fedcor.core.rng import stream
from fedcor.core.types import Array, BoolArray, FloatArray, IntArray
from fedcor.simulation.traces import DeviceTrace

EVALUATION = 1 / 3  # of a training step on as many samples
LARGEST_SPREAD = 5.0
_BYTES = 1e6 / 8  # in a second, at 1 Mbit/s


@plain_keywords
@dataclass(frozen=True)
class Devices(Described):
    """How fast clients are. A client keeps its speed and its bandwidth for the whole run.

    Each is log-normal over the clients: what is given is the median, and a spread is the standard
    deviation of the logarithm; with a spread of 0, all clients are equal. The speed of a client is
    independent of its bandwidth, and of its data unless `tied_to` is set.

    Args:
        seconds_per_step: seconds of one local step, the median client's.
        down: Mbit/s from the server to a client, the median client's.
        up: Mbit/s from a client to the server, the median client's.
        speed_spread: spread of the seconds per step.
        bandwidth_spread: spread of the bandwidth; `up` is to `down` as with the median client.
        tied_to: `labels`: the same seconds per step are dealt out by each client's most frequent
            label, the highest label to the slowest. None: at random.

    Example:
        >>> from fedcor.simulation.clock import device_speeds
        >>> speeds = device_speeds(Devices(seconds_per_step=2.0), seed=1, clients=3)
        >>> speeds.seconds_per_step
        array([2., 2., 2.])
    """

    seconds_per_step: float
    down: float = 20.0
    up: float = 5.0
    speed_spread: float = 0.0
    bandwidth_spread: float = 0.0
    tied_to: Literal["labels"] | None = None

    def __post_init__(self) -> None:
        for key in ("seconds_per_step", "down", "up"):
            check_positive(key, getattr(self, key))
            check_between(key, getattr(self, key), 1e-9, 1e9)
        for key in ("speed_spread", "bandwidth_spread"):
            check_between(key, getattr(self, key), 0.0, LARGEST_SPREAD)
        if self.tied_to is not None:
            check_one_of("tied_to", self.tied_to, ("labels",))

    def describe(self) -> dict[str, Any]:
        """The settings as plain values, for a record."""
        return dataclasses.asdict(self)


class Speeds(NamedTuple):
    """How fast each of N clients is.

    Attributes:
        seconds_per_step: (N,) s_k.
        down: (N,) Bytes per second from the server.
        up: (N,) Bytes per second to the server.
    """

    seconds_per_step: FloatArray
    down: FloatArray
    up: FloatArray

    def round_trip(
        self,
        clients: IntArray,
        sent: FloatArray | IntArray,
        steps: Array,
        returned: int,
    ) -> FloatArray:
        """(len(clients),) seconds until the reply of each is back.

        Args:
            clients: The clients that train, or are asked for a loss.
            sent: (len(clients),) Bytes that each is sent.
            steps: (len(clients),) Local steps of each; of a question, `EVALUATION` x mini-batches.
            returned: Bytes that each sends back.
        """
        work = steps * self.seconds_per_step[clients]
        seconds: FloatArray = sent / self.down[clients] + work + returned / self.up[clients]
        return seconds


def device_speeds(
    devices: Devices | DeviceTrace, seed: int, clients: int, labels: IntArray | None = None
) -> Speeds:
    """How fast each client is: drawn from streams of the seed, or from a trace.

    Args:
        devices: The settings, or a trace.
        seed: Random seed.
        clients: N.
        labels: (N,) The most frequent label of each client, where devices are tied to it.

    Raises:
        ConfigError: The trace has another number of clients.
    """
    if isinstance(devices, DeviceTrace):
        if len(devices.down) != clients:
            allowed = f"has {len(devices.down)} clients, but the partition has {clients}"
            raise ConfigError("devices", devices.file, allowed)
        return Speeds(devices.seconds_per_step, devices.down * _BYTES, devices.up * _BYTES)
    slowness = _factors(seed, "device speed", devices.speed_spread, clients)
    if devices.tied_to == "labels":
        assert labels is not None
        # The same factors in another order, which is kept among the clients of a label.
        order = np.lexsort((slowness, labels))
        slowness[order] = np.sort(slowness)
    band = _factors(seed, "device bandwidth", devices.bandwidth_spread, clients)
    down, up = devices.down * band * _BYTES, devices.up * band * _BYTES
    return Speeds(devices.seconds_per_step * slowness, down, up)


def _factors(seed: int, purpose: str, spread: float, clients: int) -> FloatArray:
    """(N,) log-normal with median 1."""
    factors: FloatArray = np.exp(spread * stream(seed, purpose).standard_normal(clients))
    return factors


def wait(
    times: FloatArray,
    *,
    goal: int | None = None,
    deadline: float | None = None,
    counts: IntArray | None = None,
    order: IntArray | FloatArray | None = None,
) -> tuple[BoolArray, float]:
    """Wait for clients: until `goal` are back, all are back, or the deadline.

    Without a deadline, the server does not wait for clients that never come: it sees that their
    connections are lost.

    Args:
        times: (m,) Seconds until each is back; infinite for one that never comes.
        goal: How many are enough; None for all.
        deadline: Seconds after which the server goes on without the others. A client that is back
            at that very moment counts.
        counts: (m,) How many each client counts for, towards the goal; None for 1 each.
        order: (m,) Breaks ties between clients that are back at the same time: the lower number is
            first, then the lower position.

    Returns:
        (m,) which clients were back in time, and how many seconds the server waited.

    Example:
        >>> wait(np.array([3.0, 1.0, np.inf, 2.0]), goal=2, deadline=10.0)
        (array([False,  True, False,  True]), 2.0)
    """
    limit = np.inf if deadline is None else deadline
    back: BoolArray = np.isfinite(times) & (times <= limit)
    if goal is not None:
        each = np.ones(len(times), dtype=np.int64) if counts is None else counts
        tie = np.zeros(len(times)) if order is None else order
        arrivals = np.lexsort((np.arange(len(times)), tie, times))
        arrivals = arrivals[back[arrivals]]
        before = np.cumsum(each[arrivals]) - each[arrivals]  # who was there already
        if len(arrivals) and before[-1] + each[arrivals[-1]] >= goal:
            enough = arrivals[before < goal]
            counted = np.zeros(len(times), dtype=bool)
            counted[enough] = True
            return counted, float(times[enough[-1]])
    if deadline is not None and not back.all():
        return back, float(deadline)
    return back, float(times[back].max()) if back.any() else 0.0
