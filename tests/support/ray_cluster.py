"""A Ray cluster of two nodes on this machine, as a process: prints its address, and obeys.

It ends when its input does. The line `kill` kills the second node and its workers.
"""

from __future__ import annotations

import sys

import psutil
from ray.cluster_utils import Cluster

NODE = {"num_cpus": 1, "object_store_memory": 80_000_000}


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        second = cluster.add_node(**NODE)
        print("address", cluster.address, flush=True)  # noqa: T201
        for _ in sys.stdin:
            raylet = psutil.Process(second.all_processes["raylet"][0].process.pid)
            doomed = [raylet, *raylet.children(recursive=True)]
            for one in doomed:
                one.kill()
            print("killed", flush=True)  # noqa: T201
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
