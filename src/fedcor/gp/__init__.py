"""The Gaussian process over the clients' loss changes: knows arrays, not clients. NumPy alone."""

from fedcor.gp.fit import Samples, fit, log_likelihood, log_likelihood_gradient
from fedcor.gp.lowrank import Picks, select, select_proxy

__all__ = [
    "Picks",
    "Samples",
    "fit",
    "log_likelihood",
    "log_likelihood_gradient",
    "select",
    "select_proxy",
]
