"""MLflow: a run in a local store beside the runs, or where MLFLOW_TRACKING_URI says."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from filelock import FileLock

from fedcor.rounds.record_line import RoundRecord
from fedcor.runs.record import RunRecord
from fedcor.runs.tracking.callback import (
    StartedRun,
    Tally,
    Tracker,
    as_entry,
    check_installed,
    copy_attachments,
    flat_settings,
    known_clients,
    no_link,
    recall,
    remember,
)

STORE, ARTIFACTS, LOCK = "mlflow.db", "mlflow-artifacts", ".mlflow.lock"
URI = "MLFLOW_TRACKING_URI"
_LONGEST_PARAMETER, _MOST_PARAMETERS, _MOST_METRICS = 500, 100, 1000  # MLflow's limits of a call
_CHANGING = "config.training.rounds"  # a resumed run may have more; parameters cannot change
_FLUSH_EVERY = 1.0  # seconds: a transaction takes longer than a short round
_WAIT = 300  # seconds for another process that makes the store


@dataclass
class MLflow(Tracker):
    """Writes metrics, parameters and artifacts to an MLflow run.

    The store is `mlflow.db` in the folder of the comparison, or of the run if it is a single one. A
    resumed run continues its MLflow run (`mlflow.json` in the run's folder has the id). MLflow
    cannot replace a number, so a number that is there already is skipped. Rounds are written about
    once a second; those of a last second that a kill cut off are written when the run is resumed.
    """

    _client: Any = field(init=False, repr=False, default=None)
    _id: str = field(init=False, repr=False)
    _tally: Tally = field(init=False, repr=False)
    _written: dict[str, set[int]] = field(init=False, repr=False)  # steps by the metric's name
    _pending: list[Any] = field(init=False, repr=False)  # metrics that are not written yet
    _flushed: float = field(init=False, repr=False)  # when metrics were written

    def __post_init__(self) -> None:
        for package in ("mlflow", "sqlalchemy", "alembic"):
            check_installed(package, "mlflow")

    def on_start(self, run: StartedRun) -> None:
        """Open the store and the run, and write the rounds so far."""
        assert run.folder is not None
        self._tally, self._pending, self._flushed = Tally(), [], -math.inf
        before = recall(run.folder, "mlflow") if run.resumed else {}
        store = run.folder / before["store"] if before.get("store") else None
        if store is None or not store.is_file():
            store = (run.root or run.folder) / STORE
        with _opened(store) as self._client:
            self._id = self._find_run(before.get("run_id")) or self._make_run(run, store)
        relative = {} if os.environ.get(URI) else {"store": os.path.relpath(store, run.folder)}
        remember(run.folder, "mlflow", {"run_id": self._id, **relative})
        self._describe(run.header)
        self._write(list(run.rounds), run.rounds)

    def on_round(self, record: RoundRecord) -> None:
        """Write the round's metrics."""
        self._write([as_entry(record)])

    def on_end(self, run: RunRecord) -> None:
        """Write the artifacts, and say that the run is finished."""
        assert run.path is not None
        self._flush()
        table = self._tally.table(known_clients(run.header))
        self._client.log_text(self._id, table, "selection.csv")
        with TemporaryDirectory() as folder:
            for path in copy_attachments(run.path, Path(folder)):
                self._client.log_artifact(self._id, str(path))
        self._client.set_terminated(self._id, "FINISHED")
        self._client = None

    def close(self) -> None:
        """Say that the run was ended early, if it was."""
        if self._client is not None:
            try:
                self._flush()
                self._client.set_terminated(self._id, "KILLED")
            finally:
                self._client = None

    def _find_run(self, id: str | None) -> str | None:
        """The run that is continued, if the store has it."""
        from mlflow.exceptions import MlflowException

        if id is None:
            return None
        try:
            data = self._client.get_run(id).data
        except MlflowException:
            return None
        self._client.update_run(id, status="RUNNING")
        self._written = {
            name: {metric.step for metric in self._client.get_metric_history(id, name)}
            for name in data.metrics
        }
        return id

    def _make_run(self, run: StartedRun, store: Path) -> str:
        name = str(run.header.get("experiment"))
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            experiment = found.experiment_id
        elif os.environ.get(URI):
            experiment = self._client.create_experiment(name)
        else:
            place = (store.parent / ARTIFACTS).resolve().as_uri()
            experiment = self._client.create_experiment(name, artifact_location=place)
        self._written = {}
        made: str = self._client.create_run(experiment, run_name=run.name).info.run_id
        return made

    def _describe(self, header: Mapping[str, Any]) -> None:
        """Every setting as a parameter, those that are there as they are; and the whole header."""
        from mlflow.entities import Param

        known = self._client.get_run(self._id).data.params
        settings = flat_settings({k: v for k, v in header.items() if k not in ("kind", "format")})
        rounds = settings.pop(_CHANGING, None)
        if rounds is not None:
            self._client.set_tag(self._id, "rounds", rounds)
        parameters = [
            Param(_safe(name), value[:_LONGEST_PARAMETER])
            for name, value in settings.items()
            if _safe(name) not in known
        ]
        for some in _parts(parameters, _MOST_PARAMETERS):
            self._client.log_batch(self._id, params=some)
        self._client.log_text(self._id, json.dumps(dict(header), indent=1), "header.json")

    def _write(
        self, entries: list[Mapping[str, Any]], before: list[Mapping[str, Any]] | tuple[()] = ()
    ) -> None:
        """Write rounds; the time of those of `before` is that which they took, up to now."""
        from mlflow.entities import Metric

        now = time.time() - sum(float(entry.get("seconds") or 0.0) for entry in before)
        metrics = []
        for entry in entries:
            now += float(entry.get("seconds") or 0.0) if before else 0.0
            for name, value in self._tally.add(entry).items():
                steps = self._written.setdefault(_safe(name), set())
                if entry["round"] not in steps:
                    steps.add(entry["round"])
                    metrics.append(Metric(_safe(name), value, int(now * 1000), entry["round"]))
        self._pending += metrics
        if time.monotonic() - self._flushed >= _FLUSH_EVERY:
            self._flush()

    def _flush(self) -> None:
        """Write what has gathered."""
        some, self._pending = self._pending, []
        for part in _parts(some, _MOST_METRICS):
            self._client.log_batch(self._id, metrics=part)
        self._flushed = time.monotonic()


@contextmanager
def _opened(store: Path) -> Iterator[Any]:
    """A client of the store that the environment names, else of `store`, which is made if needed.

    Several processes may start at once; within the block, one is alone.
    """
    # Read when MLflow is imported: it reports its use to its vendor otherwise.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow import MlflowClient

    given = os.environ.get(URI)
    if given:
        yield MlflowClient(tracking_uri=given)
        return
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    with FileLock(store.parent / LOCK, timeout=_WAIT):
        yield MlflowClient(tracking_uri=f"sqlite:///{no_link(store).resolve()}")


def _safe(name: str) -> str:
    """A name that MLflow takes: it is a path of plain characters."""
    parts = (re.sub(r"[^\w\-. :]", "_", part) for part in name.split("/"))
    return "/".join(part for part in parts if part.strip(".")) or "_"


def _parts(items: list[Any], most: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), most):
        yield items[start : start + most]
