"""Questions as a user meets them, and the answers: names of clients, models in the user's form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedcor.core.errors import FedcorError
from fedcor.core.text import listed
from fedcor.rounds.model_arrays import (
    Arrays,
    ModelForm,
    as_array,
    named_arrays,
    numbers_fault,
    shape_fault,
)
from fedcor.rounds.questions import Answer, Kind, Trained, Wanted
from fedcor.rounds.state_machine import Scores

# The keywords of an answer, by the kind of its question.
_TOLD: dict[Kind, tuple[str, ...]] = {
    "losses": ("losses", "failures"),
    "train": (*("models", "updates", "losses", "rms_losses", "steps", "durations", "failures"),),
    "aggregate": ("model",),
    "test": ("accuracy", "loss", "metrics"),
}
_BY_CLIENT = {*_TOLD["losses"], *_TOLD["train"]}


@dataclass(frozen=True, eq=False)
class Question:
    """What a round needs next. `Rounds.ask` gives it, and `Rounds.tell` takes the answer.

    Attributes:
        number: Of the question, from 0. Each is told once.
        kind: "losses": the loss of `model` on the data of each of `clients`. "train": let `clients`
            train from `model`. "test": how good `model` is. "aggregate": the mean of the models of
            `clients` with `weights`, where you average yourself.
        round: The number of the round, from 0.
        clients: Who is asked.
        trial: Whether the answer is for a model that is only tried. If its clients are chosen
            afterwards, nobody trains again.
        enough: How many of `clients` suffice.
        weights: Client -> its weight in the mean; empty but for "aggregate". They are equal, or in
            proportion to data with `weighted=True`; a client that was drawn twice counts twice.
    """

    number: int
    kind: Kind
    round: int
    clients: tuple[Any, ...]
    trial: bool
    enough: int
    weights: Mapping[Any, float]
    _wanted: Wanted = field(repr=False)
    _form: ModelForm = field(repr=False)

    @property
    def model(self) -> Any:
        """The model in question, in the form of yours: a new copy each time it is read."""
        return self._form.wrap(self._wanted.model)


def check_answer(question: Question, given: Mapping[str, Any]) -> None:
    """Raise FedcorError where `given` has keywords that are no answer to the question."""
    allowed = _TOLD[question.kind]
    wrong = [key for key in given if key not in allowed]
    if wrong:
        raise FedcorError(
            f"question {question.number} is of kind {question.kind!r}: tell "
            f"{', '.join(allowed)}, not {', '.join(wrong)}; look at question.kind in your loop"
        )
    if "models" in given and "updates" in given:
        raise FedcorError("tell models or updates, not both")
    if question.kind == "train" and not given.keys() & {"models", "updates", "failures"}:
        raise FedcorError(
            f"question {question.number} asks clients to train: tell models or updates, an empty "
            "dictionary if nobody sent any"
        )
    for key, values in given.items():
        if key in _BY_CLIENT:
            _check_clients(key, values, question)
    sent = {*given.get("models", ()), *given.get("updates", ())}
    _check_memory(given.get("models", {}))
    both = [repr(client) for client in given.get("failures", ()) if client in sent]
    if both:
        raise FedcorError(f"clients that failed have also sent a model: {listed(both)}")


def read_answer(question: Question, given: Mapping[str, Any]) -> Answer | Scores:
    """What was told, by the numbers of clients."""
    if question.kind == "test":
        scores = {key: as_number(key, given[key]) for key in ("accuracy", "loss") if key in given}
        metrics = given.get("metrics") or {}
        return Scores(**scores, metrics={str(k): as_number(str(k), v) for k, v in metrics.items()})
    if question.kind == "aggregate":
        if "model" not in given:
            raise FedcorError(f"question {question.number}: tell model, the mean of the models")
        model, like = question._form.read(given["model"]), question._wanted.model
        check_model(model, like)
        return Answer(model={name: model[name].astype(like[name].dtype) for name in like})
    asked = dict(zip(question.clients, question._wanted.clients.tolist(), strict=True))
    told: dict[str, dict[int, Any]] = {
        key: {asked[client]: value for client, value in values.items()}
        for key, values in given.items()
    }
    numbers = {
        key: {client: as_number(key, value) for client, value in told.get(key, {}).items()}
        for key in ("losses", "rms_losses", "steps", "durations")
    }
    failures = {client: str(why) for client, why in told.get("failures", {}).items()}
    if question.kind == "losses":
        return Answer(losses=numbers["losses"], failures=failures)
    trained = {
        client: Trained(
            *_arrays(question, sent, changes="updates" in told),
            loss=numbers["losses"].get(client, math.nan),
            rms_loss=numbers["rms_losses"].get(client, math.nan),
            steps=_steps(numbers["steps"].get(client, 1.0)),
            seconds=numbers["durations"].get(client, math.nan),
        )
        for client, sent in (told.get("models") or told.get("updates") or {}).items()
    }
    return Answer(trained=trained, failures=failures)


def _steps(given: float) -> int:
    """Local steps; 1 where it is no possible number."""
    return int(given) if 1.0 <= given <= 1e9 else 1


def _arrays(question: Question, sent: Any, *, changes: bool) -> tuple[Arrays, str]:
    """The model that a client sent; or no arrays, and why it cannot be read."""
    start = question._wanted.model
    try:
        arrays = question._form.read(sent)
        for name in start if changes else ():
            if fault := shape_fault(arrays[name], start[name]):
                return {}, f"{name} {fault}"
            # In a wider type: a sum that does not fit the model's own must not wrap around.
            floats = "f" in (start[name].dtype.kind, arrays[name].dtype.kind)
            wide = np.result_type(np.float32, start[name].dtype) if floats else np.int64
            arrays[name] = np.add(start[name], arrays[name], dtype=wide, casting="unsafe")
    except FedcorError as error:
        return {}, str(error)
    return arrays, ""


def check_model(arrays: Arrays, like: Arrays) -> None:
    """Raise FedcorError where these are not the arrays of a usable model."""
    differing = sorted(like.keys() ^ arrays.keys())
    if differing:
        raise FedcorError(f"the model has other arrays: they differ in {listed(differing)}")
    for name, values in arrays.items():
        fault = shape_fault(values, like[name]) or numbers_fault(values, like[name])
        if fault:
            raise FedcorError(f"the model's array {name!r} {fault}")


def _check_clients(key: str, given: Any, question: Question) -> None:
    """Raise FedcorError where `given` is not a dictionary with clients that were asked."""
    if not isinstance(given, Mapping):
        raise FedcorError(f"{key} must be a dictionary: client -> its answer")
    others = [repr(client) for client in given if client not in question.clients]
    if others:
        raise FedcorError(
            f"{key} has clients that were not asked ({listed(others)}); asked were "
            f"{listed([repr(client) for client in question.clients])}"
        )


def _check_memory(models: Mapping[Any, Any]) -> None:
    """Raise FedcorError where the models of two clients are the same memory."""
    owners: dict[int, Any] = {}
    for client, model in models.items():
        try:
            arrays = [as_array(value) for value in named_arrays(model).values()]
        except FedcorError:  # what cannot be read is refused later, as the client's fault
            continue
        places = [one.__array_interface__["data"][0] for one in arrays if one.size]
        if places and owners.setdefault(places[0], client) != client:
            raise FedcorError(
                f"the models of clients {owners[places[0]]!r} and {client!r} are the same memory: "
                "give each a copy of its own, such as {name: value.clone() for name, value in ...}"
            )


def as_scores(given: Any) -> dict[str, Any]:
    """What `test` returned, as keywords of `tell`."""
    if not isinstance(given, Mapping):
        return {"accuracy": given}
    scores = {key: given[key] for key in ("accuracy", "loss") if key in given}
    return {**scores, "metrics": {key: v for key, v in given.items() if key not in scores}}


def as_number(key: str, given: Any) -> float:
    """`given` as a number. Raises FedcorError where it is none."""
    try:
        return float(given)
    except (TypeError, ValueError, OverflowError):
        raise FedcorError(f"{key} must be a number, not {given!r}") from None
