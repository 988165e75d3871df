"""Many errands on a cluster at once; an errand is some calls, one after the other.

An errand is a generator. It yields the next call, is sent the call's result, and ends when it
needs no more. It runs here: it holds locks, writes files, and is closed whatever happens. Its
calls run on workers.
"""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from fedcor.core.errors import FedcorError, WorkerDiedError
from fedcor.runs.cluster.worker import FAILED, REFUSED, Cluster, LostError, pack

LOG = logging.getLogger("fedcor")
WAIT_FOR_WORKERS = 60.0  # seconds
MOST_LOSSES = 3  # workers lost one after the other with the same call
T = TypeVar("T")
R = TypeVar("R")
Errand = Generator[Callable[[], Any], Any, None]


@dataclass
class _Underway(Generic[T]):
    """An errand, and its call that is on the cluster."""

    item: T
    errand: Errand
    payload: bytes
    losses: int = 0


def run_errands(
    cluster: Cluster, errands: Iterable[tuple[T, Errand]], at_once: int | None = None
) -> Iterator[T]:
    """Run all errands. Whatever ends this generator early cancels their calls and closes them.

    Args:
        cluster: Where their calls run.
        errands: Each with what is yielded when it has ended.
        at_once: How many calls are on the cluster at a time; None for as many as it can run.

    Raises:
        FedcorError: The cluster has no workers, and none comes.
        WorkerDiedError: Several workers were lost with the same call. An error in a call is raised
            in the errand, as it is.
    """
    _await_workers(cluster, at_once)
    left = iter(errands)
    underway: dict[Any, _Underway[T]] = {}
    try:
        while True:
            limit = at_once or max(1, cluster.slots())
            while len(underway) < limit and (one := next(left, None)) is not None:
                item, errand = one
                if not _send(cluster, underway, item, errand, partial(next, errand)):
                    yield item
            if not underway:
                return
            for call in cluster.wait(list(underway)):
                one_done = underway.pop(call)
                try:
                    status, value = cluster.result(call)
                except LostError as error:
                    _send_again(cluster, underway, one_done, error)
                    continue
                except BaseException:
                    one_done.errand.close()
                    raise
                errand = one_done.errand
                advance = partial(_advance, errand, status, value)
                if not _send(cluster, underway, one_done.item, errand, advance):
                    yield one_done.item
    finally:
        with suppress(Exception):  # of a cluster that is gone
            cluster.cancel(list(underway))
        _close_all([one.errand for one in underway.values()])


def _await_workers(cluster: Cluster, at_once: int | None) -> None:
    """Wait for the first worker; not where a number of calls is given, which may call for some."""
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


def _close_all(errands: Iterable[Errand]) -> None:
    """Close all errands, whichever fails; then raise the first error."""
    errors: list[BaseException] = []
    for errand in errands:
        try:
            errand.close()
        except BaseException as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _send(
    cluster: Cluster,
    underway: dict[Any, _Underway[T]],
    item: T,
    errand: Errand,
    advance: Callable[[], Callable[[], Any]],
) -> bool:
    """Send the errand's next call; False if there is none."""
    try:
        payload = pack(advance())
        underway[cluster.submit(payload)] = _Underway(item, errand, payload)
    except StopIteration:
        return False
    except BaseException:
        errand.close()
        raise
    return True


def _advance(errand: Errand, status: str, value: Any) -> Callable[[], Any]:
    """The errand's next call, after the answer to the one before."""
    if status == REFUSED:
        advice = "install the same versions on all machines"
        return errand.throw(FedcorError(f"{value}: {advice}"))
    if status == FAILED:
        return errand.throw(pickle.loads(value))
    return errand.send(value)


def _send_again(
    cluster: Cluster, underway: dict[Any, _Underway[T]], lost: _Underway[T], error: LostError
) -> None:
    losses = lost.losses + 1
    if losses > MOST_LOSSES:
        lost.errand.close()
        raise WorkerDiedError(
            f"{losses} workers were lost one after the other with the same part of a run "
            f"({error}); what was recorded is kept, and can be resumed"
        ) from error
    LOG.warning("a worker was lost; another takes up what it did")
    try:
        call = cluster.submit(lost.payload)
    except BaseException:
        lost.errand.close()
        raise
    underway[call] = _Underway(lost.item, lost.errand, lost.payload, losses)


def map_on(
    cluster: Cluster, function: Callable[[T], R], items: Iterable[T], at_once: int | None = None
) -> Iterator[tuple[T, R]]:
    """Call `function` on each of `items`, on a cluster.

    Yields:
        Each item with its result when its call is done, in the order in which they finish.
    """
    results: dict[int, R] = {}

    def once(index: int, item: T) -> Errand:
        results[index] = yield partial(function, item)

    errands = (((i, item), once(i, item)) for i, item in enumerate(items))
    for index, item in run_errands(cluster, errands, at_once):
        yield item, results.pop(index)
