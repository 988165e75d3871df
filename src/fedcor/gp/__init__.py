"""The Gaussian process over the clients' loss changes: maths on arrays, with NumPy and SciPy alone.

`fit` learns the embedding of the clients from measured loss changes; `select` and `select_proxy`
choose clients with it.
"""

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
