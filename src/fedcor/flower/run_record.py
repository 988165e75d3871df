"""A Flower run's folder: its header, a line per round, checkpoints, and how it is resumed.

A line has two keys for the metrics of its round:

    metrics         `train/NAME`, `evaluate/NAME`, `server/NAME` -> a number or a list of numbers
    metric_records  whole records that `metrics` cannot hold as they are: one without any metric,
                    one with numbers that JSON does not have, and `initial`, the evaluation of the
                    initial model, which is in the line of the first round
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp.strategy import Result

from fedcor.core.describe import describe
from fedcor.core.errors import RecordError
from fedcor.core.types import Array, Optimiser
from fedcor.flower.federation_state import Checkpoint, FederationState, first_state
from fedcor.flower.optimiser_strategy import optimiser_strategy_in
from fedcor.flower.protocol import LOG, flower_round
from fedcor.flower.settings import RunSettings
from fedcor.flower.strategy_memory import StrategyMemory, restore, snapshot
from fedcor.optimisers import OPTIMISERS
from fedcor.rounds.record_line import RoundRecord, run_header
from fedcor.runs.record import json_line
from fedcor.runs.resume import RunWriter, open_run, write_client_names
from fedcor.runs.tracking.callback import StartedRun
from fedcor.runs.tracking.session import Session, following
from fedcor.selectors import selector_name

INITIAL = "initial"
# What metrics are of -> where Flower's result has them.
RESULTS = {
    "train": "train_metrics_clientapp",
    "evaluate": "evaluate_metrics_clientapp",
    "server": "evaluate_metrics_serverapp",
}


def describe_run(settings: RunSettings, num_rounds: int) -> dict[str, Any]:
    """The header of the record: what a later start with the same folder must agree with."""
    described = dataclasses.asdict(settings.selector)  # type: ignore[call-overload]
    selector = selector_name(settings.selector)
    aggregating = optimiser_strategy_in(settings.strategy)
    config = {
        "strategy": type(settings.strategy).__name__,
        # A strategy of Flower's, or of a user's, is named alone.
        **({} if aggregating is None else {"optimiser": _describe(aggregating.optimiser)}),
        "selectors": {selector: described},
        "training": {
            "rounds": num_rounds,
            "clients_per_round": described.get("clients_per_round"),
        },
    }
    if settings.selection.rules:
        config["rules"] = settings.selection.rules.describe()
    if settings.selection.defence.describe():
        config["defence"] = settings.selection.defence.describe()
    versions = {"flwr": version("flwr")}
    return run_header(settings.selection.name, selector, settings.selection.seed, config, versions)


def _describe(optimiser: Optimiser) -> dict[str, Any]:
    """Its name and its options, as the header of the simulator has them."""
    given = getattr(optimiser, "short_form", optimiser)  # a user's own object with `aggregate`
    options = {key: value for key, value in describe(given).items() if key != "class"}
    return {"name": OPTIMISERS.name_of(given), **options}


@dataclass(frozen=True)
class FinishedRound:
    """All that is written of a round."""

    record: RoundRecord  # its line
    arrays: ArrayRecord  # the model after it
    config: ConfigRecord  # the train configuration after it
    scores: MetricRecord | None  # the evaluation that the line has its accuracy and loss from
    metrics: Mapping[str, MetricRecord]  # aggregated: `train`, `evaluate` and `server`
    faults: Mapping[str, int]  # kind -> how often


class Recorder:
    """Writes the rounds of a run. Without a checkpoint folder, only callbacks hear of them.

    Attributes:
        initial_metrics: The evaluation of the initial model, if there was one in this start.
    """

    def __init__(self, settings: RunSettings) -> None:
        self._settings, self._memory = settings, StrategyMemory(settings.strategy)
        self._writer: RunWriter | None = None
        self._unsaved: Mapping[str, Array] | None = None  # the last round, not in the checkpoint
        self._thread: ThreadPoolExecutor | None = None  # writes checkpoints
        self._saving: Future[None] | None = None  # the checkpoint that is being written
        self._session: Session | None = None
        self.is_open = False  # whether a run is under way
        self._given_header: dict[str, Any] = {}
        self._initial_config: dict[str, Any] = {}  # the train configuration that `start` was given
        self._finished = snapshot(settings.strategy)  # the strategy after the last finished round
        self._names_checked = False  # whether an evaluation has shown which metrics there are
        self.initial_metrics: MetricRecord | None = None

    @contextmanager
    def opened(self, header: dict[str, Any]) -> Iterator[None]:
        """Within it, the run's folder is ours. Nothing is written before `resume`.

        If it ends with an error, the strategy forgets the round that was not finished: the same
        object may be started again.
        """
        folder = self._settings.selection.folder
        self._finished = snapshot(self._settings.strategy)
        self._names_checked, self.initial_metrics = False, None
        with ExitStack() as stack:
            if folder is not None:
                self._writer = stack.enter_context(open_run(folder, header, resume=True))
                self._thread = stack.enter_context(ThreadPoolExecutor(max_workers=1))
            self._session = stack.enter_context(following(self._settings.selection.callbacks))
            self._given_header = header
            try:
                self.is_open = True
                yield
            except BaseException:
                restore(self._settings.strategy, self._finished)
                raise
            finally:
                try:
                    self._save()
                    self._wait()
                finally:
                    self._writer = self._thread = self._session = None
                    self.is_open = False

    @property
    def before(self) -> list[Mapping[str, Any]]:
        """The lines of the rounds that were finished before this start."""
        return [] if self._writer is None else self._writer.kept

    def resume(
        self, initial: ArrayRecord, config: ConfigRecord
    ) -> tuple[FederationState, ArrayRecord]:
        """The state and the model after the last finished round, or those of a new run.

        The strategy's memory, and what it changed in `config`, are put back.
        """
        self._initial_config = dict(config.items())
        if self._writer is None:
            return FederationState(first_state(initial)), initial
        if self._writer.checkpoint is None:
            self._writer.begin()
            return FederationState(first_state(initial)), initial
        folder = self._writer.folder
        try:
            checkpoint = Checkpoint.from_arrays(self._writer.checkpoint)
        except RecordError as error:
            raise RecordError(
                f"{folder}: {error}; choose another folder, or delete it to start over"
            ) from error
        state, grows = checkpoint.state, self._settings.grows_trees
        if _shapes(state.current.model, grows) != _shapes(initial, grows):
            raise RecordError(
                f"the model in {folder} has other arrays than the initial model of this run"
            )
        if state.current.good is None:  # no round has shown yet that its model is good
            state.current = dataclasses.replace(state.current, good=initial)
        self._memory.write(checkpoint.strategy)
        self._finished = snapshot(self._settings.strategy)
        self._log_changed_config(checkpoint.given_config)
        for key, value in checkpoint.config.items():
            config[key] = value
        self._writer.begin()
        LOG.info("resuming %s after round %d", folder, state.finished)
        return state, state.current.model

    def _log_changed_config(self, before: Mapping[str, Any]) -> None:
        """Log where the train configuration is not that of the earlier start."""
        now = self._initial_config
        for key in sorted(before.keys() | now.keys()):
            old, new = before.get(key), now.get(key)
            if old != new:
                LOG.warning(
                    f"train_config[{key!r}] is {new!r} and was {old!r} when the run started: the "
                    "rounds from now on are trained with the new value"
                )

    def tell_start(self) -> None:
        """Tell the callbacks what starts, when everything is ready for the first round."""
        assert self._session is not None, "opened() comes first"
        writer = self._writer
        given = {"kind": "header", **self._given_header} if writer is None else writer.header
        header = json.loads(json_line(given))
        if writer is None:
            self._session.start(StartedRun(header))
        else:
            folder, kept = writer.folder, list(writer.kept)
            self._session.start(StartedRun(header, folder, folder, writer.resumed, kept))

    def tell_end(self) -> None:
        """Tell the callbacks that all rounds are over, and in the checkpoint."""
        assert self._session is not None, "opened() comes first"
        self._save()
        self._wait()
        self._session.end()

    def write(self, finished: FinishedRound, state: FederationState) -> None:
        """Write the line of a round, and the checkpoint if it is due."""
        record, scores = finished.record, finished.scores
        if scores is not None and not self._names_checked:
            self._check_names(record, scores)
            self._names_checked = True
        if self._writer is not None:
            initial = self.initial_metrics if record.round == 0 else None
            more = {
                "faults": dict(finished.faults),
                "metric_records": other_records(finished.metrics, initial),
            }
            changed = {
                key: value
                for key, value in finished.config.items()
                if value != self._initial_config.get(key)
            }
            kept = dataclasses.replace(state.current, model=finished.arrays)
            checkpoint = Checkpoint(
                dataclasses.replace(state, current=kept),
                self._memory.read(),
                changed,
                self._initial_config,
            )
            arrays, self._unsaved = checkpoint.to_arrays(), None
            self._writer.append({**dataclasses.asdict(record), **more})
            self._unsaved = arrays  # not before: a checkpoint is of all lines that are there
            write_client_names(self._writer.folder, state.roster.names)
            if (record.round + 1) % self._settings.selection.checkpoint_every == 0:
                self._save()
        self._finished = snapshot(self._settings.strategy)
        if self._session is not None:
            self._session.round(record)
        if self._settings.selection.on_round is not None:
            self._settings.selection.on_round(record)

    def _save(self) -> None:
        """Write the last finished round to the checkpoint, unless it is there.

        Another thread writes, while the next round runs. A server that is killed meanwhile repeats
        this round; an error is raised at the next checkpoint, or at the end.
        """
        arrays, self._unsaved = self._unsaved, None
        if arrays is not None and self._writer is not None and self._thread is not None:
            self._wait()
            self._saving = self._thread.submit(self._writer.saving(arrays))

    def _wait(self) -> None:
        """Wait for the checkpoint that is being written, and raise its error."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def _check_names(self, record: RoundRecord, scores: MetricRecord) -> None:
        """Log what the first evaluation does not hold, so that nobody waits for it in vain."""
        selection, names = self._settings.selection, ", ".join(scores) or "none"
        where = f"the evaluation of round {record.server_round}"
        for what, key in (("accuracy", selection.accuracy_key), ("loss", selection.loss_key)):
            if key is None or _is_number(scores.get(key)):
                continue
            clients = f"evaluate/{key}"
            known = f"; the clients' own evaluation is in it as {clients}"
            LOG.warning(
                f'{what}_key = "{key}": {where} has no such number; its metrics are {names}. '
                f"The record has no {what} until it comes"
                f"{known if clients in record.metrics else ''}"
            )
        if selection.accuracy_key is None and not any(
            _is_number(scores.get(key)) for key in self._settings.accuracy_keys
        ):
            known = ", ".join(self._settings.accuracy_keys)
            LOG.info(
                f"{where} has no accuracy under a known name ({known}); its metrics are {names}. "
                "If one of them is the accuracy, name it with accuracy_key"
            )


