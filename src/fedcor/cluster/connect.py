"""A connection to a cluster, for as long as a block lasts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fedcor.cluster.address import check_place, find_address
from fedcor.cluster.base import Cluster

__all__ = ["connect"]


@contextmanager
def connect(backend: str, address: str | None) -> Iterator[Cluster]:
    """Connect to a cluster that runs already; it goes on when the block ends.

    Args:
        backend: "ray" or "dask".
        address: Of the cluster; None for the one of the environment (`RAY_ADDRESS`,
            `DASK_SCHEDULER_ADDRESS`), else the one that this process is connected to.
    """
    check_place(backend, address)
    found = find_address(backend, address)
    cluster: Cluster
    if backend == "ray":
        from fedcor.cluster.over_ray import RayCluster

        cluster = RayCluster(found, given=address is not None)
    else:
        from fedcor.cluster.over_dask import DaskCluster

        cluster = DaskCluster(found)
    try:
        yield cluster
    finally:
        cluster.close()
