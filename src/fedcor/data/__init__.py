"""Data sets, and how their training samples are spread over clients."""

from fedcor.data.cache import cache_dir
from fedcor.data.datasets import Dataset, Listing, available, load
from fedcor.data.fetch import Progress, fetch
from fedcor.data.partition import Partition, dirichlet, iid, noisy_clients, randomise_labels, shards

__all__ = [
    "Dataset",
    "Listing",
    "Partition",
    "Progress",
    "available",
    "cache_dir",
    "dirichlet",
    "fetch",
    "iid",
    "load",
    "noisy_clients",
    "randomise_labels",
    "shards",
]
