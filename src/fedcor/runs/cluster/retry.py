"""Tasks on a cluster, retried by Ray or Dask when a worker is lost.

`run_with_retries` calls a function on many items. Each call is one task of the cluster. When its
worker dies, the cluster starts the task again on another worker: Ray up to `max_retries` times,
Dask as often as its scheduler allows (`distributed.scheduler.allowed-failures`). An error in the
function itself is not retried: it is sent back and raised here.

A task travels as bytes, with the classes that a script or a notebook defines. A worker first
compares its versions with those of this process (`task_entry`), then makes the call (`call_here`).
"""

from __future__ import annotations

import importlib
import logging
import os
import pickle
import site
import socket
import sys
import sysconfig
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import chdir, closing, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fedcor.core.errors import ConfigError, FedcorError, RecordError, WorkerDiedError
from fedcor.core.text import one_line
from fedcor.runs.cluster.address import check_answer, find_address, missing_address

LOG = logging.getLogger("fedcor")
RETRIES = 3  # times that Ray starts a task again whose worker died
CONNECT_WITHIN = 10  # seconds
WAIT_FOR_WORKERS = 60.0  # seconds
# Ray sends no usage statistics, and does not choose devices.
RAY_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
# A worker of Dask may have several threads, but a run sets what a whole process shares.
_ONE_AT_A_TIME = threading.Lock()
T = TypeVar("T")
R = TypeVar("R")


def run_with_retries(
    function: Callable[[T], R],
    items: Iterable[T],
    at_once: int | None,
    *,
    backend: str,
    address: str | None,
) -> Iterator[tuple[T, R]]:
    """Call `function` on each of `items` on a cluster; a call whose worker dies is made again.

    Whatever ends this generator early cancels the tasks that are left.

    Args:
        function: Called on a worker. It may be called again after some of its work was done.
        items: What it is called with.
        at_once: How many tasks are on the cluster at a time; None for as many as it can run.
        backend: "ray" or "dask".
        address: Of the cluster; None for the one of the environment (`RAY_ADDRESS`,
            `DASK_SCHEDULER_ADDRESS`), else the one that this process is connected to.

    Yields:
        Each item with its result, in the order in which the calls finish.

    Raises:
        WorkerDiedError: The workers died with the same task again and again. An error in a call is
            raised as it is.
        FedcorError: The cluster has no workers, or the connection was lost.
    """
    with connect(backend, address) as cluster:
        _wait_for_workers(cluster, at_once)
        waiting, running = deque(items), dict[Any, T]()
        try:
            while waiting or running:
                limit = at_once or max(1, cluster.slots())
                while waiting and len(running) < limit:
                    item = waiting.popleft()
                    running[cluster.submit(pack(partial(function, item)))] = item
                for task in cluster.finished(list(running)):
                    yield running.pop(task), _unpack(*cluster.result(task))
        finally:
            with suppress(Exception):  # the cluster may be gone
                cluster.cancel(list(running))


def _wait_for_workers(cluster: RayCluster | DaskCluster, at_once: int | None) -> None:
    """Wait for the first worker; not if `at_once` is given: some clusters start them on demand."""
    if cluster.slots() > 0:
        return
    LOG.warning("the cluster has no workers yet; waiting for one")
    end = time.monotonic() + WAIT_FOR_WORKERS
    while at_once is None and cluster.slots() == 0:
        if time.monotonic() >= end:
            raise FedcorError(
                f"the cluster has had no workers for {WAIT_FOR_WORKERS:.0f} seconds: start some; "
                "or, if it starts them when there is work, give the number of jobs"
            )
        time.sleep(0.5)


def _unpack(status: str, value: Any) -> Any:
    """The result of a task, or its error."""
    if status == "refused":
        raise FedcorError(f"{value}: install the same versions on all machines")
    if status == "failed":
        raise pickle.loads(value)
    return value


def connect(backend: str, address: str | None) -> closing[RayCluster | DaskCluster]:
    """Connect to a cluster that is running; it stays up when the block ends."""
    return closing(RayCluster(address) if backend == "ray" else DaskCluster(address))


