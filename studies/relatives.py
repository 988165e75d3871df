"""Relatives of complement, which the ablation compares with it (docs/results/beyond.md).

They are not registered; name them by module and class:

studies.relatives:EqualTarget      complement that targets the plain mean of all clients
studies.relatives:Herding          complement whose groups make up for what earlier groups
                                            missed
studies.relatives:UpdateProcess    the paper's greedy posterior choice, on the kernel of
                                            remembered updates
studies.relatives:Combined         complement's mean matching, on updates and FedCor's
                                            learnt embedding together
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fedcor.core.config import check_at_least, check_fraction, check_positive
from fedcor.core.types import Federation, FloatArray, IntArray, Outcome, Population, Reasons, State
from fedcor.selectors.base import extend_clients, ready, uniform
from fedcor.selectors.complement import Complement
from fedcor.selectors.gp.greedy import Prior, select
from fedcor.selectors.gp_selector import ProcessSelector
from fedcor.selectors.matching import match
from fedcor.selectors.update_memory import table_rows


@dataclass(frozen=True)
class EqualTarget(Complement):
    """Complement whose target counts every client the same, whatever data it has: how much of the
    gain is the weighting alone?"""

    def target(self, state: State, weights: FloatArray) -> FloatArray:
        """(s,) the plain mean of the remembered directions."""
        return super().target(state, np.full_like(weights, 1.0 / len(weights)))


@dataclass(frozen=True)
class Herding(Complement):
    """Complement that matches t + r instead of t, where r sums what earlier rounds missed.

    After each round r becomes carry (r + t - mean direction received).

    Args:
        carry: with 1, the mean of all groups over many rounds is the population's, as in herding,
            even where no single group's is; below 1, what was missed long ago is forgotten
    """

    carry: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction("carry", self.carry, closed=True)

    def init(self, population: Population) -> State:
        """The state before the first round."""
        # (s,) t and r
        return {**super().init(population), "wanted": np.zeros(0), "missed": np.zeros(0)}

    def select(self, state: State, federation: Federation) -> tuple[IntArray, State]:
        """Complement's choice; the state keeps what it was meant to match."""
        chosen, after = super().select(state, federation)
        matched = (state["seen"][chosen] >= 0).any()
        wanted = self._mean(state, federation.weights) if matched else np.zeros(0)
        return chosen, {**after, "wanted": wanted}

    def target(self, state: State, weights: FloatArray) -> FloatArray:
        """(s,) t + r."""
        mean = self._mean(state, weights)
        return mean + state["missed"] if len(state["missed"]) == len(mean) else mean

    def _mean(self, state: State, weights: FloatArray) -> FloatArray:
        return super().target(state, weights)

    def observe(self, state: State, outcome: Outcome) -> State:
        """Remember the updates that came, and what they missed together."""
        after = super().observe(state, outcome)
        came = after["seen"] == int(state["round"]) - 1
        wanted, shares = state["wanted"], after["shares"][came]
        received = table_rows(after, "directions", np.flatnonzero(came))
        if not len(received) or len(wanted) != received.shape[1]:
            return after
        missed = state["missed"] if len(state["missed"]) == len(wanted) else np.zeros_like(wanted)
        missed = self.carry * (missed + wanted - shares @ received / shares.sum())
        return {**after, "missed": missed}


@dataclass(frozen=True)
class UpdateProcess(Complement):
    """Algorithm 1 of the paper with client embeddings that are measured, not learnt: the remembered
    directions.

    By the paper's theory loss changes have the covariance X'X with X = B'G, projected client
    gradients; here X is G itself.

    Args:
        beta: annealing coefficient, as in the paper: a client's gain shrinks by this factor with
            every choice
        interval: rounds after which annealing starts over
        noise: standard deviation, as a share of the directions' root mean square length
    """

    beta: float = 0.95
    interval: int = 10
    noise: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction("beta", self.beta)
        check_at_least("interval", self.interval, 1)
        check_positive("noise", self.noise)

    def init(self, population: Population) -> State:
        """The state before the first round."""
        return {**super().init(population), "picked": np.zeros(population.count, dtype=np.int64)}

    def join(self, state: State, population: Population) -> State:
        """The state with room for clients that joined."""
        picked = extend_clients(state["picked"], population.count, 0)
        return {**super().join(state, population), "picked": picked}

    def select(self, state: State, federation: Federation) -> tuple[IntArray, State]:
        """Complement's sweep, then the greedy posterior choice; counts who was chosen."""
        if int(state["round"]) % self.interval == 0:
            state = {**state, "picked": np.zeros_like(state["picked"])}
        chosen, state = super().select(state, federation)
        picked = state["picked"].copy()
        picked[chosen] += 1
        return chosen, {**state, "picked": picked}

    def reasons(self, state: State, federation: Federation, chosen: IntArray) -> Reasons:
        """None: complement's distances play no part here."""
        return {}

    def choose_known(
        self, state: State, federation: Federation, known: IntArray, wanted: int
    ) -> IntArray:
        """The greedy posterior choice among the known clients."""
        # Everyone's loss counts, but only those who are available can be picked.
        everyone = np.flatnonzero(state["seen"] >= 0)
        weights = federation.weights[everyone]
        total = float(weights.sum())
        prior = Prior(
            X=_at_unit_scale(table_rows(state, "directions", everyone)),
            p=weights / total if total > 0 else weights,
            alpha=self.beta ** state["picked"][everyone].astype(np.float64),
            s2=self.noise**2,
        )
        picks = select(prior, wanted, np.searchsorted(everyone, known))
        return everyone[picks.clients]


