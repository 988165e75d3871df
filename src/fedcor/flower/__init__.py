"""The same selectors in a real federation, on Flower. The only room that imports flwr.

strategy = FedCorStrategy(clients_per_round=5)                     # in the ServerApp
strategy = select_with(FedAdam(), PowerOfChoice(5))                # any Flower strategy, any selector
app = ClientApp(mods=[answers_probes()])                           # in the ClientApp
"""

from __future__ import annotations

from importlib.util import find_spec

from fedcor.errors import MissingExtraError

if find_spec("flwr") is None:
    raise MissingExtraError("flwr", "flower")

from fedcor.flower.client import answers_probes
from fedcor.flower.strategy import FedCorStrategy, SelectingStrategy, select_with

__all__ = ["FedCorStrategy", "SelectingStrategy", "answers_probes", "select_with"]
