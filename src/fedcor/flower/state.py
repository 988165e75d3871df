"""What a run on Flower remembers from round to round; the checkpoint writes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from flwr.app import ArrayRecord

from fedcor.flower.alike import Signature
from fedcor.flower.fault_log import FaultLog
from fedcor.flower.roster import Roster
from fedcor.flower.wire import LOG
from fedcor.health import Health
from fedcor.selection import init_state, join_clients
from fedcor.turns import no_turns
from fedcor.types import Population, Selector, State

__all__ = ["CurrentModel", "FederationState", "SeenReplies"]


@dataclass(frozen=True)
class SeenReplies:
    """What the replies of this run have been like."""

    trained: Signature | None = None  # how replies to train messages are usually built
    evaluated: Signature | None = None  # and those to the strategy's evaluate messages
    answered: bool = False  # whether an evaluation, asked for or the strategy's, had a usable loss
    reported: bool = False  # whether a trained model came with one, if the selector needs it
    silent: frozenset[int] = frozenset()  # until then: who has trained in this start, without one
    left_out: frozenset[str] = frozenset()  # metrics that this start has logged as left out


@dataclass(frozen=True)
class CurrentModel:
    """What is known of the current model w^t, beside its parameters."""

    version: str = ""
    losses: Mapping[int, float] = field(default_factory=dict)  # client -> l_k(w^t), where known
    holders: frozenset[int] = frozenset()  # clients that hold w^t
    replies: SeenReplies = SeenReplies()  # to it and to the models before it


@dataclass
class FederationState:
    """What survives between rounds."""

    finished: int = 0  # rounds that were done before this start
    roster: Roster = field(default_factory=Roster)
    model: CurrentModel = field(default_factory=CurrentModel)
    selector: State | None = None  # the selector's state; None before its first round
    population: Population | None = None  # that the selector's state was made for
    norms: State = field(default_factory=dict)  # lengths of updates that the last rounds accepted
    good: ArrayRecord | None = None  # the last model that somebody has trained usably from
    health: Health = field(default_factory=Health)  # of the current model
    turns: State = field(default_factory=no_turns)  # who was chosen lately, where that is capped
    fault_log: FaultLog = field(default_factory=FaultLog)
    doubted: bool = False  # whether this start has logged a doubt about the metrics of replies
    said: set[str] = field(default_factory=set)  # what this start has logged once
    unmet: Mapping[str, int] = field(default_factory=dict)  # rules that the last round did not meet
    assembled: bool = False  # whether the nodes that the first round waits for have been here

    def meet_model(self, version: str) -> None:
        """Forget what was known of another model: this is the first one, or somebody changed it."""
        if self.model.version != version:
            self.model = CurrentModel(version, replies=self.model.replies)

    def adapt_selector(self, selector: Selector) -> State:
        """The selector's state, for the clients that there are by now."""
        population = self.roster.population()
        if self.selector is None or self.population is None:
            self.selector = init_state(selector, population)
        elif not np.array_equal(self.population.sizes, population.sizes):
            joined = join_clients(selector, self.selector, population)
            if joined is not None:
                self.selector = joined
            elif self.population.count < population.count:
                LOG.warning(
                    "%s has no join(), so it cannot take in new clients: its state starts over",
                    type(selector).__name__,
                )
                self.selector = init_state(selector, population)
        self.population = population
        return self.selector
