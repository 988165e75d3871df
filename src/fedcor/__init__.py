"""fedcor: which clients train next in federated learning.

import fedcor

result = fedcor.compare("digits", ["random", "fedcor"], seeds=range(1, 4), rounds=50)
result.verdict
"""

import importlib
from typing import TYPE_CHECKING
from typing import Any as _Any

if TYPE_CHECKING:
    from fedcor.api import compare, load, run, simulate
    from fedcor.clock import Devices
    from fedcor.data import IID, Dirichlet, Shards
    from fedcor.defence import Defence
    from fedcor.experiments import Experiment, experiment
    from fedcor.faults import Faults
    from fedcor.liars import Liars
    from fedcor.optimisers import (
        MIFA,
        FedAdagrad,
        FedAdam,
        FedAvg,
        FedAvgM,
        FedDyn,
        FedExP,
        FedNova,
        FedProx,
        FedRecall,
        FedStale,
        FedVARP,
        FedYogi,
        GeometricMedian,
        MultiKrum,
        Scaffold,
        TrimmedMean,
    )
    from fedcor.results import Result
    from fedcor.rules import Rules
    from fedcor.selectors import (
        AFL,
        Aligned,
        Complement,
        FedCor,
        Full,
        Oort,
        PowerOfChoice,
        Proxy,
        Random,
        RoundRobin,
        build_selector,
    )
    from fedcor.types import Delivery, Federation, Optimiser, Outcome, Population, Selector, State

    __version__: str

__all__ = [
    "AFL",
    "IID",
    "MIFA",
    "Aligned",
    "Complement",
    "Defence",
    "Delivery",
    "Devices",
    "Dirichlet",
    "Experiment",
    "Faults",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedCor",
    "FedDyn",
    "FedExP",
    "FedNova",
    "FedProx",
    "FedRecall",
    "FedStale",
    "FedVARP",
    "FedYogi",
    "Federation",
    "Full",
    "GeometricMedian",
    "Liars",
    "MultiKrum",
    "Oort",
    "Optimiser",
    "Outcome",
    "Population",
    "PowerOfChoice",
    "Proxy",
    "Random",
    "Result",
    "RoundRobin",
    "Rules",
    "Scaffold",
    "Selector",
    "Shards",
    "State",
    "TrimmedMean",
    "__version__",
    "build_selector",
    "compare",
    "experiment",
    "load",
    "run",
    "simulate",
]

# Module -> the names in it. A name is imported when it is first used, so that the package is there
# at once, and the command line can be interrupted at once.
_NAMES = {
    "api": ("compare", "load", "run", "simulate"),
    "clock": ("Devices",),
    "data": ("IID", "Dirichlet", "Shards"),
    "experiments": ("Experiment", "experiment"),
    "defence": ("Defence",),
    "faults": ("Faults",),
    "liars": ("Liars",),
    "optimisers": (
        "FedAvg",
        "FedProx",
        "FedRecall",
        "FedAvgM",
        "FedAdagrad",
        "FedAdam",
        "FedYogi",
        "FedNova",
        "Scaffold",
        "FedDyn",
        "MIFA",
        "FedVARP",
        "FedStale",
        "FedExP",
        *("TrimmedMean", "GeometricMedian", "MultiKrum"),
    ),
    "results": ("Result",),
    "rules": ("Rules",),
    "selectors": (
        *("AFL", "Aligned", "Complement", "FedCor", "Full", "Oort", "PowerOfChoice", "Proxy"),
        *("Random", "RoundRobin"),
        "build_selector",
    ),
    "types": (
        *("Delivery", "Federation", "Optimiser", "Outcome"),
        *("Population", "Selector", "State"),
    ),
}
_MODULES = {name: f"fedcor.{module}" for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> _Any:
    """Import a public name when it is first used."""
    if name == "__version__":
        found: _Any = importlib.import_module("importlib.metadata").version("fedcor")
    elif name in _MODULES:
        found = getattr(importlib.import_module(_MODULES[name]), name)
    else:
        text = f"module 'fedcor' has no attribute {name!r}"
        raise AttributeError(text, name=name, obj=importlib.import_module("fedcor"))
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """The public names."""
    return list(__all__)
