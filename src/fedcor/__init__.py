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
    from fedcor.optimisers.last_updates import MIFA as MIFA
    from fedcor.optimisers.last_updates import FedStale as FedStale
    from fedcor.optimisers.last_updates import FedVARP as FedVARP
    from fedcor.optimisers.recall import FedRecall as FedRecall
    from fedcor.optimisers.robust import GeometricMedian as GeometricMedian
    from fedcor.optimisers.robust import MultiKrum as MultiKrum
    from fedcor.optimisers.robust import TrimmedMean as TrimmedMean
    from fedcor.reporting.results import Result as Result
    from fedcor.rounds.defence.settings import Defence as Defence
    from fedcor.rounds.rules.declaration import Rules as Rules
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

# Public name -> the module that defines it. A module is imported when one of its names is first
# used, so that `import fedcor` takes no time.
_MODULES = {
    "compare": "fedcor.api",
    "load": "fedcor.api",
    "run": "fedcor.api",
    "simulate": "fedcor.api",
    "FedcorError": "fedcor.core.errors",
    "Delivery": "fedcor.core.types",
    "Federation": "fedcor.core.types",
    "Optimiser": "fedcor.core.types",
    "Outcome": "fedcor.core.types",
    "Population": "fedcor.core.types",
    "Selector": "fedcor.core.types",
    "State": "fedcor.core.types",
    "ClientData": "fedcor.data.client_data",
    "as_dataset": "fedcor.data.own_data",
    "IID": "fedcor.data.partition",
    "Dirichlet": "fedcor.data.partition",
    "Shards": "fedcor.data.partition",
    "FolderPopulation": "fedcor.data.client_data",
    "SyntheticPopulation": "fedcor.data.client_data",
    "FedAdagrad": "fedcor.optimisers.adaptive",
    "FedAdam": "fedcor.optimisers.adaptive",
    "FedYogi": "fedcor.optimisers.adaptive",
    "FedAvg": "fedcor.optimisers.averaging",
    "FedAvgM": "fedcor.optimisers.averaging",
    "FedExP": "fedcor.optimisers.averaging",
    "FedNova": "fedcor.optimisers.averaging",
    "FedProx": "fedcor.optimisers.averaging",
    "FedDyn": "fedcor.optimisers.corrections",
    "Scaffold": "fedcor.optimisers.corrections",
    "MIFA": "fedcor.optimisers.last_updates",
    "FedStale": "fedcor.optimisers.last_updates",
    "FedVARP": "fedcor.optimisers.last_updates",
    "FedRecall": "fedcor.optimisers.recall",
    "GeometricMedian": "fedcor.optimisers.robust",
    "MultiKrum": "fedcor.optimisers.robust",
    "TrimmedMean": "fedcor.optimisers.robust",
    "Result": "fedcor.reporting.results",
    "Defence": "fedcor.rounds.defence.settings",
    "Rules": "fedcor.rounds.rules.declaration",
    "Callback": "fedcor.runs.tracking.callback",
    "build_selector": "fedcor.selectors",
    "AFL": "fedcor.selectors.afl",
    "Aligned": "fedcor.selectors.aligned",
    "Full": "fedcor.selectors.baselines",
    "Random": "fedcor.selectors.baselines",
    "RoundRobin": "fedcor.selectors.baselines",
    "Complement": "fedcor.selectors.complement",
    "FedCor": "fedcor.selectors.fedcor",
    "Proxy": "fedcor.selectors.fedcor",
    "Oort": "fedcor.selectors.oort",
    "PowerOfChoice": "fedcor.selectors.power_of_choice",
    "Byzantine": "fedcor.simulation.byzantine",
    "Devices": "fedcor.simulation.clock",
    "Experiment": "fedcor.simulation.experiment",
    "experiment": "fedcor.simulation.experiment_files",
    "Faults": "fedcor.simulation.faults",
}
__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> _Any:
    """Import a public name when it is first used."""
    if name == "__version__":
        value: _Any = importlib.import_module("importlib.metadata").version("fedcor")
    elif name in _MODULES:
        value = getattr(importlib.import_module(_MODULES[name]), name)
    else:
        text = f"module 'fedcor' has no attribute {name!r}"
        raise AttributeError(text, name=name, obj=importlib.import_module("fedcor"))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
