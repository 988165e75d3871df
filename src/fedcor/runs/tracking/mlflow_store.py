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
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from filelock import FileLock

from fedcor.runs.record import RunRecord
from fedcor.runs.tracking.callback import (
    RoundTracker,
    StartedRun,
    check_installed,
    copy_attachments,
    flat_settings,
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
class MLflow(RoundTracker):
    """Writes metrics, parameters and artifacts to an MLflow run.

    The store is `mlflow.db` in the folder of the comparison, or of the run if it is a single one. A
    resumed run continues its MLflow run (`mlflow.json` in the run's folder has the id). MLflow
    cannot replace a number, so a number that is there already is skipped. Rounds are written about
    once a second; those of a last second that a kill cut off are written when the run is resumed.
    """

    def __post_init__(self) -> None:
        for package in ("mlflow", "sqlalchemy", "alembic"):
            check_installed(package, "mlflow")
        self._client: Any = None

    def open(self, run: StartedRun, folder: Path) -> None:
        """Open the store and the run."""
        self._pending: list[Any] = []  # metrics that are not written yet
        self._flushed = -math.inf  # when metrics were written
        self._written: dict[str, set[int]] = {}  # steps by the metric's name
        before = recall(folder, "mlflow") if run.resumed else {}
        store = folder / before.get("store", "")
        if not store.is_file():
            store = (run.root or folder) / STORE
        with _opened(store) as self._client:
            self._id = self._find_run(before.get("run_id")) or self._make_run(run, store)
        relative = {} if os.environ.get(URI) else {"store": os.path.relpath(store, folder)}
        remember(folder, "mlflow", {"run_id": self._id, **relative})
        self._describe(run.header)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Gather the round's metrics."""
        from mlflow.entities import Metric

        for name, value in values.items():
            steps = self._written.setdefault(_safe(name), set())
            if step not in steps:
                steps.add(step)
                self._pending.append(Metric(_safe(name), value, int(self.now * 1000), step))

    def flush(self) -> None:
        """Write what has gathered, if the last time is long enough ago."""
        if time.monotonic() - self._flushed >= _FLUSH_EVERY:
            self._flush()

    def on_end(self, run: RunRecord) -> None:
        """Write the artifacts, and say that the run is finished."""
        assert run.path is not None
        self._flush()
        table = self.tally.table(self.clients)
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
        if found is None:
            place = None if os.environ.get(URI) else (store.parent / ARTIFACTS).resolve().as_uri()
            experiment = self._client.create_experiment(name, artifact_location=place)
        else:
            experiment = found.experiment_id
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
