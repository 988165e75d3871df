"""What runs are called in a table: by their selector, and by who aggregated where that differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedcor.optimisers import OPTIMISERS
from fedcor.record import RunRecord
from fedcor.report.groups import group_names

__all__ = ["optimiser_settings", "optimiser_title", "series_names", "was_renamed"]

_USUAL = "FedAvg"  # goes without saying
_OURS = "OptimiserStrategy"  # the Flower strategy that aggregates with an optimiser of ours


def series_names(runs: Sequence[RunRecord]) -> list[str]:
    """One name per run. Runs of one experiment that share a name are one row of its table.

    It is the name of the selector. Where runs that are compared differ in their optimiser, too, or
    in their Flower strategy, it says who aggregated: `aligned + FedRecall`, `random + FedAdam`; of
    FedAvg it says nothing. A run that was given another name than its selector's keeps it.

    Args:
        runs: Of one experiment, or of several.
    """
    groups = group_names(runs)
    used: dict[str, set[tuple[str, str]]] = {}
    for group, run in zip(groups, runs, strict=True):
        used.setdefault(group, set()).add(_aggregating(run))
    return [_name(run, used[group]) for group, run in zip(groups, runs, strict=True)]


def optimiser_settings(run: RunRecord) -> Mapping[str, Any]:
    """The settings of who aggregated in a run, with its `name`; empty where the record has none.

    Those of a Flower app's strategy are among them; without an optimiser of ours, it is the `name`.
    """
    config = run.header.get("config")
    config = config if isinstance(config, Mapping) else {}
    settings = config.get("optimiser")
    settings = settings if isinstance(settings, Mapping) else {}
    strategy = {key: value for key, value in config.items() if key.startswith("strategy")}
    name = {"name": strategy["strategy"]} if "strategy" in strategy else {}
    return {**name, **settings, **strategy}


def was_renamed(run: RunRecord) -> bool:
    """Whether a run was given another name than its selector's, which then says what it is."""
    config, name = run.header.get("config"), run.header.get("selector")
    return isinstance(config, Mapping) and config.get("selector", name) != name


def optimiser_title(name: str) -> str:
    """What an optimiser is called in tables, by its registered name or `module:Class`.

    Example:
        >>> optimiser_title("fedrecall"), optimiser_title("my_module:Mine")
        ('FedRecall', 'Mine')
    """
    known = OPTIMISERS.built_in.get(name)
    return name.rpartition(":")[2] if known is None else known.__name__


def _name(run: RunRecord, used: set[tuple[str, str]]) -> str:
    """`used` has whoever aggregated in one of the runs that it is compared with."""
    selector, own = str(run.header.get("selector")), _aggregating(run)
    title = _title(*own)
    if own[1] == _OURS and any(_title(*other) == title for other in used - {own}):
        title = f"{_OURS}({title})"  # Flower has a strategy of this name, which others use
    if len(used) == 1 or title in ("", _USUAL) or was_renamed(run):
        return selector
    return f"{selector} + {title}"


def _aggregating(run: RunRecord) -> tuple[str, str]:
    """The names of the optimiser and of the Flower strategy; empty where there is none."""
    settings = optimiser_settings(run)
    strategy = str(settings.get("strategy", ""))
    name = str(settings.get("name", ""))
    return ("" if name == strategy else name), strategy


def _title(optimiser: str, strategy: str) -> str:
    title = optimiser_title(optimiser)
    if strategy in ("", _OURS):
        return title
    return f"{strategy}({title})" if title else strategy
