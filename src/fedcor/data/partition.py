"""Labels to one index array per client: who holds which training samples.

Every way of splitting gives each sample to exactly one client and leaves no client empty. It returns one array of
sample indices per client, in ascending order, and depends on nothing but the labels and the stream it is given.

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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from fedcor.errors import ConfigError, DataError, MissingExtraError, suggest
from fedcor.types import Array, FloatArray, IntArray

__all__ = [
    "Kind",
    "Partition",
    "client_sizes",
    "dirichlet",
    "iid",
    "label_distributions",
    "noisy_clients",
    "randomise_labels",
    "shards",
]

Kind = Literal["iid", "shards", "dirichlet"]

REDRAWS = 500  # draws of Q before giving up; where the programme has solutions at all, a handful is enough
ALPHA_RANGE = (
    1e-6,
    1e6,
)  # beyond it, a client's distribution is one label, or the prior, to machine precision
SMALLEST_SHARE = 1e-12  # a share below this means no sample for any data that fits a machine; dropped to keep Q sparse
SLACK = (
    1e-7  # in samples: what the solver may miss a whole number by and it still counts as reached
)


@dataclass(frozen=True)
class Partition:
    """How the training data is spread over clients. The settings after `clients` count only for the kind that they name."""

    kind: Kind
    clients: int
    shards_per_client: int = 2  # shards
    alpha: float = 0.2  # dirichlet: the smaller, the fewer labels on a client
    minimum_size: int = 10  # dirichlet: the smallest x_k of the quadratic programme
    size_skew: float = 0.0  # iid, shards: standard deviation of the logarithm of a client's, or a shard's, size; 0: equal

    def __post_init__(self) -> None:
        kinds = get_args(Kind)
        if self.kind not in kinds:
            raise ConfigError(
                "kind",
                self.kind,
                f"must be one of {', '.join(kinds)}",
                suggest(str(self.kind), kinds),
            )
        for key in ("clients", "shards_per_client", "minimum_size"):
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(key, value, "must be a whole number of at least 1")
        _check_alpha(self.alpha)
        if not 0.0 <= self.size_skew <= 10.0:
            raise ConfigError("size_skew", self.size_skew, "must be a number from 0 to 10")
        if self.size_skew and self.kind == "dirichlet":
            raise ConfigError(
                "size_skew",
                self.size_skew,
                "must be 0 for a dirichlet partition, which has sizes of its own",
            )

    def split(self, labels: Array, rng: np.random.Generator) -> list[IntArray]:
        """One ascending index array per client."""
        if self.kind == "iid":
            return iid(labels, self.clients, rng, self.size_skew)
        if self.kind == "shards":
            return shards(labels, self.clients, self.shards_per_client, rng, self.size_skew)
        return dirichlet(labels, self.clients, self.alpha, rng, self.minimum_size)


def iid(
    labels: Array, clients: int, rng: np.random.Generator, size_skew: float = 0.0
) -> list[IntArray]:
    """Shuffled and dealt: sizes are equal up to one sample, or skewed."""
    n = _count(labels, clients)
    owner = np.empty(n, np.int64)
    owner[rng.permutation(n)] = (
        np.arange(n) % clients if not size_skew else _skewed_owners(n, clients, size_skew, rng)
    )
    return _gather(owner, clients)


def shards(
    labels: Array, clients: int, per_client: int, rng: np.random.Generator, size_skew: float = 0.0
) -> list[IntArray]:
    """Sorted by label and cut into clients x per_client runs, equal up to one sample or skewed, which are dealt at random."""
    n = _count(labels, clients)
    pieces = clients * per_client
    if not clients <= pieces <= n:
        allowed = f"{clients} clients can have from 1 to {n // clients} shards each of {n} samples"
        raise ConfigError("shards_per_client", per_client, allowed)
    holder = rng.permutation(pieces) // per_client  # (pieces,) the client of each shard
    if size_skew:
        shard = _skewed_owners(n, pieces, size_skew, rng)
    else:
        shard = np.repeat(
            np.arange(pieces), np.full(pieces, n // pieces) + (np.arange(pieces) < n % pieces)
        )
    owner = np.empty(n, np.int64)
    owner[np.argsort(labels, kind="stable")] = holder[shard]
    return _gather(owner, clients)


def _skewed_owners(n: int, pieces: int, skew: float, rng: np.random.Generator) -> IntArray:
    """(n,) the piece of each of n samples, ascending; sizes are log-normal with at least one sample each."""
    if n == pieces:
        return np.arange(n)
    shares = np.exp(skew * rng.standard_normal(pieces))
    sizes = 1 + _whole((n - pieces) * shares[None] / shares.sum(), np.array([n - pieces]), rng)[0]
    return np.repeat(np.arange(pieces), sizes)


def dirichlet(
    labels: Array, clients: int, alpha: float, rng: np.random.Generator, minimum: int = 10
) -> list[IntArray]:
    """The paper's unbalanced partition: q_k ~ Dir(α p), then the most even sizes x that use all data, Qx = d.

    Q is drawn again while no x >= minimum fits it. Each share q_k x_k is rounded down to whole samples, and each sample
    that is left over goes to one of the clients that rounding took a part of it from, at random in proportion to that
    part. So no client is further than one sample per label from the programme's solution, which can put it a few
    below `minimum`; one that rounding empties is given a sample of the largest.
    """
    n = _count(labels, clients)
    _check_alpha(alpha)
    _, label, d = np.unique(labels, return_inverse=True, return_counts=True)  # (n,), (L,)
    if clients < len(d):
        raise ConfigError(
            "clients", clients, f"a dirichlet partition needs at least one per label, so {len(d)}"
        )
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
            f"no client sizes of at least {minimum} fit any of {REDRAWS} draws of a dirichlet partition "
            f"(alpha = {alpha:g}, {clients} clients, {len(d)} labels, {n} samples): "
            "change the number of clients, raise alpha, or lower minimum_size"
        )
    owner = np.empty(n, np.int64)
    for kind, counts in enumerate(_whole(q * x, d, rng)):
        owner[rng.permutation(np.flatnonzero(label == kind))] = np.repeat(
            np.arange(clients), counts
        )
    _fill_empty(owner, clients, rng)
    return _gather(owner, clients)


def randomise_labels(
    labels: IntArray,
    classes: int,
    parts: Sequence[IntArray],
    share: float,
    rng: np.random.Generator,
) -> IntArray:
    """The labels, those of a `share` of the clients drawn uniformly: clients whose data teaches nothing."""
    labels = labels.copy()
    for client in noisy_clients(len(parts), share, rng):
        labels[parts[client]] = rng.integers(classes, size=len(parts[client]))
    return labels


def noisy_clients(clients: int, share: float, rng: np.random.Generator) -> IntArray:
    """Who has random labels: the first draw of the stream of the noise."""
    count = round(share * clients)
    if share > 0 and not count:
        raise ConfigError("noisy_clients", share, f"is less than one of {clients} clients")
    return np.sort(rng.choice(clients, size=count, replace=False))


def label_distributions(
    p: FloatArray, clients: int, alpha: float, rng: np.random.Generator
) -> FloatArray:
    """(L, N) Q: one draw of Dir(α p) a column.

    With a concentration of 0.02, many gamma variates underflow to zero, and a plain draw can be 0/0. Their logarithms
    do not: log Gamma(a) is distributed as log Gamma(a + 1) + log(U) / a.
    """
    a = alpha * p[:, None]  # (L, 1)
    shape = (len(p), clients)
    log_gamma = np.log(rng.standard_gamma(a + 1, shape)) - rng.standard_exponential(shape) / a
    q: FloatArray = np.exp(log_gamma - log_gamma.max(axis=0))
    q /= q.sum(axis=0)
    q[q < SMALLEST_SHARE] = 0
    return q


def client_sizes(q: FloatArray, d: IntArray, minimum: float) -> FloatArray | None:
    """(N,) the x of min x'x subject to Qx = d, x >= minimum; None where there is none.

    Solved in units of the mean size, so that tolerances mean the same for a thousand samples and for a million.
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
    settings.direct_solve_method, settings.max_threads = (
        "qdldl",
        1,
    )  # one order of sums: the same x on every run
    # Asked for 1e-12, content with 1e-8: at 1e-8 alone, sizes near the bound are a percent off.
    settings.tol_gap_abs = settings.tol_gap_rel = 1e-12
    settings.reduced_tol_gap_abs = settings.reduced_tol_gap_rel = settings.reduced_tol_feas = 1e-8
    solution = clarabel.DefaultSolver(
        identity, np.zeros(clients), constraints, bounds, cones, settings
    ).solve()
    if solution.status not in (clarabel.SolverStatus.Solved, clarabel.SolverStatus.AlmostSolved):
        return None
    x: FloatArray = np.maximum(np.asarray(solution.x) * unit, minimum)
    return x


