"""fedcor: which clients train next in federated learning."""

from fedcor.selectors import AFL, Complement, FedCor, Full, PowerOfChoice, Proxy, Random, build_selector
from fedcor.types import Federation, Outcome, Population, Selector, State

__all__ = [
    "AFL",
    "Complement",
    "FedCor",
    "Federation",
    "Full",
    "Outcome",
    "Population",
    "PowerOfChoice",
    "Proxy",
    "Random",
    "Selector",
    "State",
    "build_selector",
]
