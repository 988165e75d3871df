"""The Gaussian process over the clients' loss changes: maths on arrays, with NumPy and SciPy alone.

`fit` learns the embedding of the clients from measured loss changes; `select` and `select_proxy`
choose clients with it. `take_apart` says what each pick was worth; `forecast` how well the process
predicts.
"""

from fedcor.gp.fit import Samples, fit, log_likelihood, log_likelihood_gradient
from fedcor.gp.forecast import BINS, Forecast, covariance_similarity, forecast
from fedcor.gp.lowrank import Picks, select, select_proxy
from fedcor.gp.parts import PickParts, take_apart

__all__ = [
    "BINS",
    "Forecast",
    "PickParts",
    "Picks",
    "Samples",
    "covariance_similarity",
    "fit",
    "forecast",
    "log_likelihood",
    "log_likelihood_gradient",
    "select",
    "select_proxy",
    "take_apart",
]
