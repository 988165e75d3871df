"""What a Flower strategy remembers between rounds: momenta, clipping norms, counters.

Flower has no such notion, so it is read from the strategy's attributes, and those of the strategies
that it wraps. Large arrays that are replaced and never changed are held in `Frozen`, which is not
copied.

A *candidate* is a model that a strategy makes for a selector's question. The strategy's attributes
are put back after it; they are adopted with the candidate if it becomes the model.

A release of a model under differential privacy cannot be taken back. So what an accountant has
counted is not put back after a candidate, and a checkpoint carries it to the next start.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp.strategy import FedXgbBagging, Strategy

from fedcor.core import types
from fedcor.core.errors import RecordError
from fedcor.flower.logs import log_once
from fedcor.rounds.aggregation import read_only

_SCALARS = (bool, int, float, str, type(None))
_SPENT = "privacy spent: "  # begins a key of `read_spent`; an attribute's name has no space
_TRIAL: ContextVar[bool] = ContextVar("fedcor_trial", default=False)


def wrapped(strategy: Strategy) -> Iterator[tuple[str, Strategy]]:
    """The strategy and all that it wraps (as differential privacy does), with dotted prefixes."""
    strategies: list[tuple[str, Strategy]] = [("", strategy)]
    for path, owner in strategies:
        for name, value in vars(owner).items():
            if isinstance(value, Strategy) and not any(value is known for _, known in strategies):
                strategies.append((f"{path}{name}.", value))
    yield from strategies


def strategy_setting(strategy: Strategy, name: str, default: Any) -> Any:
    """An attribute of the strategy, or of the first that it wraps and that has it."""
    values = (getattr(owner, name) for _, owner in wrapped(strategy) if hasattr(owner, name))
    return next(values, default)


def grows_trees(strategy: Strategy) -> bool:
    """Whether the model of `strategy` is a bag of XGBoost's trees."""
    return any(isinstance(one, FedXgbBagging) for _, one in wrapped(strategy))


class Frozen(Mapping[str, types.Array]):
    """Named arrays that nobody changes: a copy is the same object, so a snapshot costs nothing.

    An optimiser's state is such a mapping. It may hold an update of every client.
    """

    def __init__(self, arrays: Mapping[str, types.Array]) -> None:
        self._arrays = {name: read_only(array) for name, array in arrays.items()}

    def __getitem__(self, name: str) -> types.Array:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __deepcopy__(self, memo: dict[int, Any]) -> Frozen:
        return self


@dataclass(frozen=True)
class Memory:
    """A strategy's attributes at one moment, by dotted name."""

    # Copies; without functions, other strategies, optimisers, accountants, and what cannot be
    # copied.
    values: dict[str, Any]
    names: frozenset[str]  # of all attributes


def snapshot(strategy: Strategy) -> Memory:
    """Copies of the strategy's attributes as they are now."""
    values, names = {}, []
    for path, one in wrapped(strategy):
        for name, value in vars(one).items():
            names.append(path + name)
            # An optimiser never changes, and need not know when it is equal to its copy.
            if isinstance(value, Strategy | types.Optimiser) or callable(value):
                continue
            if is_accountant(value):
                continue
            try:
                values[path + name] = copy.deepcopy(value)
            except Exception:
                continue  # a lock, a connection: no memory of rounds, and nothing to put back
    return Memory(values, frozenset(names))


def restore(strategy: Strategy, memory: Memory) -> None:
    """Put every attribute back as it was, and remove those that were added since."""
    for path, one in wrapped(strategy):
        for name in list(vars(one)):
            if path + name not in memory.names:
                delattr(one, name)
    owners = dict(wrapped(strategy))
    for key, value in memory.values.items():
        path, dot, name = key.rpartition(".")
        owner = owners[path + dot]
        # What did not change stays the same object: others may hold it, as an app its history.
        if not (hasattr(owner, name) and same(getattr(owner, name), value)):
            setattr(owner, name, copy.deepcopy(value))


