"""A Flower run's folder: its header, a line per round, checkpoints, and how it is resumed."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord

from fedcor.core.describe import describe
from fedcor.core.errors import RecordError
from fedcor.core.types import Array, Optimiser, Outcome
from fedcor.flower.checkpoint import Checkpoint, StrategyMemory, flat_metrics, other_records
from fedcor.flower.federation_state import FederationState
from fedcor.flower.optimiser_strategy import optimiser_strategy_in
from fedcor.flower.protocol import LOG, flower_round
from fedcor.flower.reply_filter import known_rate
from fedcor.flower.reply_validation import number
from fedcor.flower.server_round import Round
from fedcor.flower.settings import RoundSettings
from fedcor.flower.strategy_memory import restore, snapshot
from fedcor.optimisers import OPTIMISERS
from fedcor.rounds.aggregation import state_bytes
from fedcor.rounds.record_line import RoundRecord, run_header
from fedcor.rounds.selection import told_losses
from fedcor.runs.folder import RunWriter, open_run, write_client_names
from fedcor.runs.record import json_line
from fedcor.runs.tracking.callback import StartedRun
from fedcor.runs.tracking.session import Session, following
from fedcor.selectors import selector_name


def describe_run(settings: RoundSettings, num_rounds: int) -> dict[str, Any]:
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


class Recorder:
    """Writes the rounds of a run. Without a checkpoint folder, only callbacks hear of them.

    Attributes:
        initial_metrics: The evaluation of the initial model, if there was one in this start.
    """

    def __init__(self, settings: RoundSettings) -> None:
        self._settings, self._memory = settings, StrategyMemory(settings.strategy)
        self._writer: RunWriter | None = None
        self._unsaved: Mapping[str, Array] | None = None  # the last round, not in the checkpoint
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
                finally:
                    self._writer, self._session, self.is_open = None, None, False

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
            return FederationState(), initial
        if self._writer.checkpoint is None:
            self._writer.begin()
            return FederationState(), initial
        folder = self._writer.folder
        try:
            checkpoint = Checkpoint.from_arrays(self._writer.checkpoint)
        except RecordError as error:
            raise RecordError(
                f"{folder}: {error}; choose another folder, or delete it to start over"
            ) from error
        grows = self._settings.grows_trees
        if _shapes(checkpoint.arrays, grows) != _shapes(initial, grows):
            raise RecordError(
                f"the model in {folder} has other arrays than the initial model of this run"
            )
        if checkpoint.state.good is None:  # as one of an earlier version
            checkpoint.state.good = initial
        self._memory.write(checkpoint.strategy)
        self._finished = snapshot(self._settings.strategy)
        for key, value in checkpoint.config.items():
            config[key] = value
        self._writer.begin()
        LOG.info("resuming %s after round %d", folder, checkpoint.done)
        return checkpoint.state, checkpoint.arrays

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
        self._session.end()

    def write(
        self, round: Round, state: FederationState, arrays: ArrayRecord, scores: MetricRecord | None
    ) -> None:
        """Write the line of a round that ended with `arrays`, and the checkpoint if it is due."""
        record = self._line(round, MetricRecord() if scores is None else scores)
        if scores is not None and not self._names_checked:
            self._check_names(record, scores)
            self._names_checked = True
        if self._writer is not None:
            initial = self.initial_metrics if record.round == 0 else None
            more = {
                "faults": dict(round.exchange.faults),
                "metric_records": other_records(round.metrics, initial),
            }
            changed = {
                key: value
                for key, value in round.start.config.items()
                if value != self._initial_config.get(key)
            }
            checkpoint = Checkpoint(record.round + 1, arrays, state, self._memory.read(), changed)
            finished, self._unsaved = checkpoint.to_arrays(), None
            self._writer.append({**dataclasses.asdict(record), **more})
            self._unsaved = finished  # not before: a checkpoint is of all lines that are there
            write_client_names(self._writer.folder, state.roster.names)
            if checkpoint.done % self._settings.selection.checkpoint_every == 0:
                self._save()
        self._finished = snapshot(self._settings.strategy)
        if self._session is not None:
            self._session.round(record)
        if self._settings.selection.on_round is not None:
            self._settings.selection.on_round(record)

    def _save(self) -> None:
        """Write the last finished round to the checkpoint, unless it is there."""
        arrays, self._unsaved = self._unsaved, None
        if arrays is not None and self._writer is not None:
            self._writer.save(arrays)

    def _line(self, round: Round, scores: MetricRecord) -> RoundRecord:
        """The round as the record keeps it."""
        assert round.outcome is not None
        assert round.attempt is not None
        exchange, config = round.exchange, round.start.config
        aggregating = optimiser_strategy_in(self._settings.strategy)
        return RoundRecord(
            round=round.number,
            selected=round.outcome.selected.tolist(),
            participated=round.outcome.participated.tolist(),
            test_accuracy=number(scores, *self._settings.accuracy_keys),
            test_loss=number(scores, *self._settings.loss_keys),
            learning_rate=known_rate(config),
            probed=exchange.probed,
            refused=exchange.refused,
            clipped=sorted(exchange.clipped),
            refused_updates=exchange.refused_updates,
            capped=sorted(exchange.capped),
            rolled_back=exchange.rolled_back,
            bytes_down=exchange.bytes_down,
            bytes_up=exchange.bytes_up,
            seconds=_seconds_since(round.started),
            why=round.attempt.decision.why,
            unmet=round.attempt.decision.unmet,
            details={**round.attempt.decision.details, **_told(round.outcome)},
            memory_bytes=0 if aggregating is None else state_bytes(aggregating.memory),
            quarantined=round.left_alone,
            metrics=flat_metrics(round.metrics),
            server_round=flower_round(round.number),
        )

    def _check_names(self, record: RoundRecord, scores: MetricRecord) -> None:
        """Log what the first evaluation does not hold, so that nobody waits for it in vain."""
        selection, there = self._settings.selection, ", ".join(scores) or "none"
        where = f"the evaluation of round {record.server_round}"
        for what, key in (("accuracy", selection.accuracy_key), ("loss", selection.loss_key)):
            if key is None or _is_number(scores.get(key)):
                continue
            clients = f"evaluate/{key}"
            known = f"; the clients' own evaluation is in it as {clients}"
            LOG.warning(
                '%s_key = "%s": %s has no such number; its metrics are %s. '
                "The record has no %s until it comes%s",
                what,
                key,
                where,
                there,
                what,
                known if clients in record.metrics else "",
            )
        if selection.accuracy_key is None and not any(
            _is_number(scores.get(key)) for key in self._settings.accuracy_keys
        ):
            LOG.info(
                "%s has no accuracy under a known name (%s); its metrics are %s. "
                "accuracy_key names the one that is it",
                where,
                ", ".join(self._settings.accuracy_keys),
                there,
            )


def _told(outcome: Outcome) -> dict[str, list[float | int | None]]:
    """The losses in the replies: they came anyway, so they are read for the record."""
    _ = outcome.losses
    return told_losses(outcome)


def _shapes(arrays: ArrayRecord, grows: bool) -> list[tuple[str, tuple[int, ...] | None]]:
    return [(name, None if grows else array.shape) for name, array in arrays.items()]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _seconds_since(start: float) -> float:
    return round(time.perf_counter() - start, 6)