class RayCluster:
    """A connection to Ray: the one that this process has, or a new one.

    Args:
        given: The user's address; None for the environment's, which is ignored if this process is
            connected already.
    """

    def __init__(self, given: str | None) -> None:
        import ray

        self._ray: Any = ray
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            address = find_address("ray", given)
            if address is None:
                raise missing_address("ray")
            connect_ray(address)
        elif given is not None:
            allowed = (
                "this process is connected to Ray already: leave out address, or call "
                "ray.shutdown() first"
            )
            raise ConfigError("address", given, allowed)
        # A process per task: the next one sees the user's modules as they are then.
        self._function = ray.remote(num_cpus=1, max_retries=RETRIES, max_calls=1)(task_entry())

    def slots(self) -> int:
        """How many tasks can run at once: one per processor of the cluster."""
        return int(self._ray.cluster_resources().get("CPU", 0))

    def submit(self, payload: bytes) -> Any:
        """Start a task."""
        return self._function.remote(payload)

    def finished(self, tasks: Sequence[Any]) -> list[Any]:
        """The tasks that are finished, after a second or as soon as there is one."""
        done, _ = self._ray.wait(list(tasks), num_returns=1, timeout=1.0)
        return list(done)

    def result(self, task: Any) -> tuple[str, Any]:
        """What a finished task returned."""
        errors = self._ray.exceptions
        try:
            result: tuple[str, Any] = self._ray.get(task)
        except (errors.RayTaskError, errors.TaskUnschedulableError) as error:
            raise FedcorError(f"Ray cannot run a task: {one_line(str(error), 500)}") from error
        except errors.RayError as error:
            raise _worker_died(error) from error
        return result

    def cancel(self, tasks: Sequence[Any]) -> None:
        """End the processes of these tasks."""
        for task in tasks:
            self._ray.cancel(task, force=True)

    def close(self) -> None:
        """Disconnect, if the connection is ours."""
        if self._is_ours:
            self._ray.shutdown()


def connect_ray(address: str) -> None:
    """Connect this process to a Ray cluster that is running.

    Args:
        address: `host:port` of a cluster that this machine belongs to, `ray://host:port` of any,
            or `auto`.
    """
    for key, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    check_answer("ray", address)
    import ray
    from ray._private import worker

    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, OSError, AssertionError) as error:
        raise FedcorError(
            f"no Ray cluster can be used at {address}: {one_line(str(error), 500)} (from a machine "
            "that is not a part of the cluster, the address begins with ray://)"
        ) from error
    if hasattr(worker, "print_to_stdstream"):
        # Ray would print long messages to the standard output when a node dies.
        worker.print_to_stdstream = lambda *_, **__: None


class DaskCluster:
    """A connection to Dask: the client that this process has, or a new one.

    Args:
        given: The user's address of the scheduler; None for the environment's, else for the client
            that this process has.
    """

    def __init__(self, given: str | None) -> None:
        import distributed

        self._dask: Any = distributed
        address = find_address("dask", given)
        self._is_ours = address is not None
        if address is None:
            try:
                self._client = self._dask.Client.current()
            except ValueError:
                raise missing_address("dask") from None
        else:
            check_answer("dask", address)
            # It logs each lost connection at length; our errors say what matters.
            for name in ("distributed", "distributed.client", "distributed.comm"):
                logging.getLogger(name).setLevel(logging.CRITICAL)
            try:
                self._client = self._dask.Client(
                    address, timeout=CONNECT_WITHIN, set_as_default=False
                )
            except Exception as error:
                raise FedcorError(
                    f"no Dask scheduler can be used at {address}: {one_line(str(error), 500)}; is "
                    "this the address of the scheduler?"
                ) from error
        self._function = task_entry()

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """A closed client raises a RuntimeError, or in newer versions an error of its own."""
        closed = getattr(self._dask.client, "ClosedClientError", RuntimeError)
        try:
            yield
        except (OSError, RuntimeError, closed) as error:
            raise _disconnected() from error

    def slots(self) -> int:
        """How many tasks can run at once: one per worker."""
        with self._connected():
            return len(self._client.nthreads())

    def submit(self, payload: bytes) -> Any:
        """Start a task."""
        with self._connected(), warnings.catch_warnings():
            # Dask warns that the payload is large: the scheduler keeps it, to start it again.
            warnings.simplefilter("ignore")
            return self._client.submit(self._function, payload, pure=False)

    def finished(self, tasks: Sequence[Any]) -> list[Any]:
        """The tasks that are finished, if any."""
        time.sleep(0.1)
        return [task for task in tasks if task.done()]

    def result(self, task: Any) -> tuple[str, Any]:
        """What a finished task returned."""
        from concurrent.futures import CancelledError

        try:
            result: tuple[str, Any] = task.result()
        except self._dask.KilledWorker as error:
            raise _worker_died(error) from error
        except CancelledError as error:
            raise _disconnected() from error
        except Exception as error:
            raise FedcorError(f"Dask cannot run a task: {one_line(str(error), 500)}") from error
        return result

    def cancel(self, tasks: Sequence[Any]) -> None:
        """Cancel the tasks that wait. Dask cannot end one that runs; its result is dropped."""
        with self._connected():
            self._client.cancel(list(tasks), force=True)

    def close(self) -> None:
        """Disconnect, if the connection is ours."""
        if self._is_ours:
            self._client.close()


