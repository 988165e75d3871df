"""Call a function on many items, in several processes at once, here or on a cluster.

The processes are those of loky, joblib's default backend, which needs no
`if __name__ == "__main__"` in a script, and takes functions and classes that a script or a notebook
defines. joblib runs its other backends.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import TypeVar

import joblib
from joblib.externals.loky.process_executor import ProcessPoolExecutor, TerminatedWorkerError

from fedcor.core.config import check_one_of
from fedcor.core.errors import ConfigError, FedcorError, WorkerDiedError
from fedcor.runs.cluster.address import CLUSTERS, check_place
from fedcor.runs.cluster.retry import run_with_retries, sendable


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


T = TypeVar("T")
R = TypeVar("R")

CHECK_PARENT_EVERY = 0.2  # seconds
# A worker computes in one thread. Without these, libraries start one per core when imported.
_ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"
)


def check_backend(backend: str, address: str | None) -> None:
    """Refuse an unknown backend, a missing package, or an address that cannot be one."""
    check_one_of("backend", backend, [*joblib.parallel.BACKENDS, *CLUSTERS])
    check_place(backend, address)


def for_each(
    function: Callable[[T], object],
    items: Sequence[T],
    processes: int | None,
    backend: str = "loky",
) -> Iterator[T]:
    """Call `function` on each of `items`, in up to `processes` processes; see `map_each`.

    Yields:
        Each item when its call is done, in the order in which they finish.
    """
    for item, _ in map_each(function, items, processes, backend):
        yield item


def map_each(
    function: Callable[[T], R],
    items: Sequence[T],
    processes: int | None,
    backend: str = "loky",
    address: str | None = None,
) -> Iterator[tuple[T, R]]:
    """Call `function` on each of `items`, in up to `processes` processes.

    With one process, or one item, everything runs in this process. Otherwise new worker processes
    are started, which see the files, modules and environment of now. Whatever ends this generator
    early (an error in a call, an interrupt, a dead worker) ends them too. They also end when this
    process dies (not on Windows).

    Args:
        function: What is called. What it returns is sent back.
        items: What it is called with, in this order.
        processes: How many processes work at once, at most; see `count_processes`.
        backend: A backend of joblib; or "ray" or "dask", where all calls go to a cluster.
        address: Of the cluster; see `fedcor.runs.cluster.retry`.

    Yields:
        Each item with its result when its call is done, in the order in which they finish.

    Raises:
        WorkerDiedError: A worker process died. An error in a call is raised as it is.
    """
    check_backend(backend, address)
    if not items:
        return
    if backend in CLUSTERS:
        yield from run_with_retries(function, items, processes, backend=backend, address=address)
        return
    processes = min(1 if processes is None else processes, len(items))
    if processes <= 1:
        for item in items:
            yield item, function(item)
    elif backend == "loky":
        yield from _map_in_processes(function, items, processes)
    else:
        parallel = joblib.Parallel(
            n_jobs=processes,
            backend=backend,
            return_as="generator_unordered",
            batch_size=1,
            max_nbytes=None,
        )
        calls = (joblib.delayed(_call)(function, i, item) for i, item in enumerate(items))
        for index, result in parallel(calls):
            yield items[index], result


def _map_in_processes(
    function: Callable[[T], R], items: Sequence[T], processes: int
) -> Iterator[tuple[T, R]]:
    here = os.getpid(), os.getcwd()
    executor = ProcessPoolExecutor(
        processes, initializer=_begin_worker, initargs=here, env=_ONE_THREAD
    )
    try:
        with _ignoring_interrupts():
            calls = [executor.submit(_call, function, i, item) for i, item in enumerate(items)]
        for call in as_completed(calls):
            index, result = call.result()
            yield items[index], result
    except TerminatedWorkerError:
        raise WorkerDiedError(
            "a worker process died (killed, or out of memory?); what was recorded is kept, "
            "and can be resumed"
        ) from None
    except BrokenProcessPool as error:
        raise FedcorError(f"a job cannot be sent to a worker process: {error}") from error
    finally:
        with warnings.catch_warnings():
            # Without pgrep, loky warns that it ends the workers but not their children, which they
            # do not have.
            warnings.simplefilter("ignore")
            executor.shutdown(wait=True, kill_workers=True)


def _call(function: Callable[[T], R], index: int, item: T) -> tuple[int, R]:
    try:
        return index, function(item)
    except Exception as error:
        raise sendable(error) from None


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """Processes that start in the block inherit that they ignore interrupts.

    Ctrl-C goes to every process of a terminal, and one that is still importing would print a
    traceback. An interrupt that comes within the block, a few milliseconds, is lost.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _begin_worker(parent: int, folder: str) -> None:
    """Work in the parent's folder, leave interrupts to the parent, and end when it dies.

    A worker that outlived it would hold the lock of its run.
    """
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(CHECK_PARENT_EVERY)
    os._exit(1)
