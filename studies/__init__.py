"""The paper's table and figures, and what goes beyond them: one function per experiment.

Numbers are computed and saved first (`<what>-<dataset>.json`), figures are drawn from them (`.svg`,
`.png`). An experiment that was interrupted resumes when it is started again. Importing this package
is cheap: an experiment is imported, with the packages it needs, when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from fedcor.core.config import check_one_of
from fedcor.core.errors import MissingExtraError
from studies.plan import Plan


class Entry(NamedTuple):
    """Where an experiment's function is, below this package; what it shows; and which packages
    it needs that fedcor installs only on request."""

    module: str
    function: str
    description: str
    packages: tuple[str, ...] = ("torch", "matplotlib")


EXPERIMENTS: dict[str, Entry] = {
    "table1": Entry("table1", "table1", "Table 1: rounds to the target accuracy", ("torch",)),
    "convergence": Entry("curves", "convergence", "Figure 4: accuracy over rounds"),
    "toy": Entry("toy", "toy", "Figure 1: three ways to choose two clients", ("matplotlib",)),
    "normality": Entry("measurements", "normality", "are loss changes Gaussian?"),
    "stationarity": Entry("measurements", "stationarity", "Figure 3: does their covariance stay?"),
    "interval": Entry("curves", "interval", "Figure 5: how rarely may the process be refitted?"),
    "annealing": Entry("curves", "annealing", "Figure 6: the annealing coefficient"),
    "embedding": Entry(
        "measurements",
        "embedding",
        "Figure 7: the map of clients",
        ("torch", "sklearn", "matplotlib"),
    ),
    "beyond-table": Entry("beyond.table", "table", "complement beside every other selector"),
    "beyond-ablation": Entry("beyond.ablation", "ablation", "which of its parts matter"),
    "beyond-limits": Entry("beyond.limits", "limits", "where it may fail"),
    "beyond-fairness": Entry("beyond.fairness", "fairness", "which clients it serves"),
    "beyond-confirmation": Entry("beyond.table", "confirmation", "the same on fresh seeds"),
    "probing": Entry("beyond.probing", "probing", "what asking a sample of the clients costs"),
    "memory": Entry(
        "memory.table",
        "memory",
        "aligned with FedRecall beside other selectors with other optimisers",
        ("torch", "sklearn", "matplotlib"),
    ),
    "memory-ablation": Entry(
        "memory.ablation", "ablation", "which parts of the pair matter", ("torch", "sklearn")
    ),
    "memory-stress": Entry(
        "memory.ablation",
        "stress",
        "the pair at other learning rates and local steps",
        ("torch", "sklearn"),
    ),
    "memory-anatomy": Entry(
        "memory.anatomy",
        "anatomy",
        "how far a round's step is from the step of everyone",
        ("torch", "sklearn"),
    ),
    "byzantine": Entry(
        "byzantine.table", "byzantine", "clients that lie, and a defence against them", ("torch",)
    ),
    "byzantine-means": Entry(
        "byzantine.means",
        "means",
        "clients that lie, and robust means of what they send",
        ("torch",),
    ),
    "time": Entry(
        "timed.table", "time_to_accuracy", "time to accuracy, where clients differ in speed"
    ),
}
# What goes beyond the paper has packages of its own.
_BEYOND = tuple(name for name, entry in EXPERIMENTS.items() if "." in entry.module)
GROUPS: dict[str, tuple[str, ...]] = {
    "paper": tuple(name for name in EXPERIMENTS if name not in _BEYOND),
    "beyond": _BEYOND,
    "all": tuple(EXPERIMENTS),
}
NAMES: tuple[str, ...] = (*EXPERIMENTS, *GROUPS)

# Package -> what it is called, and the extra that installs it.
_EXTRAS = {
    "torch": ("PyTorch", "sim"),
    "sklearn": ("scikit-learn", "sim"),
    "matplotlib": ("matplotlib", "plot"),
}


def reproduce(what: str, plan: Plan) -> list[Path]:
    """Run an experiment, or all experiments of a group, as far as they are not done yet.

    Args:
        what: one of `NAMES`: an experiment, or the group `paper`, `beyond` or `all`
        plan: how much of it to run, and where to

    Returns:
        The files written.

    Example:
        from fedcor.runs.progress import show_rounds

        plan = Plan(Path("runs/reproduce"), show_rounds, jobs=2)
        reproduce("table1", plan.quick())
    """
    check_one_of("what", what, NAMES)
    # All of them first: a missing package is noticed before anything runs.
    names = GROUPS.get(what, (what,))
    functions = [load_function(name) for name in names]
    if "beyond-confirmation" in names:
        plan.check_fresh_seeds()
    return [path for function in functions for path in function(plan)]


def load_function(name: str) -> Callable[[Plan], list[Path]]:
    """Import the function of the experiment `name`: takes a plan, returns the files written."""
    entry = EXPERIMENTS[name]
    for package in entry.packages:
        try:
            import_module(package)
        except ImportError as error:
            raise MissingExtraError(*_EXTRAS[package]) from error
    module = import_module(f"{__name__}.{entry.module}")
    function: Callable[[Plan], list[Path]] = getattr(module, entry.function)
    return function
