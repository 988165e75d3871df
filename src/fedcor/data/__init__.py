"""Data sets, and how their training samples are spread over clients."""

from fedcor.data.cache import cache_dir
from fedcor.data.client_ids import parts_of
from fedcor.data.datasets import Dataset, Listing, Samples, available, load
from fedcor.data.download import OnDownload
from fedcor.data.label_noise import noisy_clients, randomise_labels
from fedcor.data.own_data import as_dataset
from fedcor.data.partition import Partition, dirichlet, iid, shards
from fedcor.data.sources import fetch

__all__ = [
    "Dataset",
    "Listing",
    "OnDownload",
    "Partition",
    "Samples",
    "as_dataset",
    "available",
    "cache_dir",
    "dirichlet",
    "fetch",
    "iid",
    "load",
    "noisy_clients",
    "parts_of",
    "randomise_labels",
    "shards",
]
