"""The settings of a training loop of one's own, and what a user may give for each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedcor.core.config import (
    check_at_least,
    check_positive,
    plain_keywords,
)
from fedcor.core.describe import describe
from fedcor.core.errors import ConfigError
from fedcor.core.types import Array, Optimiser, Selector, optimiser_traits, selector_traits
from fedcor.optimisers import OPTIMISERS, as_optimiser, build_optimiser
from fedcor.rounds.state_machine import MachineSettings
from fedcor.runs.tracking.callback import GivenCallback
from fedcor.selectors import DEFAULT_SELECTOR, SELECTORS, build_selector

OWN = "own"  # as an optimiser: the user puts the updates together


@plain_keywords
@dataclass(frozen=True, kw_only=True)
class LoopSettings(MachineSettings):
    """The settings of `Rounds`: those of its rounds (`MachineSettings`), and these.

    Args:
        name: Name of the experiment in the record.
        learning_rate: Of local training, a number or a function of the round: for the record, and
            for selectors and optimisers that use it. NaN where it is unknown.
        callbacks: Called after every round; see `fedcor.Callback`. Names of trackers need a folder.
        checkpoint_every: Rounds from one checkpoint to the next. A killed loop repeats the rounds
            since.
    """

    name: str = "own-loop"
    learning_rate: float | Callable[[int], float] = math.nan
    callbacks: Iterable[GivenCallback] = ()
    checkpoint_every: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("checkpoint_every", self.checkpoint_every, 1)

    def rate_at(self, round: int) -> float:
        """The learning rate of a round; NaN where it is unknown."""
        given = self.learning_rate(round) if callable(self.learning_rate) else self.learning_rate
        if not isinstance(given, float) or not math.isnan(given):
            check_positive("learning_rate", given)
        return float(given)


def as_selector(given: Selector | str | None, clients_per_round: int | None) -> Selector:
    """A selector, of a name with `clients_per_round` too; None for the default one."""
    if given is None or isinstance(given, str):
        if clients_per_round is None:
            allowed = "must be given where the selector is not an object"
            raise ConfigError("clients_per_round", None, allowed)
        return build_selector(given or DEFAULT_SELECTOR, clients_per_round)
    if clients_per_round is not None:
        allowed = "is set by the selector that you gave"
        raise ConfigError("clients_per_round", clients_per_round, allowed)
    SELECTORS.check(given)
    return given


def loop_optimiser(
    given: Optimiser | str | None, selector: Selector, *, weighted: bool | None = None
) -> Optimiser | None:
    """The optimiser; None where the user puts the updates together.

    Args:
        given: By the user.
        selector: It goes with an optimiser, which is taken if none is given.
        weighted: Whether models count in proportion to their clients' data; None: as the optimiser
            says.
    """
    if given == OWN:
        return None
    given = selector_traits(selector).optimiser if given is None else given
    optimiser = build_optimiser(given) if isinstance(given, str) else as_optimiser(given)
    if callable(getattr(optimiser, "corrections", None)) or optimiser_traits(optimiser).proximal:
        allowed = "changes the local steps of clients, which your own training would have to do"
        raise ConfigError("optimiser", given, allowed, "choose one that works on the server alone")
    if weighted is None or weighted == optimiser_traits(optimiser).weighted:
        return optimiser
    try:
        changed: Optimiser = dataclasses.replace(optimiser, weighted=weighted)  # type: ignore[type-var]
    except TypeError:
        raise ConfigError("weighted", weighted, "cannot be set for this optimiser") from None
    return changed


def describe_optimiser(optimiser: Optimiser | None) -> dict[str, Any]:
    """An optimiser's name and options, as the header of the simulator has them."""
    if optimiser is None:
        return {"name": OWN}
    given = getattr(optimiser, "short_form", optimiser)
    options = {key: value for key, value in describe(given).items() if key != "class"}
    return {"name": OPTIMISERS.name_of(given), **options}


def as_clients(given: Sequence[int] | Mapping[Any, int] | Array) -> dict[Any, int]:
    """Client -> its number of samples."""
    if not isinstance(given, Mapping | list | tuple | np.ndarray):
        raise ConfigError("sizes", given, "must be a list of numbers, or a dictionary of them")
    named = given if isinstance(given, Mapping) else dict(enumerate(np.asarray(given).tolist()))
    for client, size in named.items():
        check_at_least(f"sizes[{client!r}]", size, 1)
    if not named:
        raise ConfigError("sizes", given, "must name at least one client")
    if len({str(client) for client in named}) < len(named):
        raise ConfigError("sizes", list(named), "has two clients of the same name")
    return {client: int(size) for client, size in named.items()}
