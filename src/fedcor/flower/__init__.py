"""The same selectors in a real federation, on Flower. The only room that imports flwr.

In the ServerApp, the default selector with its own optimiser, FedCor around FedAvg, or any selector
around any Flower strategy:

    strategy = select_with(FedAvg(), clients_per_round=5)
    strategy = FedCorStrategy(clients_per_round=5)
    strategy = select_with(FedAdam(), PowerOfChoice(5))

A federated optimiser of fedcor, alone or with a selector around it:

    strategy = OptimiserStrategy("fedavg")

In the ClientApp:

    app = ClientApp(mods=[answers_probes()])
"""

from __future__ import annotations

from importlib.util import find_spec

from fedcor.core.errors import MissingExtraError

if find_spec("flwr") is None:
    raise MissingExtraError("flwr", "flower")

from fedcor.flower.optimiser_strategy import OptimiserStrategy
from fedcor.flower.protocol import answers_probes
from fedcor.flower.settings import SelectionSettings
from fedcor.flower.strategy import FedCorStrategy, SelectingStrategy, select_with
from fedcor.flower.strategy_memory import is_candidate

__all__ = [
    "FedCorStrategy",
    "OptimiserStrategy",
    "SelectingStrategy",
    "SelectionSettings",
    "answers_probes",
    "is_candidate",
    "select_with",
]
