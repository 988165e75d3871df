"""Data sets, and how their training samples are spread over clients."""

from fedcor.data.cache import cache_dir
from fedcor.data.client_data import (
    ClientData,
    PerClient,
    as_client_data,
    check_loaded,
    describe_clients,
    is_client_data,
)
from fedcor.data.client_ids import parts_of
from fedcor.data.datasets import Dataset, Listing, Samples, available, load
from fedcor.data.download import OnDownload
from fedcor.data.label_noise import noisy_clients, randomise_labels
from fedcor.data.own_data import as_dataset
from fedcor.data.partition import Partition, dirichlet, iid, shards
from fedcor.data.partitioners import (
    IID,
    PARTITIONS,
    Dirichlet,
    OwnParts,
    Partitioner,
    Shards,
    as_partition,
    check_parts,
)
from fedcor.data.populations import FolderPopulation, SyntheticPopulation
from fedcor.data.sources import fetch

__all__ = [
    "IID",
    "PARTITIONS",
    "ClientData",
    "Dataset",
    "Dirichlet",
    "FolderPopulation",
    "Listing",
    "OnDownload",
    "OwnParts",
    "Partition",
    "Partitioner",
    "PerClient",
    "Samples",
    "Shards",
    "SyntheticPopulation",
    "as_client_data",
    "as_dataset",
    "as_partition",
    "available",
    "cache_dir",
    "check_loaded",
    "check_parts",
    "describe_clients",
    "dirichlet",
    "fetch",
    "iid",
    "is_client_data",
    "load",
    "noisy_clients",
    "parts_of",
    "randomise_labels",
    "shards",
]