@dataclass(frozen=True)
class Combined(ProcessSelector):
    """Where probes are affordable: the group whose mean is closest to everyone's in the updates and
    in the learnt embedding at once.

    Args:
        sketch: what is remembered of an update, as for complement; the other settings are FedCor's
    """

    sketch: Literal["head", "full"] | int = "head"

    needs_updates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self._memory  # refuses an impossible sketch

    @property
    def _memory(self) -> Complement:
        return Complement(self.clients_per_round, self.sketch)

    def init(self, population: Population) -> State:
        """The state before the first round: the process's and complement's."""
        return {**super().init(population), **_named(self._memory.init(population))}

    def join(self, state: State, population: Population) -> State:
        """The state with room for clients that joined."""
        memory = self._memory.join(_unnamed(state), population)
        return _with_memory(super().join(state, population), memory)

    def select(self, state: State, federation: Federation) -> tuple[IntArray, State]:
        """Uniform in the warm-up, later `choose`; counts who was chosen."""
        chosen, state = super().select(state, federation)
        memory = {key: value.copy() for key, value in _unnamed(state).items()}
        memory["asked"][chosen] = int(memory["round"])
        memory["failed"][chosen] += 1  # until it delivers
        return chosen, {**state, **_named({**memory, "round": np.array(int(memory["round"]) + 1)})}

    def choose(self, state: State, federation: Federation) -> IntArray:
        """The clients that match everyone best, of those who do not rest."""
        memory, available = _unnamed(state), federation.available
        count = min(self.clients_per_round, len(available))
        chosen = ready(memory, available)
        if len(chosen) > count:
            chosen = chosen[self._matched(state, federation, chosen, count)]
        more = np.setdiff1d(available, chosen)
        return np.concatenate([chosen, uniform(federation.rng, more, count - len(chosen))])

    def _matched(
        self, state: State, federation: Federation, clients: IntArray, count: int
    ) -> IntArray:
        """Positions in `clients`.

        Directions and embedding are centred and of one scale: the population's mean is 0.
        """
        memory = _unnamed(state)
        known = memory["seen"] >= 0
        # A client that is not known yet is taken to be average, in what it counts as well.
        everyone = table_rows(memory, "directions", np.arange(len(known)))
        directions, shares = np.zeros_like(everyone), memory["shares"]
        if known.any():
            shares = np.where(known, shares, shares[known].mean())
            mean = self._memory.target(memory, federation.weights)
            directions[known] = _at_unit_scale(everyone[known] - mean)
        X = _at_unit_scale(state["embedding"] - federation.weights @ state["embedding"])
        both = np.concatenate([directions, X], axis=1)
        first = federation.rng.integers(len(clients), size=1)
        return match(both[clients], np.zeros(both.shape[1]), first, count, weights=shares[clients])

    def observe(self, state: State, outcome: Outcome) -> State:
        """Remember the updates that came."""
        return _with_memory(state, self._memory.observe(_unnamed(state), outcome))


def _at_unit_scale(rows: FloatArray) -> FloatArray:
    """Rows with a root mean square length of one."""
    scale = float(np.sqrt(np.mean(np.einsum("ns,ns->n", rows, rows)))) if rows.size else 0.0
    return rows / scale if scale > 0 else rows


def _named(state: State) -> dict[str, FloatArray]:
    """Complement's state under names of its own, to be kept beside the process's."""
    return {f"updates/{key}": value for key, value in state.items()}


def _with_memory(state: State, memory: State) -> State:
    """The state with another memory in the place of complement's."""
    rest = {key: value for key, value in state.items() if not key.startswith("updates/")}
    return {**rest, **_named(memory)}


def _unnamed(state: State) -> dict[str, FloatArray]:
    """Complement's part of the state."""
    return {
        key.removeprefix("updates/"): value
        for key, value in state.items()
        if key.startswith("updates/")
    }
