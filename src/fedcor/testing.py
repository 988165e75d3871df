"""For tests of selectors, ours and yours: a fake federation with closed-form losses, and the suite that every selector passes.

    from fedcor.testing import check_selector
    check_selector(MySelector(clients_per_round=3))

The fake federation has quadratic clients, so each answer is known in closed form:
    l_k(w) = h_k/2 |w - c_k|^2,    trained for E steps of size eta from w:  w_k = c_k + (1 - eta h_k)^E (w - c_k)
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fedcor.rng import stream
from fedcor.types import FloatArray, IntArray, Outcome, Population, Selector, State

__all__ = ["FakeFederation", "check_selector", "round_trip"]


class FakeFederation:
    """Invented clients that answer at once. Keeps every question in `asked` and `tried`; moves on with `train`."""

    def __init__(
        self,
        centres: FloatArray,  # (N, dim) c_k, each client's optimum
        *,
        curvature: FloatArray | float = 1.0,  # (N,) h_k
        sizes: IntArray | None = None,  # (N,) n_k
        learning_rate: float = 0.1,
        local_steps: int = 1,
        seed: int = 0,
        available: Iterable[int] | None = None,
        silent: Iterable[int] = (),  # can be chosen, but never answer and never deliver
    ) -> None:
        clients = len(centres)
        self.centres, self.curvature = (
            centres,
            np.broadcast_to(np.asarray(curvature, float), clients),
        )
        self.population = Population(np.full(clients, 10) if sizes is None else sizes)
        self.learning_rate, self.local_steps, self.seed = learning_rate, local_steps, seed
        self.available = (
            np.arange(clients) if available is None else np.sort(np.fromiter(available, np.int64))
        )
        self.answering = ~np.isin(np.arange(clients), np.fromiter(silent, np.int64))
        self.available.flags.writeable = self.weights.flags.writeable = False
        self.model = np.zeros(centres.shape[1])  # (dim,) w
        self.round = 0
        self.rng = stream(seed, "select", 0)
        self.asked: list[IntArray] = []
        self.tried: list[IntArray] = []

    @classmethod
    def example(cls, clients: int = 12, **options: Any) -> FakeFederation:
        """Clients around three centres, with unequal sizes."""
        rng = stream(clients, "example")
        centres = rng.standard_normal((3, 4))[np.arange(clients) % 3] + 0.1 * rng.standard_normal(
            (clients, 4)
        )
        return cls(centres, sizes=rng.integers(5, 50, size=clients), **options)

    @property
    def weights(self) -> FloatArray:
        return self.population.weights

    def loss_of(self, model: FloatArray) -> FloatArray:  # (N,)
        losses: FloatArray = 0.5 * self.curvature * np.sum((model - self.centres) ** 2, axis=1)
        return losses

    def trained(self, clients: IntArray) -> FloatArray:  # (len(clients), dim)
        shrink = (1.0 - self.learning_rate * self.curvature[clients]) ** self.local_steps
        return self.centres[clients] + shrink[:, None] * (self.model - self.centres[clients])

    def losses(self, clients: IntArray) -> FloatArray:
        self._check(clients)
        self.asked.append(np.asarray(clients))
        return np.where(self.answering[clients], self.loss_of(self.model)[clients], np.nan)

    def loss_changes(self, selection: IntArray) -> FloatArray:
        self._check(selection)
        self.tried.append(np.asarray(selection))
        delivered = selection[self.answering[selection]]
        changes = np.full(len(self.centres), np.nan)
        if len(delivered):
            known = self.available[self.answering[self.available]]
            candidate = self.trained(delivered).mean(axis=0)
            changes[known] = (self.loss_of(candidate) - self.loss_of(self.model))[known]
        return changes

    def _check(self, clients: IntArray) -> None:
        strangers = np.setdiff1d(clients, self.available)
        assert not len(strangers), (
            f"round {self.round}: asked clients that are not available: {strangers}"
        )

    def train(self, chosen: IntArray) -> Outcome:
        """The chosen train, the model moves, the next round begins."""
        delivered = chosen[self.answering[chosen]]  # a client drawn twice counts twice
        participated = np.unique(delivered)
        updates = self.trained(participated) - self.model
        losses = self.loss_of(self.model)[participated]
        outcome = Outcome(
            self.round,
            chosen,
            participated,
            step_sizes=np.full(len(participated), self.learning_rate * self.local_steps),
            aggregation_weights=np.ones(len(participated)),
            read_losses=lambda: losses,
            read_updates=lambda: updates,
        )
        if len(delivered):
            self.model = self.trained(delivered).mean(axis=0)
        self.round += 1
        self.rng = stream(self.seed, "select", self.round)
        return outcome


def round_trip(state: State) -> State:
    """The state as a checkpoint gives it back: named arrays, through a file without pickle."""
    file = io.BytesIO()
    for name, array in state.items():
        assert isinstance(array, np.ndarray), (
            f"the state {name!r} is a {type(array).__name__}, not a NumPy array"
        )
        assert not array.dtype.hasobject, (
            f"the state {name!r} holds Python objects, which no checkpoint takes"
        )
    np.savez(file, **{f"selector/{name}": array for name, array in state.items()})  # type: ignore[arg-type]
    file.seek(0)
    with np.load(file, allow_pickle=False) as archive:
        return {name.removeprefix("selector/"): archive[name] for name in archive.files}


def check_selector(selector: Selector, clients: int = 12, rounds: int = 25) -> None:
    """Raises AssertionError, saying what is wrong, unless `selector` keeps the promises of every selector."""
    parameters = getattr(selector, "__dataclass_params__", None)
    frozen = parameters is not None and parameters.frozen
    assert frozen, (
        "a selector is a frozen dataclass: its hyper-parameters never change, its state is kept outside it"
    )

    everyone = FakeFederation.example(clients)
    chosen = _play(selector, everyone, rounds)
    again = _play(selector, FakeFederation.example(clients), rounds)
    assert _same(chosen, again), (
        "two runs with the same streams chose differently: draw from federation.rng alone"
    )
    resumed = _play(selector, FakeFederation.example(clients), rounds, checkpoint=True)
    assert _same(chosen, resumed), (
        "a state that went through a checkpoint led to other choices: keep it all in the state"
    )

    for few in (1, clients // 2):
        _play(selector, FakeFederation.example(clients, available=range(0, 2 * few, 2)), rounds)
    _play(selector, FakeFederation.example(clients, silent=range(clients // 2)), rounds)
    _play(selector, FakeFederation.example(clients, silent=range(clients)), rounds)
    join = getattr(selector, "join", None)
    if join is not None:  # half of the clients come when the others have trained for a while
        early, late = FakeFederation.example(clients // 2), FakeFederation.example(clients)
        state = selector.init(early.population)
        for _ in range(rounds):
            early_choice, state = selector.select(state, early)
            state = selector.observe(state, early.train(early_choice))
        _play(selector, late, rounds, state=join(round_trip(state), late.population))


def _same(one: list[IntArray], other: list[IntArray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def _play(
    selector: Selector,
    federation: FakeFederation,
    rounds: int,
    *,
    checkpoint: bool = False,
    state: State | None = None,
) -> list[IntArray]:
    """Every round's choice; each is held to the rules of a choice."""
    state = selector.init(federation.population) if state is None else state
    choices = []
    for _ in range(rounds):
        before = {name: array.copy() for name, array in state.items()}
        answer = selector.select(state, federation)
        assert isinstance(answer, tuple) and len(answer) == 2, (
            f"select returned {answer!r}, not (choice, state)"
        )  # noqa: PT018
        chosen, after = answer
        _check_choice(selector, federation, chosen)
        give = getattr(selector, "reasons", None)
        for name, values in ({} if give is None else give(after, federation, chosen)).items():
            assert len(values) == len(chosen), (
                f"{len(values)} reasons {name!r} for {len(chosen)} chosen clients"
            )
        outcome = federation.train(chosen)
        observed = selector.observe(after, outcome)
        assert isinstance(observed, Mapping), f"observe returned {observed!r}, not a state"
        for name, array in before.items():
            same = np.array_equal(array, state[name], equal_nan=array.dtype.kind == "f")
            assert same, f"select or observe changed the state {name!r} in place: return a new one"
        state = round_trip(observed) if checkpoint else observed
        choices.append(chosen)
    return choices


def _check_choice(selector: Selector, federation: FakeFederation, chosen: IntArray) -> None:
    assert isinstance(chosen, np.ndarray), f"the choice is a {type(chosen).__name__}, not an array"
    assert chosen.ndim == 1, f"the choice has {chosen.ndim} dimensions, not one"
    assert chosen.dtype.kind == "i", f"the choice has the type {chosen.dtype}, not whole numbers"
    strangers = np.setdiff1d(chosen, federation.available)
    assert not len(strangers), (
        f"round {federation.round}: chose clients that are not available: {strangers}"
    )
    if not getattr(selector, "replacement", False):
        assert len(np.unique(chosen)) == len(chosen), (
            f"round {federation.round}: chose a client twice: {chosen}"
        )
    wanted = getattr(selector, "clients_per_round", None)
    if wanted is not None:
        possible = (
            wanted
            if getattr(selector, "replacement", False)
            else min(wanted, len(federation.available))
        )
        assert len(chosen) == possible, (
            f"round {federation.round}: chose {len(chosen)} clients, not {possible}"
        )
