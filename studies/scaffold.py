"""What every study is made of: scenarios, variants, and results.

A `Study` says in which scenarios which variants run, and what comes of the runs:

    STUDY = Study(evaluate, scenarios=paper_scenarios, variants=always(RANDOM, FEDCOR))

`studies.run` runs it. All parts are frozen values; declaring a study needs no PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fedcor.runs.record import RunRecord
from studies.plan import Plan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedcor.simulation.experiment import Experiment

# Scenario's name -> variant's label -> one run per seed.
Runs = Mapping[str, Mapping[str, list[RunRecord]]]
# The paper's three settings on the built-in digits, small enough to rehearse a study in seconds.
DIGITS_CHANGES = {
    "2spc": ("partition.shards_per_client=2", "training.clients_per_round=5"),
    "1spc": ("partition.shards_per_client=1", "training.clients_per_round=10"),
    "dir": ("partition.kind=dirichlet", "partition.minimum_size=3", "training.clients_per_round=5"),
}


@dataclass(frozen=True)
class Scenario:
    """A federation in which variants are compared.

    Attributes:
        name: Key of the scenario in the saved numbers.
        family: Scenarios of one family share runs between studies; part of the runs' folder.
        source: Name of a preset, or a function that makes the experiment.
        changes: Settings of the preset to change, as `key=value`.
        keywords: Keywords of the experiment to change.
        rounds: Rounds of a run, unless the plan says otherwise; None for the preset's.
        title: Name in tables and figures.
    """

    name: str
    family: str
    source: str | Callable[[], Experiment]
    changes: tuple[str, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    rounds: int | None = None
    title: str = ""

    @property
    def folder(self) -> str:
        """Name of the runs' folder, and of the experiment."""
        return f"{self.family}-{self.name}"


@dataclass(frozen=True)
class Variant:
    """A selector and an optimiser, perhaps with some of their options changed.

    Attributes:
        label: Name in tables and figures.
        selector: Registered name, or module:Class.
        folder: Name of its folder below the scenario's; the selector's name unless given.
        options: Options of the selector that differ from the preset's.
        optimiser: Table with `name` and options; None for the one that the selector goes with.
        seeds: Run on the first so many seeds only; None for all.
    """

    label: str
    selector: str
    folder: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    optimiser: Mapping[str, Any] | None = None
    seeds: int | None = None


RANDOM, AFL, POWER_OF_CHOICE, FEDCOR, COMPLEMENT, FULL = (
    Variant(name, name)
    for name in ("random", "afl", "power_of_choice", "fedcor", "complement", "full")
)
PAPER_SELECTORS = (RANDOM, AFL, POWER_OF_CHOICE, FEDCOR)


@dataclass(frozen=True)
class Result:
    """What a study found.

    Attributes:
        numbers: Saved as JSON, after the plan.
        tables: Markdown, one below the other; no page is written without any.
        draw: Draws the figure from the numbers; None for no figure.
        name: Stem of the files, before the data set; the study's name unless given.
    """

    numbers: Mapping[str, Any]
    tables: Sequence[str] = ()
    draw: Callable[[], Figure] | None = None
    name: str = ""


@dataclass(frozen=True)
class Study:
    """What is run, and what comes of it.

    Attributes:
        evaluate: Takes the plan and the finished runs, and gives the results.
        scenarios: Where variants are compared; none for a study that measures by itself.
        variants: What runs in a scenario.
        adapt: Changes the plan, or refuses it, before anything is run.
        needs_plan: False for a study that is the same whatever the plan says.
    """

    evaluate: Callable[[Plan, Runs], Iterable[Result]]
    scenarios: Callable[[Plan], Sequence[Scenario]] = lambda plan: ()
    variants: Callable[[Plan, Scenario], Sequence[Variant]] = lambda plan, scenario: ()
    adapt: Callable[[Plan], Plan] = lambda plan: plan
    needs_plan: bool = True


def always(*variants: Variant) -> Callable[[Plan, Scenario], Sequence[Variant]]:
    """The same variants in every scenario."""
    return lambda plan, scenario: variants


def paper_scenario(
    plan: Plan, setting: str, name: str = "", changes: Iterable[str] = (), title: str = ""
) -> Scenario:
    """One of the paper's settings with the plan's data, perhaps with something changed."""
    digits = plan.dataset == "digits"
    return Scenario(
        name=name or setting,
        family=plan.dataset,
        source="digits" if digits else f"{plan.dataset}-{setting}",
        changes=(*(DIGITS_CHANGES[setting] if digits else ()), *changes),
        title=title,
    )


def paper_scenarios(plan: Plan) -> list[Scenario]:
    """The paper's settings that the plan names, unchanged."""
    return [paper_scenario(plan, setting) for setting in plan.settings]
