"""How many processes a number of jobs means. Without joblib: a plan can be checked before it."""

from __future__ import annotations

import os

from fedcor.cluster import CLUSTERS
from fedcor.errors import ConfigError

__all__ = ["count_processes"]


def count_processes(jobs: int | None, backend: str = "loky") -> int | None:
    """How many processes `jobs` means, as in joblib: -1 is one per processor, -2 all but one.

    On a cluster, -1 and None are all that it can run, which is not known yet: None. Here, None is
    one process.

    >>> count_processes(3)
    3
    """
    if backend in CLUSTERS and (jobs is None or jobs == -1):
        return None
    jobs = 1 if jobs is None else jobs
    if isinstance(jobs, bool) or not isinstance(jobs, int) or jobs == 0:
        raise ConfigError("jobs", jobs, "must be a number of processes, or -1 for all processors")
    if backend in CLUSTERS and jobs < 0:  # of how many processors, is not known
        raise ConfigError(
            "jobs", jobs, "must be at least 1, or -1 for all that the cluster can run"
        )
    return jobs if jobs > 0 else max(1, (os.cpu_count() or 1) + 1 + jobs)
