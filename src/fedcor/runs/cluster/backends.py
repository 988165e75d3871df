"""Calls as futures of Dask. Its scheduler gives the call of a lost worker to another."""

from __future__ import annotations

import gc
import logging
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any

from fedcor.core.errors import ConfigError, FedcorError, WorkerDiedError
from fedcor.core.text import one_line
from fedcor.runs.cluster.address import check_answer, check_place, find_address, say_missing
from fedcor.runs.cluster.worker import Cluster, LostError, entry

CONNECT_WITHIN = 10  # seconds


class DaskCluster:
    """A connection to Dask: the client that this process has, or a new one.

    Args:
        address: Of the scheduler; None if this process must have a client already.
    """

    def __init__(self, address: str | None) -> None:
        import distributed

        self._dask: Any = distributed
        self._own = address is not None
        if address is None:
            try:
                self._client = self._dask.Client.current()
            except ValueError:
                raise say_missing("dask") from None
        else:
            check_answer("dask", address)
            # It reports each lost connection at length; what matters is said by us.
            for name in ("distributed", "distributed.client", "distributed.comm"):
                logging.getLogger(name).setLevel(logging.CRITICAL)
            self._client = self._connect(address)
        self._function, self._news = entry(), threading.Event()
        # A closed client raises a RuntimeError, or in newer versions an error of its own.
        closed = getattr(self._dask.client, "ClosedClientError", RuntimeError)
        self._gone: tuple[type[Exception], ...] = (OSError, RuntimeError, closed)

    def _connect(self, address: str) -> Any:
        try:
            return self._dask.Client(address, timeout=CONNECT_WITHIN, set_as_default=False)
        except Exception as error:
            why = one_line(str(error), 500)
            error.__traceback__ = error.__cause__ = error.__context__ = None
        # The client that failed closes itself when it is forgotten, at length: so do it now, and
        # raise an error that does not hold it.
        gc.collect()
        raise FedcorError(
            f"no Dask scheduler can be used at {address}: {why}; is this the address of the "
            "scheduler?"
        )

    def slots(self) -> int:
        """As many as there are workers: a run sets what the threads of a process share."""
        try:
            return len(self._client.nthreads())
        except self._gone as error:
            raise _disconnected() from error

    def submit(self, payload: bytes) -> Any:
        """Make a future."""
        try:
            with warnings.catch_warnings():
                # That the payload is large: the scheduler keeps it, for when a worker is lost.
                warnings.simplefilter("ignore")
                call = self._client.submit(self._function, payload, pure=False)
            call.add_done_callback(self._tell)
        except self._gone as error:
            raise _disconnected() from error
        return call

    def _tell(self, call: Any) -> None:  # noqa: ARG002
        self._news.set()

    def wait(self, calls: Sequence[Any]) -> list[Any]:
        """Those that are done."""
        self._news.wait(1.0)
        self._news.clear()
        return [call for call in calls if call.done()]

    def result(self, call: Any) -> tuple[str, Any]:
        """What a future holds."""
        try:
            result: tuple[str, Any] = call.result()
        except self._dask.KilledWorker as error:
            raise WorkerDiedError(
                "several workers died one after the other with the same part of a run: "
                f"{error}; what was recorded is kept, and can be resumed"
            ) from error
        except CancelledError as error:
            if self._client.status != "running":
                raise _disconnected() from error
            raise LostError(one_line(str(error), 300)) from error
        except Exception as error:
            raise FedcorError(f"Dask cannot compute a part of a run: {error}") from error
        return result

    def cancel(self, calls: Sequence[Any]) -> None:
        """Cancel those that wait; a thread that runs cannot be ended, and its result is dropped."""
        try:
            self._client.cancel(list(calls), force=True)
        except self._gone as error:
            raise _disconnected() from error

    def close(self) -> None:
        """Disconnect."""
        if self._own:
            self._client.close()


def _disconnected() -> FedcorError:
    return FedcorError(
        "the connection to Dask's scheduler was lost; what was recorded is kept, and can be resumed"
    )


# Calls as tasks of Ray.
#
# Not through `ray.util.joblib`: it works with a pool of actors, and when one of them dies, its call
# fails. Ray's own retries are off, because those after a lack of memory have no end.


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


# A connection to a cluster, for as long as a block lasts.


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
        cluster = RayCluster(found, given=address is not None)
    else:
        cluster = DaskCluster(found)
    try:
        yield cluster
    finally:
        cluster.close()
