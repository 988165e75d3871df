"""A Flower run's folder: its header, a line and a checkpoint per round, and how it is resumed."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord

from fedcor.aggregation import state_bytes
from fedcor.describe import describe
from fedcor.errors import RecordError
from fedcor.flower.checkpoint import Checkpoint, StrategyMemory
from fedcor.flower.memory import restore, snapshot
from fedcor.flower.optimiser_strategy import optimiser_strategy_in
from fedcor.flower.round import Round
from fedcor.flower.screen import number
from fedcor.flower.settings import RoundSettings
from fedcor.flower.state import FederationState
from fedcor.flower.wire import LOG
from fedcor.header import run_header
from fedcor.optimisers import OPTIMISERS
from fedcor.record import RoundRecord
from fedcor.run_folder import RunWriter, open_run, write_client_names
from fedcor.selectors import selector_name
from fedcor.types import Optimiser

__all__ = ["Recorder", "describe_run"]

# fmt: off
_ACCURACIES = (
    "accuracy", "test_accuracy", "eval_accuracy", "eval_acc", "eval-acc", "val_acc", "acc",
)
# fmt: on
_RATES = ("lr", "learning-rate", "learning_rate")


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
    versions = {"flwr": version("flwr")}
    return run_header(settings.selection.name, selector, settings.selection.seed, config, versions)


def _describe(optimiser: Optimiser) -> dict[str, Any]:
    """Its name and its options, as the header of the simulator has them."""
    given = getattr(optimiser, "short_form", optimiser)  # a user's own object with `aggregate`
    options = {key: value for key, value in describe(given).items() if key != "class"}
    return {"name": OPTIMISERS.name_of(given), **options}


class Recorder:
    """Writes the rounds of a run. Without a checkpoint folder, only `on_round` hears of them."""

    def __init__(self, settings: RoundSettings) -> None:
        self._settings, self._memory = settings, StrategyMemory(settings.strategy)
        self._writer: RunWriter | None = None
        self._initial_config: dict[str, Any] = {}  # the train configuration that `start` was given
        self._finished = snapshot(settings.strategy)  # the strategy after the last finished round

    @contextmanager
    def opened(self, header: dict[str, Any]) -> Iterator[None]:
        """Within it, the run's folder is ours. Nothing is written before `resume`.

        If it ends with an error, the strategy forgets the round that was not finished: the same
        object may be started again.
        """
        folder = self._settings.selection.folder
        self._finished = snapshot(self._settings.strategy)
        with ExitStack() as stack:
            if folder is not None:
                self._writer = stack.enter_context(open_run(folder, header, resume=True))
            try:
                yield
            except BaseException:
                restore(self._settings.strategy, self._finished)
                raise
            finally:
                self._writer = None

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
        if _shapes(checkpoint.arrays) != _shapes(initial):
            raise RecordError(
                f"the model in {folder} has other arrays than the initial model of this run"
            )
        self._memory.write(checkpoint.strategy)
        self._finished = snapshot(self._settings.strategy)
        for key, value in checkpoint.config.items():
            config[key] = value
        self._writer.begin()
        LOG.info("resuming %s after round %d", folder, checkpoint.done)
        return checkpoint.state, checkpoint.arrays

    def write(
        self, round: Round, state: FederationState, arrays: ArrayRecord, scores: MetricRecord | None
    ) -> None:
        """Write the line of a round that ended with `arrays`, and the checkpoint."""
        record = self._line(round, MetricRecord() if scores is None else scores)
        if self._writer is not None:
            faults = dict(round.exchange.faults)
            self._writer.append({**dataclasses.asdict(record), "faults": faults})
            write_client_names(self._writer.folder, state.roster.names)
            changed = {
                key: value
                for key, value in round.start.config.items()
                if value != self._initial_config.get(key)
            }
            checkpoint = Checkpoint(record.round + 1, arrays, state, self._memory.read(), changed)
            self._writer.save(checkpoint.to_arrays())
        self._finished = snapshot(self._settings.strategy)
        if self._settings.selection.on_round is not None:
            self._settings.selection.on_round(record)

    def _line(self, round: Round, scores: MetricRecord) -> RoundRecord:
        """The round as the record keeps it."""
        assert round.outcome is not None
        assert round.attempt is not None
        exchange, config = round.exchange, round.start.config
        aggregating = optimiser_strategy_in(self._settings.strategy)
        given = [config.get(key) for key in _RATES]
        rates = [float(rate) for rate in given if isinstance(rate, int | float)]
        return RoundRecord(
            round=round.number,
            selected=round.outcome.selected.tolist(),
            participated=round.outcome.participated.tolist(),
            test_accuracy=number(scores, *_ACCURACIES),
            test_loss=number(scores, *self._settings.loss_keys),
            learning_rate=rates[0] if rates else float("nan"),
            probed=exchange.probed,
            refused=exchange.refused,
            bytes_down=exchange.bytes_down,
            bytes_up=exchange.bytes_up,
            seconds=_seconds_since(round.started),
            why=round.attempt.decision.why,
            memory_bytes=0 if aggregating is None else state_bytes(aggregating.memory),
        )


def _shapes(arrays: ArrayRecord) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, array.shape) for name, array in arrays.items()]


def _seconds_since(start: float) -> float:
    return round(time.perf_counter() - start, 6)
