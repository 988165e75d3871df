"""Policies that decide who trains next.

A selector sees the federation it asks and the maths in `gp`. It knows nothing of any engine.
"""

from fedcor.selectors.afl import AFL
from fedcor.selectors.aligned import Aligned
from fedcor.selectors.complement import Complement
from fedcor.selectors.fedcor import FedCor, Proxy
from fedcor.selectors.oort import Oort
from fedcor.selectors.power_of_choice import PowerOfChoice
from fedcor.selectors.registry import (
    DEFAULT_SELECTOR,
    SELECTORS,
    build_selector,
    selector_class,
    selector_name,
    selector_names,
)
from fedcor.selectors.simple import Full, Random, RoundRobin

__all__ = [
    "AFL",
    "DEFAULT_SELECTOR",
    "SELECTORS",
    "Aligned",
    "Complement",
    "FedCor",
    "Full",
    "Oort",
    "PowerOfChoice",
    "Proxy",
    "Random",
    "RoundRobin",
    "build_selector",
    "selector_class",
    "selector_name",
    "selector_names",
]
