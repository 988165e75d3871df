"""Calls as tasks of Ray.

Not through `ray.util.joblib`: it works with a pool of actors, and when one of them dies, its call
fails. Ray's own retries are off, because those after a lack of memory have no end.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

from fedcor.cluster.address import check_answer, say_missing
from fedcor.cluster.base import LostError
from fedcor.cluster.there import entry
from fedcor.errors import ConfigError, FedcorError
from fedcor.foreign import one_line

__all__ = ["RAY_ENVIRONMENT", "RayCluster", "connect_ray"]

# Nothing calls home, and Ray does not choose devices.
RAY_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


def connect_ray(address: str) -> None:
    """Connect this process to a Ray cluster that runs.

    Args:
        address: `host:port` of a cluster that this machine is a part of, `ray://host:port` of any,
            or `auto`.
    """
    for key, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    check_answer("ray", address)
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, OSError, AssertionError) as error:
        raise FedcorError(
            f"no Ray cluster can be used at {address}: {one_line(str(error), 500)} (from a machine "
            "that is not a part of the cluster, the address begins with ray://)"
        ) from error
    _keep_output_clean()


def _keep_output_clean() -> None:
    """Ray prints long messages to the standard output when a node dies, whatever it is told."""
    from ray._private import worker

    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = _say_nothing


def _say_nothing(*_: object, **__: object) -> None:
    pass


class RayCluster:
    """A connection to Ray: the one that this process has, or a new one.

    Args:
        address: Of the cluster; None if this process must be connected already.
        given: Whether a user gave the address. One of the environment is left alone where this
            process is connected already.
    """

    def __init__(self, address: str | None, *, given: bool = True) -> None:
        import ray

        self._ray: Any = ray
        self._own = not ray.is_initialized()
        if not self._own and given and address is not None:
            allowed = (
                "this process is connected to Ray already: leave out address, or call "
                "ray.shutdown() first"
            )
            raise ConfigError("address", address, allowed)
        if self._own:
            if address is None:
                raise say_missing("ray")
            connect_ray(address)
        self._function = ray.remote(num_cpus=1, max_retries=0)(entry())

    def slots(self) -> int:
        """As many as there are processors in the cluster."""
        return int(self._ray.cluster_resources().get("CPU", 0))

    def submit(self, payload: bytes) -> Any:
        """Start a task."""
        return self._function.remote(payload)

    def wait(self, calls: Sequence[Any]) -> list[Any]:
        """Those that are done."""
        done, _ = self._ray.wait(list(calls), num_returns=1, timeout=1.0)
        return list(done)

    def result(self, call: Any) -> tuple[str, Any]:
        """What a task returned."""
        errors = self._ray.exceptions
        try:
            result: tuple[str, Any] = self._ray.get(call)
        except (errors.RayTaskError, errors.TaskUnschedulableError) as error:
            raise FedcorError(f"Ray cannot compute a part of a run: {error}") from error
        except errors.RayError as error:
            raise LostError(one_line(str(error), 300)) from error
        return result

    def cancel(self, calls: Sequence[Any]) -> None:
        """End the processes of these tasks."""
        for call in calls:
            self._ray.cancel(call, force=True)

    def close(self) -> None:
        """Disconnect."""
        if self._own:
            self._ray.shutdown()
