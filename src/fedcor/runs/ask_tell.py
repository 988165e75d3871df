"""`Rounds`: client selection for a training loop of your own. You train; it says whom to ask what.

The rounds themselves are `fedcor.rounds.state_machine`. This module adds what a user meets: names
of clients, models in their own form, the run's folder with record and checkpoint, and callbacks.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np

from fedcor.core.config import check_at_least, check_keys, expand_home
from fedcor.core.describe import describe
from fedcor.core.errors import ConfigError, FedcorError, RecordError
from fedcor.core.text import listed
from fedcor.core.types import (
    Array,
    IntArray,
    Optimiser,
    Population,
    Selector,
    selector_traits,
)
from fedcor.rounds.model_arrays import Arrays, form_of
from fedcor.rounds.record_line import RoundRecord, run_header
from fedcor.rounds.state import RoundState, arrays_below, unpack_state
from fedcor.rounds.state_machine import RoundMachine
from fedcor.runs.answers import Question, as_scores, check_answer, check_model, read_answer
from fedcor.runs.loop_settings import (
    LoopSettings,
    as_clients,
    as_selector,
    describe_optimiser,
    loop_optimiser,
)
from fedcor.runs.record import json_line
from fedcor.runs.resume import RunWriter, open_run, write_client_names
from fedcor.runs.tracking.callback import GivenCallback, StartedRun
from fedcor.runs.tracking.session import check_callbacks, following
from fedcor.selectors import selector_name

# Keyword of `tell` -> what `train` calls it.
_ABOUT = {
    "losses": "loss",
    "rms_losses": "rms_loss",
    "steps": "steps",
    "durations": "seconds",
}


class Rounds:
    """Client selection for your own training loop.

    Ask what is needed next, do it with your own code, and tell what came. A client that is not in
    an answer did not reply. Malformed and non-finite updates are refused and counted. A round in
    which nobody delivers is tried again with other clients, and clients that fail again and again
    are left alone for a while. With a folder, every round is written to a record that `fedcor
    report`, `explain` and `watch` read, and a killed loop resumes from it: build the same object
    again.

    Args:
        selector: Chooses who trains: an object, or a name with `clients_per_round`. None: the
            default one.
        model: The initial model: an array, a list or a dictionary of arrays, or a torch state dict.
        sizes: (N,) Number of training samples of the clients 0 .. N-1; or client -> number, where
            clients have names.
        clients_per_round: C, for a selector that is given by its name.
        optimiser: Puts the updates together: an object or a name. None: the one that the selector
            goes with. "own": you do, with questions of kind "aggregate".
        weighted: Whether models count in proportion to `sizes`. None: as the optimiser says; they
            count equally in FedAvg and FedRecall, and where you average. Say True if your own
            average is weighted: the selector plans for it.
        rounds: How many rounds the run has. After the last, the folder is released. None: as many
            as you ask for; call `close` then, or use `with`.
        train: For `run`: `train(model, client)` returns the client's model after local training, or
            `(model, {"loss": ..., "rms_loss": ..., "steps": ..., "seconds": ...})` with any of
            these; None if the client failed.
        evaluate: For `run`: `evaluate(model, client)` returns the client's loss, or None.
        test: For `run`: `test(model)` returns an accuracy, or a dictionary of metrics.
        folder: Where the record and the checkpoint are written. None: nowhere.
        settings: Every other field of `LoopSettings`.

    Attributes:
        record: A `RoundRecord` of each round that was finished by this object.

    Example:
        >>> def train(model, client):  # client k pulls the model to k
        ...     return model + 0.5 * (client - model)
        >>> rounds = Rounds("random", np.zeros(1), sizes=[10] * 8, clients_per_round=4, train=train)
        >>> round(float(rounds.run(until=20)[0]), 1)
        4.2
    """

    def __init__(
        self,
        selector: Selector | str | None,
        model: Any,
        *,
        sizes: Sequence[int] | Mapping[Any, int] | Array,
        clients_per_round: int | None = None,
        optimiser: Optimiser | str | None = None,
        weighted: bool | None = None,
        rounds: int | None = None,
        train: Callable[[Any, Any], Any] | None = None,
        evaluate: Callable[[Any, Any], float | None] | None = None,
        test: Callable[[Any], Any] | None = None,
        folder: str | Path | None = None,
        **settings: Any,
    ) -> None:
        known = [*inspect.signature(Rounds).parameters, *LoopSettings.__dataclass_fields__]
        check_keys(settings, sorted({*known} - {"settings"}))
        chosen = as_selector(selector, clients_per_round)
        settings["optimiser"] = loop_optimiser(optimiser, chosen, weighted=weighted)
        settings |= {"selector": chosen, "weighted": bool(weighted)}
        self.settings = LoopSettings(**settings | ({} if test is None else {"tests": True}))
        if rounds is not None:
            check_at_least("rounds", rounds, 1)
        self._planned = rounds
        self._train, self._evaluate, self._test = train, evaluate, test
        self._form, self._clients = form_of(model), as_clients(sizes)
        first = self._form.read(model)
        check_model(first, first)
        if any(np.isnan(array).any() for array in first.values()):
            raise FedcorError("the initial model has numbers that are not a number (NaN)")
        self._machine = RoundMachine(
            self.settings,
            _population(self._clients.values()),
            first,
            name=lambda client: repr(self.clients[client]),
        )
        self._absent: set[Any] = set()  # clients of an earlier start that this one does not name
        self._open: Question | None = None
        self._asked = 0
        self._unsaved = self._closed = self._failed = False
        self.record: list[RoundRecord] = []
        self._stack = ExitStack()
        self._writer: RunWriter | None = None
        callbacks = check_callbacks(self.settings.callbacks, folder, "folder")
        try:
            self._open_folder(folder, callbacks)
        except BaseException:
            self._stack.close()
            raise
        if self._is_over:
            self.close()

    @property
    def number(self) -> int:
        """The number of the round that is under way, from 0: how many are finished."""
        return self._machine.state.round

    @property
    def model(self) -> Any:
        """The model after the last finished round, in the form of yours: a copy."""
        return self._form.wrap(self._machine.state.model)

    @property
    def clients(self) -> list[Any]:
        """Everyone, as you call them; the record has their place in this list."""
        return list(self._clients)

    def ask(self, available: Iterable[Any] | None = None) -> Question:
        """What is needed next: the same question until it is told.

        Args:
            available: The clients that can be reached. They count when a round, or another attempt
                at it, begins. None: all.

        Raises:
            FedcorError: Nobody delivered in any attempt at the round.
        """
        self._check_running()
        if self._open is None:
            number = self.number
            wanted = self._machine.advance(self._ids(available), self.settings.rate_at(number))
            if isinstance(wanted, RoundRecord):
                self._write(wanted)
                return self.ask(available)
            clients, weights = self._named(wanted.clients), wanted.weights
            self._open = Question(
                self._asked,
                wanted.kind,
                number,
                clients,
                trial=wanted.trial,
                enough=wanted.enough,
                weights={}
                if weights is None
                else dict(zip(clients, weights.tolist(), strict=True)),
                _wanted=wanted,
                _form=self._form,
            )
            self._asked += 1
        return self._open

    def tell(
        self,
        question: Question,
        *,
        losses: Mapping[Any, float] | None = None,
        models: Mapping[Any, Any] | None = None,
        updates: Mapping[Any, Any] | None = None,
        rms_losses: Mapping[Any, float] | None = None,
        steps: Mapping[Any, int] | None = None,
        durations: Mapping[Any, float] | None = None,
        failures: Mapping[Any, str] | None = None,
        model: Any = None,
        accuracy: float | None = None,
        loss: float | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """The answer to a question. Clients that are left out did not reply.

        Args:
            question: The one that `ask` gave.
            losses: Client -> its loss of `question.model`; with "train", before it trained.
            models: Client -> its model after training. Each must be an array, or a dictionary, of
                its own: `module.state_dict()` alone gives the same tensors for every client.
            updates: Instead of `models`: client -> by how much its model changed.
            rms_losses: Client -> root mean square of its samples' losses, which Oort reads.
            steps: Client -> how many local steps it took.
            durations: Client -> after how many seconds its model was back.
            failures: Client -> why it failed.
            model: For "aggregate": the mean.
            accuracy: For "test": of the model on test data.
            loss: For "test": likewise.
            metrics: For "test": further metrics, by name.

        Raises:
            FedcorError: It is not the open question, or not an answer to it; or nobody delivered in
                any attempt at the round.
        """
        given = {key: value for key, value in locals().items() if key not in ("self", "question")}
        given = {key: value for key, value in given.items() if value is not None}
        self._check_running()
        self._check_open(question)
        check_answer(question, given)
        answer = read_answer(question, given)
        self._open = None
        record = self._machine.tell(answer)
        if record is not None:
            self._write(record)

    def run(
        self,
        until: int | None = None,
        available: Callable[[], Iterable[Any]] | Iterable[Any] | None = None,
    ) -> Any:
        """Run rounds with your functions `train`, `evaluate` and `test`; returns the model.

        An exception in one of them ends the loop; a client that failed returns None.

        Args:
            until: The round before which to stop; None for all.
            available: The clients that can be reached, or a function that gives them before each
                question. None: all.
        """
        ends = [number for number in (until, self._planned) if number is not None]
        if not ends:
            raise ConfigError("until", None, "must be given, as Rounds has no number of rounds")
        while self.number < min(ends):
            self._reply(self.ask(available() if callable(available) else available))
        return self.model

    def join(self, sizes: Mapping[Any, int]) -> None:
        """New clients, by their names and numbers of training samples; between two rounds."""
        if not isinstance(sizes, Mapping):
            raise ConfigError("sizes", sizes, "must be a dictionary: client -> samples")
        known = {str(client) for client in self._clients.keys() - self._absent}
        again = [repr(client) for client in sizes if str(client) in known]
        if again:
            raise ConfigError("sizes", listed(again), "are there already")
        together = {**self._clients, **as_clients(sizes)}
        self._machine.join(_population(together.values()))
        self._clients, self._absent = together, self._absent - sizes.keys()
        self._unsaved = True
        self._write_names()

    def close(self) -> None:
        """Write the checkpoint if it is not, and release the folder."""
        self._closed = True
        try:
            self._save()
        finally:
            self._stack.close()

    def __enter__(self) -> Rounds:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._failed = kind is not None
        self.close()

    def _reply(self, question: Question) -> None:
        """Answer a question with the user's functions."""
        kind, clients = question.kind, question.clients
        if kind == "losses":
            evaluate = _needed("evaluate", self._evaluate, "the selector asks clients for losses")
            answers = {client: evaluate(question.model, client) for client in clients}
            losses = {client: loss for client, loss in answers.items() if loss is not None}
            self.tell(question, losses=losses)
        elif kind == "train":
            train = _needed("train", self._train, "clients are asked to train")
            # Copied at once: a user may use the same module for all clients.
            sent = {client: self._copied(train(question.model, client)) for client in clients}
            came = {client: pair for client, pair in sent.items() if pair[0] is not None}
            failures = dict.fromkeys(sent.keys() - came.keys(), "train returned None")
            more: dict[str, Any] = {
                name: {client: about[key] for client, (_, about) in came.items() if key in about}
                for name, key in _ABOUT.items()
            }
            models = {client: model for client, (model, _) in came.items()}
            self.tell(question, models=models, failures=failures, **more)
        elif kind == "test":
            scores = _needed("test", self._test, "tests = True")(question.model)
            self.tell(question, **as_scores(scores))
        else:
            raise FedcorError('run() does not average: use ask and tell with optimiser="own"')

    @property
    def _is_over(self) -> bool:
        return self._planned is not None and self.number >= self._planned

    def _check_running(self) -> None:
        """Raise FedcorError where there is nothing to ask or to tell any more."""
        if self._is_over:
            raise FedcorError(f"all {self._planned} rounds are over: there is nothing to ask")
        if self._closed:
            raise FedcorError("close() was called: build Rounds again to go on")

    def _copied(self, sent: Any) -> tuple[Any, Mapping[str, Any]]:
        """What `train` returned: a copy of the model, and what it says of the training."""
        pair = isinstance(sent, tuple) and len(sent) == 2 and isinstance(sent[1], Mapping)
        model, about = sent if pair else (sent, {})
        check_keys(about, list(_ABOUT.values()))
        with suppress(FedcorError):  # whatever is wrong with it is told with the client's name
            model = None if model is None else self._form.read(model)
        return model, about

    def _check_open(self, question: Question) -> None:
        """Raise FedcorError for any question but the open one."""
        if self._open is None or question is not self._open:
            told, about = getattr(question, "number", question), self._open
            is_open = "No question is open: call ask()"
            if about is not None:
                is_open = f"Open is question {about.number} ({about.kind}, round {about.round})"
            raise FedcorError(
                f"question {told} is not open: it was told before, or is of another Rounds. "
                f"{is_open}"
            )

    def _ids(self, available: Iterable[Any] | None) -> IntArray:
        """Sorted numbers of the clients that can be reached."""
        numbers = {client: number for number, client in enumerate(self._clients)}
        if available is None:
            available = [client for client in numbers if client not in self._absent]
        given = list(available)
        unknown = [repr(client) for client in given if client not in numbers]
        if unknown:
            allowed = f"must be clients of this federation ({listed(list(map(repr, numbers)))})"
            raise ConfigError("available", listed(unknown), allowed, "new ones come with join()")
        if not given:
            raise ConfigError("available", [], "must name at least one client: wait for one")
        return np.unique([numbers[client] for client in given])

    def _named(self, ids: IntArray) -> tuple[Any, ...]:
        clients = list(self._clients)
        return tuple(clients[client] for client in ids.tolist())

    @property
    def _texts(self) -> list[str]:
        return [str(client) for client in self._clients]

    def _open_folder(self, given: str | Path | None, callbacks: Sequence[GivenCallback]) -> None:
        """Open the run's folder, and go on where its checkpoint ends."""
        header = self._header()
        if given is not None:
            folder = expand_home("folder", given)
            writer = self._stack.enter_context(open_run(folder, header, resume=True))
            if writer.checkpoint is not None:
                self._resume(writer, writer.checkpoint)
            writer.begin()
            self._writer = writer
            self._write_names()
        self._session = self._stack.enter_context(following(callbacks))
        self._stack.callback(self._end)
        self._session.start(_started(self._writer, header))

    def _write_names(self) -> None:
        """Write what clients are called, unless they are called by their numbers."""
        if self._writer is not None and self._texts != list(map(str, range(len(self._texts)))):
            write_client_names(self._writer.folder, self._texts)

    def _resume(self, writer: RunWriter, arrays: Mapping[str, Array]) -> None:
        """Go on from a checkpoint. New clients of this start join those that it has."""
        first = self._machine.state.model
        try:
            names, sizes = json.loads(str(arrays["clients"])), arrays["sizes"].tolist()

            def model(name: str) -> Arrays | None:
                found = arrays_below(arrays, f"{name}/")
                if found:
                    check_model(found, first)
                    if [(k, v.dtype) for k, v in found.items()] != [
                        (k, v.dtype) for k, v in first.items()
                    ]:
                        raise FedcorError("the model's arrays have another order or other types")
                return found or None

            state: RoundState[Arrays] = RoundState(**unpack_state(arrays, model))
        except (KeyError, TypeError, ValueError, FedcorError) as error:
            raise RecordError(
                f"the checkpoint in {writer.folder} does not fit this run ({error}); choose "
                "another folder, or delete it to start over"
            ) from error
        given, called = self._clients, {str(client): client for client in self._clients}
        earlier = {
            called.get(str(name), name): size for name, size in zip(names, sizes, strict=True)
        }
        self._machine.state, self._machine.population = state, _population(sizes)
        self._absent = earlier.keys() - given.keys()
        together = {**earlier, **given}  # new ones at the end, and sizes as they are now
        if together != earlier:
            self._machine.join(_population(together.values()))
        self._clients = together

    def _header(self) -> dict[str, Any]:
        """The record's first line; the same folder must have an equal one."""
        settings = self.settings
        name, traits = selector_name(settings.selector), selector_traits(settings.selector)
        selector = describe(settings.selector)
        config: dict[str, Any] = {
            "selectors": {name: {k: v for k, v in selector.items() if k != "class"}},
            "training": {
                "rounds": self._planned or 0,
                "clients_per_round": traits.clients_per_round,
            },
            "optimiser": describe_optimiser(settings.optimiser),
        }
        if settings.defence.describe():
            config["defence"] = settings.defence.describe()
        return run_header(settings.name, name, settings.seed, config, {}, engine="own")

    def _write(self, record: RoundRecord) -> None:
        """Write the line of a finished round, and the checkpoint if it is due."""
        self.record.append(record)
        if self._writer is not None:
            self._writer.append(dataclasses.asdict(record))
            self._unsaved = True
            if self.number % self.settings.checkpoint_every == 0:
                self._save()
        try:
            self._session.round(record)
        finally:
            if self._is_over:
                self.close()

    def _save(self) -> None:
        if self._writer is None or not self._unsaved:
            return
        arrays = self._machine.state.pack(
            lambda name, model: {f"{name}/{key}": array for key, array in model.items()}
        )
        plain = [client if isinstance(client, int) else str(client) for client in self._clients]
        names = np.array(json.dumps(plain), dtype=np.str_)
        sizes = np.array(list(self._clients.values()), dtype=np.int64)
        self._writer.save({**arrays, "clients": names, "sizes": sizes})
        self._unsaved = False

    def _end(self) -> None:
        """Tell the callbacks that the run is over, if it is."""
        if self._is_over or (self._planned is None and not self._failed):
            self._session.end()


def _population(sizes: Collection[int]) -> Population:
    return Population(np.array(list(sizes), dtype=np.int64))


def _needed(name: str, function: Callable[..., Any] | None, why: str) -> Callable[..., Any]:
    if function is None:
        raise ConfigError(name, None, f"must be given to Rounds for run(): {why}")
    return function


def _started(writer: RunWriter | None, header: Mapping[str, Any]) -> StartedRun:
    """What callbacks are told at the start."""
    if writer is None:
        return StartedRun(json.loads(json_line({"kind": "header", **header})))
    text = json.loads(json_line(writer.header))
    return StartedRun(text, writer.folder, writer.folder, writer.resumed, list(writer.kept))
