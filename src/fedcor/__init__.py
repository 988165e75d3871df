"""fedcor: which clients train next in federated learning.

import fedcor

result = fedcor.compare("digits", ["random", "fedcor"], seeds=range(1, 4), rounds=50)
result.verdict
"""

import importlib
from typing import TYPE_CHECKING
from typing import Any as _Any

if TYPE_CHECKING:
    from fedcor.api import compare as compare
    from fedcor.api import load as load
    from fedcor.api import run as run
    from fedcor.api import simulate as simulate
    from fedcor.core.errors import FedcorError as FedcorError
    from fedcor.core.types import Delivery as Delivery
    from fedcor.core.types import Federation as Federation
    from fedcor.core.types import Optimiser as Optimiser
    from fedcor.core.types import Outcome as Outcome
    from fedcor.core.types import Population as Population
    from fedcor.core.types import Selector as Selector
    from fedcor.core.types import State as State
    from fedcor.data.client_data import ClientData as ClientData
    from fedcor.data.client_data import FolderPopulation as FolderPopulation
    from fedcor.data.client_data import SyntheticPopulation as SyntheticPopulation
    from fedcor.data.own_data import as_dataset as as_dataset
    from fedcor.data.partition import IID as IID
    from fedcor.data.partition import Dirichlet as Dirichlet
    from fedcor.data.partition import Shards as Shards
    from fedcor.optimisers.adaptive import FedAdagrad as FedAdagrad
    from fedcor.optimisers.adaptive import FedAdam as FedAdam
    from fedcor.optimisers.adaptive import FedYogi as FedYogi
    from fedcor.optimisers.averaging import FedAvg as FedAvg
    from fedcor.optimisers.averaging import FedAvgM as FedAvgM
    from fedcor.optimisers.averaging import FedExP as FedExP
    from fedcor.optimisers.averaging import FedNova as FedNova
    from fedcor.optimisers.averaging import FedProx as FedProx
    from fedcor.optimisers.corrections import FedDyn as FedDyn
    from fedcor.optimisers.corrections import Scaffold as Scaffold
    from fedcor.optimisers.fedrecall import FedRecall as FedRecall
    from fedcor.optimisers.last_updates import MIFA as MIFA
    from fedcor.optimisers.last_updates import FedStale as FedStale
    from fedcor.optimisers.last_updates import FedVARP as FedVARP
    from fedcor.optimisers.robust import GeometricMedian as GeometricMedian
    from fedcor.optimisers.robust import MultiKrum as MultiKrum
    from fedcor.optimisers.robust import TrimmedMean as TrimmedMean
    from fedcor.reporting.results import Result as Result
    from fedcor.rounds.defence.settings import Defence as Defence
    from fedcor.rounds.rules.declaration import Rules as Rules
    from fedcor.runs.ask_tell import Rounds as Rounds
    from fedcor.runs.tracking.callback import Callback as Callback
    from fedcor.selectors import build_selector as build_selector
    from fedcor.selectors.afl import AFL as AFL
    from fedcor.selectors.aligned import Aligned as Aligned
    from fedcor.selectors.baselines import Full as Full
    from fedcor.selectors.baselines import Random as Random
    from fedcor.selectors.baselines import RoundRobin as RoundRobin
    from fedcor.selectors.complement import Complement as Complement
    from fedcor.selectors.fedcor import FedCor as FedCor
    from fedcor.selectors.fedcor import Proxy as Proxy
    from fedcor.selectors.oort import Oort as Oort
    from fedcor.selectors.power_of_choice import PowerOfChoice as PowerOfChoice
    from fedcor.simulation.byzantine import Byzantine as Byzantine
    from fedcor.simulation.clock import Devices as Devices
    from fedcor.simulation.experiment import Experiment as Experiment
    from fedcor.simulation.experiment_files import experiment as experiment
    from fedcor.simulation.faults import Faults as Faults

    __version__: str

# Module -> its public names. A module is imported when one of its names is first used, so that
# `import fedcor` takes no time.
_NAMES = {
    "api": "compare load run simulate",
    "core.errors": "FedcorError",
    "core.types": "Delivery Federation Optimiser Outcome Population Selector State",
    "data.client_data": "ClientData FolderPopulation SyntheticPopulation",
    "data.own_data": "as_dataset",
    "data.partition": "IID Dirichlet Shards",
    "optimisers.adaptive": "FedAdagrad FedAdam FedYogi",
    "optimisers.averaging": "FedAvg FedAvgM FedExP FedNova FedProx",
    "optimisers.corrections": "FedDyn Scaffold",
    "optimisers.last_updates": "MIFA FedStale FedVARP",
    "optimisers.fedrecall": "FedRecall",
    "optimisers.robust": "GeometricMedian MultiKrum TrimmedMean",
    "reporting.results": "Result",
    "rounds.defence.settings": "Defence",
    "rounds.rules.declaration": "Rules",
    "runs.ask_tell": "Rounds",
    "runs.tracking.callback": "Callback",
    "selectors": "build_selector",
    "selectors.afl": "AFL",
    "selectors.aligned": "Aligned",
    "selectors.baselines": "Full Random RoundRobin",
    "selectors.complement": "Complement",
    "selectors.fedcor": "FedCor Proxy",
    "selectors.oort": "Oort",
    "selectors.power_of_choice": "PowerOfChoice",
    "simulation.byzantine": "Byzantine",
    "simulation.clock": "Devices",
    "simulation.experiment": "Experiment",
    "simulation.experiment_files": "experiment",
    "simulation.faults": "Faults",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> _Any:
    """Import a public name when it is first used."""
    if name == "__version__":
        value: _Any = importlib.import_module("importlib.metadata").version("fedcor")
    elif name in _MODULES:
        value = getattr(importlib.import_module(f"fedcor.{_MODULES[name]}"), name)
    else:
        text = f"module 'fedcor' has no attribute {name!r}"
        raise AttributeError(text, name=name, obj=importlib.import_module("fedcor"))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