def same(first: Any, second: Any) -> bool:
    """Whether two values are the same, to the last bit of their arrays; False where in doubt."""
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, np.ndarray):
        alike = (
            first.dtype == second.dtype
            and first.shape == second.shape
            and not first.dtype.hasobject
        )
        return bool(alike and first.tobytes() == second.tobytes())
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    try:
        return bool(first == second)
    except Exception:  # a value that cannot be compared
        return False


class StrategyMemory:
    """What the rounds change in a strategy. Its settings may be changed between two starts."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._initial = snapshot(strategy).values
        self._reported: set[str] = set()

    def read(self) -> dict[str, Any]:
        """By dotted attribute, all that changed and can be written; what cannot is logged once."""
        changed = {
            key: value
            for key, value in snapshot(self._strategy).values.items()
            if key not in self._initial or not same(value, self._initial[key])
        }
        lost = {key for key, value in changed.items() if not writable(value)}
        for key in sorted(lost):
            log_once(
                self._reported,
                key,
                f"the strategy's attribute {key} (a {type(changed[key]).__name__}) cannot be "
                "written to the checkpoint: if rounds depend on it, a resumed run will differ",
            )
        kept = {key: value for key, value in changed.items() if key not in lost}
        return {**kept, **read_spent(self._strategy)}

    def write(self, memory: Mapping[str, Any]) -> None:
        """Put back what `read` returned."""
        owners = dict(wrapped(self._strategy))
        for key, value in restore_spent(self._strategy, memory).items():
            path, dot, name = key.rpartition(".")
            setattr(owners[path + dot], name, value)


def writable(value: Any) -> bool:
    """Whether a checkpoint can hold `value`."""
    if isinstance(value, np.ndarray):
        return not value.dtype.hasobject
    if isinstance(value, (*_SCALARS, np.generic, bytes, ArrayRecord)):
        return True
    if isinstance(value, Mapping):
        return all(isinstance(key, str | int) and writable(item) for key, item in value.items())
    return isinstance(value, list | tuple) and all(map(writable, value))


def pack(values: Mapping[str, Any], prefix: str) -> dict[str, types.Array]:
    """`values` as named arrays: the numbers, and one JSON text that says where they belong."""
    arrays: dict[str, types.Array] = {}

    def fold(value: Any) -> Any:
        if isinstance(value, np.ndarray | np.generic):
            # A NumPy number stays one: it decides the type of a sum.
            arrays[f"{prefix}/{len(arrays)}"] = np.asarray(value)
            return {"scalar" if isinstance(value, np.generic) else "array": len(arrays) - 1}
        if isinstance(value, _SCALARS):
            return value
        if isinstance(value, bytes):
            return {"bytes": value.hex()}
        if isinstance(value, ArrayRecord):
            return {"record": [[name, fold(array.numpy())] for name, array in value.items()]}
        if isinstance(value, Mapping):
            kind = "frozen" if isinstance(value, Frozen) else "mapping"
            return {kind: [[key, fold(item)] for key, item in value.items()]}
        return {"tuple" if isinstance(value, tuple) else "list": [fold(item) for item in value]}

    text = json.dumps({key: fold(value) for key, value in values.items()})
    return {prefix: np.frombuffer(text.encode(), dtype=np.uint8), **arrays}


def unpack(arrays: Mapping[str, types.Array], prefix: str) -> dict[str, Any]:
    """What `pack` was given. Raises RecordError where the arrays are damaged."""

    def unfold(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        ((kind, inner),) = value.items()
        if kind in ("array", "scalar"):
            stored = arrays[f"{prefix}/{inner}"]
            return stored if kind == "array" else stored[()]
        if kind == "bytes":
            return bytes.fromhex(inner)
        if kind == "record":
            return ArrayRecord({name: Array(unfold(item)) for name, item in inner})
        if kind in ("mapping", "frozen"):
            mapping = {key: unfold(item) for key, item in inner}
            return Frozen(mapping) if kind == "frozen" else mapping
        items = [unfold(item) for item in inner]
        return tuple(items) if kind == "tuple" else items

    try:
        text = arrays[prefix].tobytes().decode()
        return {key: unfold(value) for key, value in json.loads(text).items()}
    except (KeyError, ValueError, AttributeError) as error:
        raise RecordError(f"the checkpoint's {prefix} is damaged: {error!r}") from error


def is_accountant(value: Any) -> bool:
    """Whether it counts releases of a model for differential privacy. They cannot be taken back."""
    verbs = ("compose", "would_exceed", "state_dict", "load_state_dict")
    return all(callable(getattr(value, verb, None)) for verb in verbs)


def read_spent(strategy: Strategy) -> dict[str, Any]:
    """What the accountants in `strategy` have counted, for a checkpoint."""
    return {name: one.state_dict() for name, one in _accountants(strategy).items()}


def restore_spent(strategy: Strategy, memory: Mapping[str, Any]) -> dict[str, Any]:
    """Give the accountants back what `read_spent` put into `memory`; the rest of `memory`.

    One that has counted more by now keeps it: the same object may be started again after a round
    that failed.
    """
    accountants = _accountants(strategy)
    spent = {key: value for key, value in memory.items() if key.startswith(_SPENT)}
    if spent.keys() != accountants.keys():
        raise RecordError(
            "privacy was accounted for before and is not now, or the other way round: "
            "the sum would be wrong; choose another folder"
        )
    for key, one in accountants.items():
        counted, state = one.num_releases, one.state_dict()
        try:
            one.load_state_dict(spent[key])
        except ValueError as error:
            raise RecordError(f"the privacy spent before cannot be counted: {error}") from error
        if one.num_releases < counted:
            one.load_state_dict(state)
    return {key: value for key, value in memory.items() if key not in spent}


def _accountants(strategy: Strategy) -> dict[str, Any]:
    """The accountants of the strategy and of all that it wraps, by key."""
    return {
        f"{_SPENT}{path}{name}": value
        for path, one in wrapped(strategy)
        for name, value in vars(one).items()
        if is_accountant(value)
    }


def is_candidate() -> bool:
    """Whether the aggregation that is under way makes a candidate, which may be dropped.

    FedCor asks what a selection of clients would change. The strategy's `aggregate_train` is then
    called for a model that is shown to clients, and may not become the model of the round. What the
    strategy changes in its own attributes is put back after it. A strategy that also writes files,
    say, asks here, and skips candidates.

    A candidate that is chosen becomes the model as it is: it is not aggregated a second time. A
    strategy that has a method `candidate_adopted(server_round, arrays, metrics)` then hears of it.

    Returns:
        True within an `aggregate_train` whose result is only tried; False everywhere else.

    Example:
        class Saving(FedAvg):
            def aggregate_train(self, server_round, replies):
                arrays, metrics = super().aggregate_train(server_round, replies)
                if not is_candidate():
                    save(server_round, arrays)
                return arrays, metrics

            def candidate_adopted(self, server_round, arrays, metrics):
                save(server_round, arrays)
    """
    return _TRIAL.get()


@dataclass(frozen=True)
class Candidate:
    """What a strategy made of a selection, and all that goes with it if it becomes the model."""

    arrays: ArrayRecord | None
    metrics: MetricRecord | None
    memory: Memory | None  # the strategy after it; None where it is as it was left
    config: ConfigRecord  # the train configuration that its clients trained with


@contextmanager
def trial(strategy: Strategy) -> Iterator[None]:
    """Within it, `strategy` makes a candidate. After it, its attributes are as they were."""
    before, token = snapshot(strategy), _TRIAL.set(True)
    try:
        yield
    finally:
        _TRIAL.reset(token)
        restore(strategy, before)


def adopt(strategy: Strategy, candidate: Candidate, server_round: int) -> None:
    """The candidate becomes the model: `strategy` is as it was after making it, and hears of it."""
    if candidate.memory is not None:
        restore(strategy, candidate.memory)
    if candidate.arrays is None:
        return  # it left the model as it is
    for _, one in wrapped(strategy):
        hook = getattr(one, "candidate_adopted", None)
        if callable(hook):
            hook(server_round, candidate.arrays, candidate.metrics)
