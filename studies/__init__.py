"""Studies: the paper's table and figures, and what goes beyond them. Run `python -m studies NAME`.

A study runs whatever is missing, saves its numbers (`<study>-<dataset>.json`), draws its figure
from them (`.svg`, `.png`) and writes its tables (`.md`). An interrupted study resumes when it is
started again. Importing this package is cheap: a study is imported when it runs, with the packages
that it needs.

To add a study, declare a `studies.scaffold.Study` in a module and add one line to `STUDIES`.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from fedcor.core.config import check_one_of
from fedcor.core.errors import MissingExtraError
from fedcor.core.files import write_whole
from studies.plan import Plan
from studies.scaffold import Runs, Study

SIM, DRAWN, LEARNT = ("torch",), ("torch", "matplotlib"), ("torch", "sklearn")


class Entry(NamedTuple):
    """A study that can be run.

    Attributes:
        place: Module below this package, and the name of the study in it.
        description: One line for the help.
        packages: Packages it needs that fedcor installs only on request.
        group: The studies it belongs to: `paper` or `beyond`.
    """

    place: str
    description: str
    packages: tuple[str, ...] = DRAWN
    group: str = "beyond"


STUDIES: dict[str, Entry] = {
    "table1": Entry("table1:STUDY", "Table 1: rounds to the target accuracy", SIM, "paper"),
    "convergence": Entry("curves:CONVERGENCE", "Figure 4: accuracy over rounds", DRAWN, "paper"),
    "toy": Entry("toy:STUDY", "Figure 1: three ways to choose two clients", DRAWN[1:], "paper"),
    "normality": Entry("measurements:NORMALITY", "are loss changes Gaussian?", DRAWN, "paper"),
    "stationarity": Entry(
        "measurements:STATIONARITY", "Figure 3: how stable is their covariance?", DRAWN, "paper"
    ),
    "interval": Entry(
        "curves:INTERVAL", "Figure 5: how often must the process be refitted?", DRAWN, "paper"
    ),
    "annealing": Entry("curves:ANNEALING", "Figure 6: the annealing coefficient", DRAWN, "paper"),
    "embedding": Entry(
        "measurements:EMBEDDING", "Figure 7: the map of clients", (*LEARNT, "matplotlib"), "paper"
    ),
    "beyond-table": Entry("complement:TABLE", "complement beside every other selector"),
    "beyond-ablation": Entry("complement:ABLATION", "which parts of complement matter"),
    "beyond-limits": Entry("complement_limits:LIMITS", "where complement may fail"),
    "beyond-fairness": Entry("complement_limits:FAIRNESS", "which clients complement serves"),
    "beyond-confirmation": Entry("complement:CONFIRMATION", "complement on held-out seeds"),
    "probing": Entry("probing:STUDY", "what probing only a sample of the clients costs"),
    "memory": Entry(
        "memory:STUDY",
        "aligned with FedRecall beside other selectors and optimisers",
        (*LEARNT, "matplotlib"),
    ),
    "memory-ablation": Entry("memory_parts:ABLATION", "which parts of the pair matter", LEARNT),
    "memory-stress": Entry(
        "memory_parts:STRESS", "the pair at other learning rates and local steps", LEARNT
    ),
    "memory-anatomy": Entry(
        "memory_anatomy:STUDY", "a round's step compared with the step of all clients", LEARNT
    ),
    "byzantine": Entry("byzantine:STUDY", "Byzantine clients, and a defence against them", SIM),
    "byzantine-means": Entry(
        "byzantine:MEANS", "Byzantine clients, and robust means of their updates", SIM
    ),
    "time": Entry("time_to_accuracy:STUDY", "time to accuracy with clients of unequal speed"),
}
GROUPS: dict[str, tuple[str, ...]] = {
    **{
        group: tuple(name for name, entry in STUDIES.items() if entry.group == group)
        for group in ("paper", "beyond")
    },
    "all": tuple(STUDIES),
}
NAMES: tuple[str, ...] = (*STUDIES, *GROUPS)

# Package -> its name in messages, and the extra that installs it.
_EXTRAS = {
    "torch": ("PyTorch", "sim"),
    "sklearn": ("scikit-learn", "sim"),
    "matplotlib": ("matplotlib", "plot"),
}


def run(what: str, plan: Plan) -> list[Path]:
    """Run a study, or all studies of a group, as far as they are not done yet.

    Args:
        what: One of `NAMES`: a study, or the group `paper`, `beyond` or `all`.
        plan: How much of it to run, and where to.

    Returns:
        The files written.

    Example:
        from fedcor.runs.progress import show_rounds

        plan = Plan(Path("runs/studies"), show_rounds, jobs=2)
        run("table1", plan.quick())
    """
    check_one_of("what", what, NAMES)
    # A missing package or a wrong plan is noticed before anything runs.
    studies = {name: load_study(name) for name in GROUPS.get(what, (what,))}
    plans = {name: study.adapt(plan) for name, study in studies.items()}
    return [path for name, study in studies.items() for path in _run(name, study, plans[name])]


def load_study(name: str) -> Study:
    """Import the study `name`, or name the package that is missing."""
    entry = STUDIES[name]
    for package in entry.packages:
        try:
            import_module(package)
        except ImportError as error:
            raise MissingExtraError(*_EXTRAS[package]) from error
    module, _, attribute = entry.place.partition(":")
    study: Study = getattr(import_module(f"{__name__}.{module}"), attribute)
    return study


def _run(name: str, study: Study, plan: Plan) -> list[Path]:
    """Run what is missing, then save numbers, figures and tables; returns the files written."""
    pairs = [(s, v) for s in study.scenarios(plan) for v in study.variants(plan, s)]
    runs: Runs = {}
    if pairs:
        from studies.runs import run_all

        runs = run_all(plan, pairs)
    described = {"plan": plan.describe() | ({"settings": list(runs)} if runs else {})}
    paths = []
    for result in study.evaluate(plan, runs):
        stem = result.name or name
        stem = f"{stem}-{plan.dataset}" if study.needs_plan else stem
        numbers = {**(described if study.needs_plan else {}), **result.numbers}
        paths.append(plan.out / f"{stem}.json")
        write_whole(paths[-1], (json.dumps(numbers) + "\n").encode())
        if result.draw is not None:
            from fedcor.reporting.plots import save_plot

            figure = result.draw()
            for kind in ("svg", "png"):
                paths.append(plan.out / f"{stem}.{kind}")
                save_plot(figure, paths[-1])
        if result.tables:
            paths.append(plan.out / f"{stem}.md")
            write_whole(paths[-1], "".join(result.tables).encode())
    return paths