def _whole(amounts: FloatArray, d: IntArray, rng: np.random.Generator) -> IntArray:
    """(L, N) whole numbers with row sums d, each less than one from `amounts`, whose row sums are d up to tolerance."""
    amounts = amounts * (d / amounts.sum(axis=1))[:, None]
    counts = np.floor(amounts + SLACK).astype(np.int64)
    parts = np.maximum(
        amounts - counts, 0
    )  # (L, N) each below one, so at least `left` of them are not zero
    for row, part, left in zip(counts, parts, d - counts.sum(axis=1), strict=True):
        if left:
            row[rng.choice(len(part), left, replace=False, p=part / part.sum())] += 1
    return counts


def _fill_empty(owner: IntArray, clients: int, rng: np.random.Generator) -> None:
    """Gives each client that owns nothing one random sample of the client that then owns most, in place."""
    sizes = np.bincount(owner, minlength=clients)
    for client in np.flatnonzero(sizes == 0):
        largest = sizes.argmax()
        owner[rng.choice(np.flatnonzero(owner == largest))] = client
        sizes[largest] -= 1
        sizes[client] = 1


def _gather(owner: IntArray, clients: int) -> list[IntArray]:
    """The owner of every sample, turned into one ascending index array per client."""
    ends = np.bincount(owner, minlength=clients).cumsum()
    return np.split(np.argsort(owner, kind="stable"), ends[:-1])


def _count(labels: Array, clients: int) -> int:
    """How many samples there are, once it is certain that they can go round."""
    if labels.ndim != 1:
        raise DataError(f"labels must be one number per sample, but have the shape {labels.shape}")
    if not 1 <= clients <= len(labels):
        raise ConfigError(
            "clients",
            clients,
            f"{len(labels)} samples can go to between 1 and {len(labels)} clients",
        )
    return len(labels)


def _check_alpha(alpha: float) -> None:
    low, high = ALPHA_RANGE
    number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    if not number or not low <= alpha <= high:
        raise ConfigError("alpha", alpha, f"must be a number from {low:g} to {high:g}")
