"""Labels to one index array per client: who holds which training samples.

Every partition gives each sample to exactly one client and leaves no client empty. It depends on
nothing but the labels and the random stream that it is given.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from fedcor.checks import check_at_least, check_between, check_one_of
from fedcor.data.assignment import count_samples, indices_per_client, round_to_row_sums
from fedcor.data.dirichlet_partition import ALPHA_RANGE, dirichlet
from fedcor.describe import Described
from fedcor.errors import ConfigError
from fedcor.types import Array, IntArray

__all__ = ["Kind", "Partition", "dirichlet", "iid", "shards"]

Kind = Literal["iid", "shards", "dirichlet"]

LARGEST_SKEW = 10.0


@dataclass(frozen=True)
class Partition(Described):
    """How the training data is spread over clients: the table `[partition]` of a file.

    Three kinds: `"iid"` shuffles and deals; `"shards"` gives each client a few runs of the samples
    sorted by label; `"dirichlet"` is the paper's unbalanced partition, in which sizes and label
    distributions differ.

    Args:
        kind: `"iid"`, `"shards"` or `"dirichlet"`.
        clients: Number of clients, N.
        shards_per_client: Only for shards: runs per client; 2 is the paper's 2SPC, 1 its 1SPC.
        alpha: Only for dirichlet: concentration α of the label distributions; the smaller, the
            fewer labels a client holds. From 1e-6 to 1e6.
        minimum_size: Only for dirichlet: the least samples that a client is planned to have.
        size_skew: Only for iid and shards: standard deviation of the natural logarithm of the size
            of a client (iid) or of a shard (shards), from 0 to 10. 0: equal sizes.

    Raises:
        ConfigError: A parameter is out of range.

    Example:
        >>> from fedcor.data import Partition, load
        >>> from fedcor.rng import stream
        >>> partition = Partition("dirichlet", clients=20, alpha=0.5, minimum_size=3)
        >>> parts = partition.split(load("digits").train_y, stream(1, "partition"))
        >>> len(parts), sum(len(part) for part in parts)
        (20, 1438)
    """

    kind: Kind
    clients: int
    shards_per_client: int = 2
    alpha: float = 0.2
    minimum_size: int = 10
    size_skew: float = 0.0

    def __post_init__(self) -> None:
        check_one_of("kind", self.kind, get_args(Kind))
        check_at_least("clients", self.clients, 1)
        check_at_least("shards_per_client", self.shards_per_client, 1)
        check_at_least("minimum_size", self.minimum_size, 1)
        check_between("alpha", self.alpha, *ALPHA_RANGE)
        check_between("size_skew", self.size_skew, 0.0, LARGEST_SKEW)
        if self.size_skew and self.kind == "dirichlet":
            allowed = "must be 0 for a dirichlet partition, which has sizes of its own"
            raise ConfigError("size_skew", self.size_skew, allowed)

    def describe(self) -> dict[str, Any]:
        """Every parameter; `size_skew` only where it is used, as older records lack it."""
        settings = dataclasses.asdict(self)
        if not self.size_skew:
            del settings["size_skew"]
        return settings

    def split(self, labels: Array, rng: np.random.Generator) -> list[IntArray]:
        """Divides the samples.

        Args:
            labels: `(n,)` the label of each sample.
            rng: The only source of randomness.

        Returns:
            One ascending array of sample indices per client.

        Raises:
            ConfigError: A parameter does not fit the data.
            DataError: No dirichlet partition with these settings was found.
        """
        if self.kind == "iid":
            return iid(labels, self.clients, rng, self.size_skew)
        if self.kind == "shards":
            return shards(labels, self.clients, self.shards_per_client, rng, self.size_skew)
        return dirichlet(labels, self.clients, self.alpha, rng, self.minimum_size)


def iid(
    labels: Array, clients: int, rng: np.random.Generator, size_skew: float = 0.0
) -> list[IntArray]:
    """Shuffled and dealt: sizes are equal up to one sample, or skewed.

    Args:
        labels: `(n,)` the label of each sample; only their number counts.
        clients: Number of clients, N.
        rng: The only source of randomness.
        size_skew: Standard deviation of the logarithm of a client's size; 0: equal sizes.

    Returns:
        One ascending array of sample indices per client.
    """
    n = count_samples(np.arange(len(labels)), clients)  # a sample may have several targets
    owner = np.empty(n, np.int64)
    owner[rng.permutation(n)] = (
        np.arange(n) % clients if not size_skew else _skewed_runs(n, clients, size_skew, rng)
    )
    return indices_per_client(owner, clients)


def shards(
    labels: Array, clients: int, per_client: int, rng: np.random.Generator, size_skew: float = 0.0
) -> list[IntArray]:
    """Sorted by label, cut into `clients x per_client` runs, and dealt at random.

    Args:
        labels: `(n,)` the label of each sample.
        clients: Number of clients, N.
        per_client: Runs (shards) per client.
        rng: The only source of randomness.
        size_skew: Standard deviation of the logarithm of a shard's size; 0: equal up to one sample.

    Returns:
        One ascending array of sample indices per client.
    """
    n = count_samples(labels, clients)
    count = clients * per_client
    if not clients <= count <= n:
        allowed = f"{clients} clients can have from 1 to {n // clients} shards each of {n} samples"
        raise ConfigError("shards_per_client", per_client, allowed)
    holder = rng.permutation(count) // per_client  # (count,) the client of each shard
    if size_skew:
        shard = _skewed_runs(n, count, size_skew, rng)
    else:
        sizes = n // count + (np.arange(count) < n % count)
        shard = np.repeat(np.arange(count), sizes)
    owner = np.empty(n, np.int64)
    owner[np.argsort(labels, kind="stable")] = holder[shard]
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
