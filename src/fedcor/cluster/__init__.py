"""Work on a cluster that already runs, Ray's or Dask's.

Whatever is sent is a function without a memory: it computes on a worker, and what it returns is
written here. So workers need no folder in common with this machine, and where one is lost, the
same call is made again on another.
"""

from __future__ import annotations

from fedcor.cluster.address import CLUSTERS, check_place

__all__ = ["CLUSTERS", "check_place"]
