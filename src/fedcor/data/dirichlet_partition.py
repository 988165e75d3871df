"""The paper's unbalanced partition: label distributions from a Dirichlet, sizes from a programme.

Notation (the paper's appendix on the Dirichlet partition)
    N   number of clients
    L   number of labels that occur
    d   how many samples carry each label                        (L,)
    p   d / sum d, the prior label distribution                  (L,)
    q_k the label distribution of client k, drawn from Dir(α p)  (L,)
    Q   [q_1, ..., q_N]                                          (L, N)
    x   the size of each client's data                           (N,)
"""

from __future__ import annotations

import numpy as np

from fedcor.checks import check_between
from fedcor.data.assignment import count_samples, indices_per_client, round_to_row_sums
from fedcor.errors import ConfigError, DataError, MissingExtraError
from fedcor.types import Array, FloatArray, IntArray

__all__ = ["ALPHA_RANGE", "client_sizes", "dirichlet", "label_distributions"]

# Draws of Q before giving up; where the programme has solutions at all, a handful is enough.
REDRAWS = 500
# Beyond it, a client's distribution is one label, or the prior, to machine precision.
ALPHA_RANGE = (1e-6, 1e6)
# An entry of Q below this means no sample in any data that fits a machine: set to 0, so that Q
# stays sparse.
SMALLEST_Q = 1e-12


def dirichlet(
    labels: Array, clients: int, alpha: float, rng: np.random.Generator, minimum: int = 10
) -> list[IntArray]:
    """Unequal sizes and label distributions: q_k ~ Dir(α p), and the most even x with Qx = d.

    Q is drawn again while no x >= `minimum` fits it. The amounts q_k x_k are then rounded to whole
    samples. No client is further than one sample per label from the solution, which can put it a
    few below `minimum`; one that rounding leaves empty gets a sample of the largest client.

    Args:
        labels: `(n,)` the label of each sample.
        clients: Number of clients, N; at least one per label.
        alpha: Concentration, α: the smaller, the fewer labels a client holds.
        rng: The only source of randomness.
        minimum: The smallest x_k that the programme may return, in samples.

    Returns:
        One ascending array of sample indices per client.

    Raises:
        ConfigError: A parameter does not fit the data.
        DataError: No draw of Q allowed sizes of at least `minimum`.
    """
    if labels.dtype.kind == "f":
        allowed = "needs labels, but the targets are floats: use iid, shards, or client ids"
        raise ConfigError("kind", "dirichlet", allowed)
    n = count_samples(labels, clients)
    check_between("alpha", alpha, *ALPHA_RANGE)
    _, label, d = np.unique(labels, return_inverse=True, return_counts=True)  # (n,), (L,)
    if clients < len(d):
        allowed = f"a dirichlet partition needs at least one per label, so {len(d)}"
        raise ConfigError("clients", clients, allowed)
    if not 1 <= minimum <= n // clients:
        allowed = f"{clients} clients can have from 1 to {n // clients} each of {n} samples"
        raise ConfigError("minimum_size", minimum, allowed)
    for _ in range(REDRAWS):
        q = label_distributions(d / n, clients, alpha, rng)
        x = client_sizes(q, d, minimum)
        if x is not None:
            break
    else:
        raise DataError(
            f"no client sizes of at least {minimum} fit any of {REDRAWS} draws of a dirichlet "
            f"partition (alpha = {alpha:g}, {clients} clients, {len(d)} labels, {n} samples): "
            "change the number of clients, raise alpha, or lower minimum_size"
        )
    owner = np.empty(n, np.int64)
    for kind, counts in enumerate(round_to_row_sums(q * x, d, rng)):
        shuffled = rng.permutation(np.flatnonzero(label == kind))
        owner[shuffled] = np.repeat(np.arange(clients), counts)
    _fill_empty(owner, clients, rng)
    return indices_per_client(owner, clients)


def label_distributions(
    p: FloatArray, clients: int, alpha: float, rng: np.random.Generator
) -> FloatArray:
    """(L, N) Q: one draw of Dir(α p) per column.

    With a concentration of 0.02, many gamma variates underflow to zero, and a plain draw can be
    0/0. Their logarithms do not: log Gamma(a) is distributed as log Gamma(a + 1) + log(U) / a.
    """
    a = alpha * p[:, None]  # (L, 1)
    shape = (len(p), clients)
    log_gamma = np.log(rng.standard_gamma(a + 1, shape)) - rng.standard_exponential(shape) / a
    q: FloatArray = np.exp(log_gamma - log_gamma.max(axis=0))
    q /= q.sum(axis=0)
    q[q < SMALLEST_Q] = 0
    return q


def client_sizes(q: FloatArray, d: IntArray, minimum: float) -> FloatArray | None:
    """(N,) the x of min x'x subject to Qx = d, x >= minimum; None where there is none.

    Solved in units of the mean size, so that tolerances mean the same for a thousand samples and
    for a million.
    """
    try:
        import clarabel
    except ImportError:
        raise MissingExtraError("clarabel", "sim") from None
    from scipy import sparse

    labels, clients = q.shape
    unit = d.sum() / clients
    identity = sparse.identity(clients, format="csc")
    constraints = sparse.vstack([sparse.csc_matrix(q), -identity], format="csc")  # (L + N, N)
    bounds = np.concatenate([d / unit, np.full(clients, -minimum / unit)])
    cones = [clarabel.ZeroConeT(labels), clarabel.NonnegativeConeT(clients)]
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    # One order of sums: the same x on every run.
    settings.direct_solve_method, settings.max_threads = "qdldl", 1
    # Aims at 1e-12 and accepts 1e-8: aiming at 1e-8, sizes near the bound are a percent off.
    settings.tol_gap_abs = settings.tol_gap_rel = 1e-12
    settings.reduced_tol_gap_abs = settings.reduced_tol_gap_rel = settings.reduced_tol_feas = 1e-8
    solution = clarabel.DefaultSolver(
        identity, np.zeros(clients), constraints, bounds, cones, settings
    ).solve()
    if solution.status not in (clarabel.SolverStatus.Solved, clarabel.SolverStatus.AlmostSolved):
        return None
    x: FloatArray = np.maximum(np.asarray(solution.x) * unit, minimum)
    return x


def _fill_empty(owner: IntArray, clients: int, rng: np.random.Generator) -> None:
    """Gives each client without samples a random one of the client that then has most, in place."""
    sizes = np.bincount(owner, minlength=clients)
    for client in np.flatnonzero(sizes == 0):
        largest = sizes.argmax()
        owner[rng.choice(np.flatnonzero(owner == largest))] = client
        sizes[largest] -= 1
        sizes[client] = 1
