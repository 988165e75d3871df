"""When to ask, what to remember: how a selector learns the Gaussian process from a federation (the paper's Sec. 4.5).

    rounds 0 .. warmup-1    the choice is uniform, and its loss changes give one sample each
    later, t % interval = 0 `samples_per_refit` uniform selections are tried out and measured
    both                    the embedding of the last refit is the start of the next; recent samples are reused, a sample
                            that is m rounds old with weight discount^m

What is done with the learnt process is the subclass's only business.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from fedcor.checks import check_at_least, check_fraction, check_positive
from fedcor.gp import Samples, fit
from fedcor.selectors.base import lengthened, uniform
from fedcor.types import Federation, FloatArray, IntArray, Outcome, Population, State

__all__ = ["ProcessSelector"]


@dataclass(frozen=True)
class ProcessSelector(ABC):
    """A selector that learns how the clients' losses move together. Defaults: the paper's for FMNIST."""

    clients_per_round: int
    warmup: int = 15  # W, rounds of uniform choice
    interval: int = 10  # Delta t, rounds between refits after the warm-up
    samples_per_refit: int = 1  # S
    warmup_history: int = 10  # M during warm-up: earlier measured rounds that are reused
    history: int = 1  # M after it
    discount: float = 0.9  # theta
    dimension: int = 15  # d
    noise: float = 0.01  # s
    warmup_steps: int = 150  # Adam steps a warm-up round
    refit_steps: int = 100  # Adam steps a later refit
    gp_learning_rate: float = 0.01

    def __post_init__(self) -> None:
        for key in ("clients_per_round", "interval", "samples_per_refit", "dimension"):
            check_at_least(key, getattr(self, key), 1)
        for key in ("warmup", "warmup_history", "history", "warmup_steps", "refit_steps"):
            check_at_least(key, getattr(self, key), 0)
        check_fraction("discount", self.discount, closed=True)
        check_positive("noise", self.noise)
        check_positive("gp_learning_rate", self.gp_learning_rate)

    def init(self, population: Population) -> State:
        return {
            "round": np.array(0),
            "embedding": np.empty(
                (0, self.dimension)
            ),  # (N, d) X, drawn in the first round; empty before
            "samples": np.empty((0, population.count)),  # (m, N) loss changes, oldest first
            "sample_rounds": np.empty(0, dtype=np.int64),  # (m,) when each was measured
            "picked": np.zeros(
                population.count, dtype=np.int64
            ),  # (N,) tau, times chosen since the last refit
        }

    def select(self, state: State, federation: Federation) -> tuple[IntArray, State]:
        t = int(state["round"])
        if t < self.warmup:
            chosen = uniform(federation.rng, federation.available, self.clients_per_round)
            state = self._learn(state, federation, [chosen], self.warmup_history, self.warmup_steps)
        else:
            if t % self.interval == 0 or not len(state["embedding"]):
                tries = [
                    uniform(federation.rng, federation.available, self.clients_per_round)
                    for _ in range(self.samples_per_refit)
                ]
                state = self._learn(state, federation, tries, self.history, self.refit_steps)
            chosen = self.choose(state, federation)
        picked = state["picked"].copy()
        picked[chosen] += (
            1  # counted when chosen, not when delivered: a dead client must not be chosen for ever
        )
        return chosen, {**state, "round": np.array(t + 1), "picked": picked}

    @abstractmethod
    def choose(self, state: State, federation: Federation) -> IntArray:
        """The clients that the learnt process calls for."""

    def observe(self, state: State, outcome: Outcome) -> State:  # noqa: ARG002
        return state

    def join(self, state: State, population: Population) -> State:
        """A client that came later is taken for an average one until its own loss changes are measured."""
        X, count = state["embedding"], population.count
        if len(X):
            X = np.concatenate(
                [X, np.repeat(X.mean(axis=0, keepdims=True), count - len(X), axis=0)]
            )
        return {
            **state,
            "embedding": X,
            "samples": lengthened(state["samples"], count, np.nan),
            "picked": lengthened(state["picked"], count, 0),
        }

    def _learn(
        self,
        state: State,
        federation: Federation,
        selections: list[IntArray],
        history: int,
        steps: int,
    ) -> State:
        """Measure `selections`, refit with the samples of `history` earlier rounds, and reset the annealing."""
        t = int(state["round"])
        X: FloatArray = state["embedding"]
        if not len(X):
            X = federation.rng.standard_normal(
                (len(federation.weights), self.dimension)
            ) / math.sqrt(self.dimension)
        measured = np.array(
            [federation.loss_changes(selection) for selection in selections]
        )  # (S, N)
        measured = measured[
            np.isfinite(measured).any(axis=1)
        ]  # a sample that nobody answered says nothing
        samples = np.concatenate([state["samples"], measured])
        rounds = np.concatenate([state["sample_rounds"], np.full(len(measured), t)])
        used = np.isin(rounds, np.unique(rounds[rounds < t])[-history:] if history else []) | (
            rounds == t
        )
        weights = self.discount ** (t - rounds[used])
        with np.errstate(
            all="ignore"
        ):  # losses that run away may overflow the fit: then the embedding stays as it was
            fitted = fit(
                X, Samples(samples[used], weights), self.noise**2, steps, self.gp_learning_rate
            )
        kept = np.isin(rounds, np.unique(rounds)[-max(self.warmup_history, self.history, 1) :])
        return {
            **state,
            "embedding": fitted if np.isfinite(fitted).all() else X,
            "samples": samples[kept],
            "sample_rounds": rounds[kept],
            "picked": np.zeros_like(state["picked"]),
        }
