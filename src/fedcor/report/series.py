"""What runs are called in a table: by their selector, and by their optimiser where it differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedcor.optimisers import OPTIMISERS
from fedcor.record import RunRecord

__all__ = ["optimiser_settings", "optimiser_title", "series_names", "was_renamed"]

_USUAL = "fedavg"  # goes without saying


def series_names(runs: Sequence[RunRecord]) -> list[str]:
    """One name per run. Runs of one experiment that share a name are one row of its table.

    It is the name of the selector. Where runs of an experiment differ in their optimiser, too, it
    says which one aggregated: `aligned + FedRecall`; of FedAvg it says nothing. A run that was
    given another name than its selector's keeps it.

    Args:
        runs: Of one experiment, or of several.
    """
    used: dict[str, set[str]] = {}
    for run in runs:
        used.setdefault(str(run.header.get("experiment")), set()).add(_optimiser(run))
    return [_name(run, len(used[str(run.header.get("experiment"))]) > 1) for run in runs]


def optimiser_settings(run: RunRecord) -> Mapping[str, Any]:
    """The settings of a run's optimiser, with its `name`; empty where the record has none."""
    config = run.header.get("config")
    settings = config.get("optimiser") if isinstance(config, Mapping) else None
    return settings if isinstance(settings, Mapping) else {}


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


def _name(run: RunRecord, differing: bool) -> str:
    selector, optimiser = str(run.header.get("selector")), _optimiser(run)
    if not differing or optimiser in ("", _USUAL) or was_renamed(run):
        return selector
    return f"{selector} + {optimiser_title(optimiser)}"


def _optimiser(run: RunRecord) -> str:
    return str(optimiser_settings(run).get("name", ""))