def _shapes(arrays: ArrayRecord, grows: bool) -> list[tuple[str, tuple[int, ...] | None]]:
    return [(name, None if grows else array.shape) for name, array in arrays.items()]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def flat_metrics(parts: Mapping[str, MetricRecord]) -> dict[str, Any]:
    """All metrics of a round, by what they are of and their name.

    Args:
        parts: The aggregated records: `train`, `evaluate` and `server`, those that there are.
    """
    return {
        f"{part}/{name}": value
        for part in RESULTS
        for name, value in parts.get(part, MetricRecord()).items()
    }


def other_records(
    parts: Mapping[str, MetricRecord], initial: MetricRecord | None = None
) -> dict[str, dict[str, Any]]:
    """The records of which `flat_metrics` does not tell all, in numbers and texts for JSON.

    Args:
        parts: As in `flat_metrics`.
        initial: The evaluation of the initial model, if this is the first round and there is one.
    """
    others = {} if initial is None else {INITIAL: initial}
    others |= {part: record for part, record in parts.items() if not _is_plain(record)}
    return {
        part: {name: _each(_text_if_odd, value) for name, value in record.items()}
        for part, record in others.items()
    }


def read_metrics(line: Mapping[str, Any]) -> dict[str, MetricRecord]:
    """The records of a round's line, exactly as they were put into it; by part, and `initial`."""
    flat: dict[str, dict[str, Any]] = {}
    for key, value in (line.get("metrics") or {}).items():
        part, slash, name = key.partition("/")
        if slash and part in RESULTS:
            flat.setdefault(part, {})[name] = value
    parts = {**flat, **(line.get("metric_records") or {})}
    return {
        part: MetricRecord({name: _each(_number, value) for name, value in values.items()})
        for part, values in parts.items()
    }


