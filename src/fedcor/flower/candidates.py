"""Candidates: models that a strategy makes for a selector's question, and may be asked to adopt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp.strategy import Strategy

from fedcor.flower.memory import Memory, restore, snapshot, wrapped

__all__ = ["Candidate", "adopt", "is_candidate", "trial"]

_TRIAL: ContextVar[bool] = ContextVar("fedcor_trial", default=False)


def is_candidate() -> bool:
    """Whether the aggregation that is under way makes a candidate, which may be dropped.

    FedCor asks what a selection of clients would change. The strategy's `aggregate_train` is then
    called for a model that is shown to clients, and may not become the model of the round. What the
    strategy changes in its own attributes is put back after it. A strategy that also writes files,
    say, asks here, and skips candidates.

    A candidate that is chosen becomes the model as it is: it is not aggregated a second time. A
    strategy that has a method `candidate_adopted(server_round, arrays, metrics)` then hears of it.

    Returns:
        True within an `aggregate_train` whose result is only tried; False everywhere else.

    Example:
        class Saving(FedAvg):
            def aggregate_train(self, server_round, replies):
                arrays, metrics = super().aggregate_train(server_round, replies)
                if not is_candidate():
                    save(server_round, arrays)
                return arrays, metrics

            def candidate_adopted(self, server_round, arrays, metrics):
                save(server_round, arrays)
    """
    return _TRIAL.get()


@dataclass(frozen=True)
class Candidate:
    """What a strategy made of a selection, and all that goes with it if it becomes the model."""

    arrays: ArrayRecord | None
    metrics: MetricRecord | None
    memory: Memory  # the strategy after it
    config: ConfigRecord  # the train configuration that its clients trained with


@contextmanager
def trial(strategy: Strategy) -> Iterator[None]:
    """Within it, `strategy` makes a candidate. After it, its attributes are as they were."""
    before, token = snapshot(strategy), _TRIAL.set(True)
    try:
        yield
    finally:
        _TRIAL.reset(token)
        restore(strategy, before)


def adopt(strategy: Strategy, candidate: Candidate, server_round: int) -> None:
    """The candidate becomes the model: `strategy` is as it was after making it, and hears of it."""
    restore(strategy, candidate.memory)
    if candidate.arrays is None:
        return  # it left the model as it is
    for _, one in wrapped(strategy):
        hook = getattr(one, "candidate_adopted", None)
        if callable(hook):
            hook(server_round, candidate.arrays, candidate.metrics)