def _disconnected() -> FedcorError:
    return FedcorError(
        "the connection to Dask's scheduler was lost; what was recorded is kept, and can be resumed"
    )


def _worker_died(error: Exception) -> WorkerDiedError:
    return WorkerDiedError(
        "several workers died one after the other with the same run "
        f"({one_line(str(error), 300)}); what was recorded is kept, and can be resumed"
    )


def pack(function: Callable[[], object]) -> bytes:
    """A call as bytes, with the classes that a script or a notebook defines."""
    import cloudpickle

    try:
        payload: bytes = cloudpickle.dumps(function)
    except Exception as error:
        raise FedcorError(f"a job cannot be sent to a worker: {error}") from error
    return payload


def task_entry() -> Callable[[bytes], tuple[str, Any]]:
    """The function that a worker is given.

    It travels as code, not as a name, because it reports a worker that has no fedcor, or another
    version. So it uses nothing of this module before it has compared them.
    """

    def versions() -> dict[str, str]:
        """Of all that computes, without the build: a laptop may have no accelerator."""
        import platform
        from importlib import metadata

        found = {"Python": ".".join(platform.python_version_tuple()[:2])}
        for name in ("fedcor", "numpy", "torch", "numba"):
            try:
                found[name] = metadata.version(name).partition("+")[0]
            except metadata.PackageNotFoundError:
                found[name] = "missing"  # which it may be on both sides
        return found

    here, folder = versions(), os.getcwd()

    def enter(payload: bytes) -> tuple[str, Any]:
        import socket

        different = [
            f"{name} is {version} there, {here[name]} here"
            for name, version in versions().items()
            if version != here[name]
        ]
        if different:
            return "refused", f"the worker on {socket.gethostname()}: {', '.join(different)}"
        from fedcor.runs.cluster.retry import call_here

        return call_here(folder, payload)

    return enter


def call_here(folder: str, payload: bytes) -> tuple[str, Any]:
    """Make a call on this worker, in the caller's folder if this machine has one of this name.

    Paths of data and of the user's modules may be relative.

    Returns:
        "done" and the result, or "failed" and the error, pickled.
    """
    in_folder = chdir(folder) if os.path.isdir(folder) else nullcontext()
    with _ONE_AT_A_TIME, in_folder, _forgetting_modules():
        try:
            return "done", pickle.loads(payload)()
        except Exception as error:
            return "failed", pickle.dumps(sendable(_with_worker(error)))


@contextmanager
def _forgetting_modules() -> Iterator[None]:
    """Forget the user's own modules afterwards: a worker of Dask lives on, and they may change."""
    modules, path = set(sys.modules), list(sys.path)
    try:
        yield
    finally:
        for name in set(sys.modules) - modules:
            if not _is_installed(getattr(sys.modules[name], "__file__", None)):
                del sys.modules[name]
        sys.path[:] = path
        importlib.invalidate_caches()


def _is_installed(file: str | None) -> bool:
    """Whether a module's file belongs to Python, to an installed package, or to fedcor."""
    if file is None:  # built in
        return True
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = [*map(sysconfig.get_path, kinds), *site.getsitepackages()]
    folders += [site.getusersitepackages(), str(Path(__file__).parents[2])]
    return any(Path(file).is_relative_to(folder) for folder in folders)


def _with_worker(error: Exception) -> Exception:
    """The error, with the worker's name if the worker may be its cause."""
    worker = f"the worker on {socket.gethostname()}"
    if isinstance(error, ConfigError):
        allowed = f"{error.allowed}, on {worker}"
        return ConfigError(error.key, error.given, allowed, error.hint)
    if isinstance(error, FedcorError) and not isinstance(error, RecordError):
        return FedcorError(f"{worker}: {error}")
    if isinstance(error, ModuleNotFoundError):
        return FedcorError(f"{worker} lacks a module: {error}; install it there")
    return error


def sendable(error: Exception) -> Exception:
    """The error, or one with its text if it cannot be sent to another process as it is."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return FedcorError(f"{type(error).__name__}: {error}")
    return error