def with_earlier(result: Result, lines: Iterable[Mapping[str, Any]]) -> Result:
    """`result` with the metrics of earlier rounds before its own.

    Args:
        result: Of the rounds after them, in Flower's numbers over the whole run.
        lines: Of the earlier rounds, as the record has them.
    """
    earlier: dict[str, dict[int, MetricRecord]] = {name: {} for name in RESULTS.values()}
    for line in lines:
        records = read_metrics(line)
        if INITIAL in records:
            earlier[RESULTS["server"]][0] = records[INITIAL]
        for part, name in RESULTS.items():
            if part in records:
                earlier[name][flower_round(line["round"])] = records[part]
    for name, records_of in earlier.items():
        setattr(result, name, {**records_of, **getattr(result, name)})
    return result


def _is_plain(record: MetricRecord) -> bool:
    """Whether JSON has all its numbers, and there are any."""
    numbers = [
        number
        for value in record.values()
        for number in (value if isinstance(value, list) else [value])
    ]
    return bool(len(record)) and all(math.isfinite(number) for number in numbers)


def _each(change: Any, value: Any) -> Any:
    return [change(item) for item in value] if isinstance(value, list) else change(value)


def _text_if_odd(value: float) -> float | str:
    """`nan`, `inf` and `-inf` as texts, which JSON has."""
    return value if math.isfinite(value) else str(float(value))


def _number(value: float | str | None) -> float:
    return math.nan if value is None else float(value) if isinstance(value, str) else value
