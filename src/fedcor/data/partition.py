"""Partition the training samples among clients: iid, shards, or the paper's Dirichlet partition.

Every partition gives each sample to exactly one client and leaves no client empty. It depends on
nothing but the labels and the random stream that it is given.

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
from typing import Any, ClassVar

import numpy as np

from fedcor.core.config import check_at_least, check_between, plain_keywords
from fedcor.core.describe import Described
from fedcor.core.errors import ConfigError, DataError, MissingExtraError
from fedcor.core.types import Array, FloatArray, IntArray

LARGEST_SKEW = 10.0
# In samples: a solver may miss a whole number by this much, and it still counts as reached.
SLACK = 1e-7
# Draws of Q before giving up; where the programme has solutions at all, a handful is enough.
REDRAWS = 500
# Beyond it, a client's distribution is one label, or the prior, to machine precision.
ALPHA_RANGE = (1e-6, 1e6)
# An entry of Q below this means no sample in any data that fits a machine: set to 0, so that Q
# stays sparse.
SMALLEST_Q = 1e-12


class _BuiltIn(Described):
    """What the built-in partitions share: the number of clients, and the form in a record."""

    kind: ClassVar[str]
    clients: int

    def __post_init__(self) -> None:
        check_at_least("clients", self.clients, 1)
        for key in ("shards_per_client", "minimum_size"):
            check_at_least(key, getattr(self, key, 1), 1)
        check_between("size_skew", getattr(self, "size_skew", 0.0), 0.0, LARGEST_SKEW)
        check_between("alpha", getattr(self, "alpha", 1.0), *ALPHA_RANGE)

    def describe(self) -> dict[str, Any]:
        """As the table `[partition]` of a file."""
        return {"kind": self.kind, **vars(self)}


@plain_keywords
@dataclass(frozen=True)
class IID(_BuiltIn):
    """Samples are shuffled and dealt.

    Args:
        clients: Number of clients, N.
        size_skew: Standard deviation of the natural logarithm of a client's size, from 0 to 10;
            0: sizes are equal up to one sample.

    Example:
        >>> from fedcor import IID
        >>> parts = IID(clients=3).split(np.zeros(10), np.random.default_rng(1))
        >>> [len(part) for part in parts]
        [4, 3, 3]
    """

    kind = "iid"
    clients: int
    size_skew: float = 0.0

    def split(self, labels: Array, rng: np.random.Generator) -> list[IntArray]:
        """One ascending array of sample indices per client.

        Args:
            labels: `(n,)` the label of each sample; only their number counts.
            rng: The only source of randomness.
        """
        n = count_samples(np.arange(len(labels)), self.clients)  # a sample may have several targets
        owner = np.empty(n, np.int64)
        owner[rng.permutation(n)] = (
            _skewed_runs(n, self.clients, self.size_skew, rng)
            if self.size_skew
            else np.arange(n) % self.clients
        )
        return indices_per_client(owner, self.clients)


@plain_keywords
@dataclass(frozen=True)
class Shards(_BuiltIn):
    """Samples are sorted by label and cut into shards; each client gets a few of them.

    Args:
        clients: Number of clients, N.
        shards_per_client: Shards of each client, which holds about as many labels; 2 is the paper's
            2SPC, 1 its 1SPC.
        size_skew: Standard deviation of the natural logarithm of a shard's size, from 0 to 10; 0:
            sizes are equal up to one sample.

    Example:
        >>> from fedcor import Shards
        >>> labels = np.repeat([0, 1, 2, 3], 5)
        >>> parts = Shards(4, shards_per_client=1).split(labels, np.random.default_rng(1))
        >>> [sorted(set(labels[part].tolist())) for part in parts]
        [[0], [1], [2], [3]]
    """

    kind = "shards"
    clients: int
    shards_per_client: int = 2
    size_skew: float = 0.0

    def split(self, labels: Array, rng: np.random.Generator) -> list[IntArray]:
        """One ascending array of sample indices per client.

        Args:
            labels: `(n,)` the label of each sample.
            rng: The only source of randomness.

        Raises:
            ConfigError: There are more shards than samples.
        """
        n = count_samples(labels, self.clients)
        count = self.clients * self.shards_per_client
        if count > n:
            most = n // self.clients
            allowed = f"{self.clients} clients can have from 1 to {most} shards each of {n} samples"
            raise ConfigError("shards_per_client", self.shards_per_client, allowed)
        holder = rng.permutation(count) // self.shards_per_client  # (count,) client of each shard
        if self.size_skew:
            shard = _skewed_runs(n, count, self.size_skew, rng)
        else:
            sizes = n // count + (np.arange(count) < n % count)
            shard = np.repeat(np.arange(count), sizes)
        owner = np.empty(n, np.int64)
        owner[np.argsort(labels, kind="stable")] = holder[shard]
        return indices_per_client(owner, self.clients)


@plain_keywords
@dataclass(frozen=True)
class Dirichlet(_BuiltIn):
    """Sizes and label distributions differ, as in the paper's unbalanced setting.

    q_k ~ Dir(α p), and x is the most even one with Qx = d. Q is drawn again while no
    x >= `minimum_size` fits it. The amounts q_k x_k are then rounded to whole samples. No client is
    further than one sample per label from the solution, which can put it a few below
    `minimum_size`; one that rounding leaves empty gets a sample of the largest client.

    Args:
        clients: Number of clients, N; at least one per label.
        alpha: Concentration α: the smaller, the fewer labels a client holds. From 1e-6 to 1e6.
        minimum_size: The least samples that a client is planned to have.

    Example:
        >>> from fedcor import Dirichlet
        >>> labels = np.arange(1000) % 10
        >>> parts = Dirichlet(20, alpha=0.2, minimum_size=5).split(labels, np.random.default_rng(1))
        >>> len(parts), sum(len(part) for part in parts)
        (20, 1000)
    """

    kind = "dirichlet"
    clients: int
    alpha: float = 0.2
    minimum_size: int = 10

    def split(self, labels: Array, rng: np.random.Generator) -> list[IntArray]:
        """One ascending array of sample indices per client.

        Args:
            labels: `(n,)` the label of each sample.
            rng: The only source of randomness.

        Raises:
            ConfigError: A parameter does not fit the data.
            DataError: No draw of Q allowed sizes of at least `minimum_size`.
        """
        clients, minimum = self.clients, self.minimum_size
        if labels.dtype.kind == "f":
            allowed = "needs labels, but the targets are floats: use iid, shards, or client ids"
            raise ConfigError("kind", "dirichlet", allowed)
        n = count_samples(labels, clients)
        _, label, d = np.unique(labels, return_inverse=True, return_counts=True)  # (n,), (L,)
        if clients < len(d):
            allowed = f"a dirichlet partition needs at least one per label, so {len(d)}"
            raise ConfigError("clients", clients, allowed)
        if minimum > n // clients:
            allowed = f"{clients} clients can have from 1 to {n // clients} each of {n} samples"
            raise ConfigError("minimum_size", minimum, allowed)
        for _ in range(REDRAWS):
            q = label_distributions(d / n, clients, self.alpha, rng)
            x = client_sizes(q, d, minimum)
            if x is not None:
                break
        else:
            raise DataError(
                f"no client sizes of at least {minimum} fit any of {REDRAWS} draws of a dirichlet "
                f"partition (alpha = {self.alpha:g}, {clients} clients, {len(d)} labels, {n} "
                "samples): change the number of clients, raise alpha, or lower minimum_size"
            )
        owner = np.empty(n, np.int64)
        for index, counts in enumerate(round_to_row_sums(q * x, d, rng)):
            shuffled = rng.permutation(np.flatnonzero(label == index))
            owner[shuffled] = np.repeat(np.arange(clients), counts)
        _fill_empty(owner, clients, rng)
        return indices_per_client(owner, clients)


def _skewed_runs(n: int, runs: int, skew: float, rng: np.random.Generator) -> IntArray:
    """(n,) the run of each of n samples, ascending; sizes are log-normal and at least one."""
    if n == runs:
        return np.arange(n)
    amounts = np.exp(skew * rng.standard_normal(runs))
    # Beyond the one sample that every run has.
    more = (n - runs) * amounts[None] / amounts.sum()
    sizes = 1 + round_to_row_sums(more, np.array([n - runs]), rng)[0]
    return np.repeat(np.arange(runs), sizes)


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


def randomise_labels(
    labels: IntArray,
    classes: int | None,
    parts: Sequence[IntArray],
    fraction: float,
    rng: np.random.Generator,
) -> IntArray:
    """The labels, with those of some clients replaced by uniform draws.

    Args:
        labels: `(n,)` the label of each sample; left as it is.
        classes: Labels are drawn from 0 .. `classes - 1`.
        parts: The sample indices of each client.
        fraction: The fraction of the clients that have random labels, from 0 to 1.
        rng: The only source of randomness.

    Returns:
        `(n,)` a copy of `labels` with the changes.

    Raises:
        ConfigError: There are no labels (`classes` is None), or no client has random ones.
    """
    if classes is None:
        raise ConfigError("noisy_clients", fraction, "draws labels, but the targets are floats")
    labels = labels.copy()
    for client in noisy_clients(len(parts), fraction, rng):
        labels[parts[client]] = rng.integers(classes, size=len(parts[client]))
    return labels


def noisy_clients(clients: int, fraction: float, rng: np.random.Generator) -> IntArray:
    """The clients with random labels, ascending: what `randomise_labels` draws first from `rng`."""
    count = round(fraction * clients)
    if fraction > 0 and not count:
        raise ConfigError("noisy_clients", fraction, f"is less than one of {clients} clients")
    return np.sort(rng.choice(clients, size=count, replace=False))


def count_samples(labels: Array, clients: int) -> int:
    """The number of samples, after checking that every client can have one."""
    if labels.ndim != 1:
        raise DataError(f"labels must be one number per sample, but have the shape {labels.shape}")
    n = len(labels)
    if not 1 <= clients <= n:
        raise ConfigError("clients", clients, f"{n} samples can go to between 1 and {n} clients")
    return n


def indices_per_client(owner: IntArray, clients: int) -> list[IntArray]:
    """The owner of every sample `(n,)`, turned into one ascending index array per client."""
    ends = np.bincount(owner, minlength=clients).cumsum()
    return np.split(np.argsort(owner, kind="stable"), ends[:-1])


def round_to_row_sums(amounts: FloatArray, sums: IntArray, rng: np.random.Generator) -> IntArray:
    """Rounds `amounts` to whole samples whose rows have exactly the given sums.

    What rounding down leaves of a row goes to entries that it shortened, drawn in proportion to
    what they lost; so every count is less than one from its amount.

    Args:
        amounts: `(L, N)`, with row sums equal to `sums` up to a solver's tolerance.
        sums: `(L,)`.
        rng: Draws who gets what is left.

    Returns:
        `(L, N)` counts.
    """
    amounts = amounts * (sums / amounts.sum(axis=1))[:, None]
    counts = np.floor(amounts + SLACK).astype(np.int64)
    # (L, N) each below one, so at least `left` of them are not zero
    lost = np.maximum(amounts - counts, 0)
    for row, part, left in zip(counts, lost, sums - counts.sum(axis=1), strict=True):
        if left:
            row[rng.choice(len(part), left, replace=False, p=part / part.sum())] += 1
    return counts
