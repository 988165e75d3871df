"""What both conformance suites check: the object, and the states that its methods return."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedcor.core.types import State


def round_trip(state: State) -> State:
    """The state as a checkpoint gives it back: named arrays, through a file without pickle.

    Raises AssertionError if a checkpoint could not take it.

    Example:
        >>> round_trip({"seen": np.array([True, False])})
        {'seen': array([ True, False])}
    """
    check_state("a method", state)
    file = io.BytesIO()
    np.savez(file, **{f"state/{name}": array for name, array in state.items()})  # type: ignore[arg-type]
    file.seek(0)
    with np.load(file, allow_pickle=False) as archive:
        return {name.removeprefix("state/"): archive[name] for name in archive.files}


def check_state(verb: str, state: object) -> State:
    """The state that the method `verb` returned, which must be one that a checkpoint takes."""
    assert isinstance(state, Mapping), (
        f"{verb} returned the state {state!r}, not a mapping of names to NumPy arrays"
    )
    for name, value in state.items():
        assert isinstance(name, str), f"{verb} returned a state with the name {name!r}, not a text"
        assert isinstance(value, np.ndarray), (
            f"{verb} returned a state whose {name!r} is a {type(value).__name__}, not a NumPy "
            "array: np.array(value) makes one"
        )
        assert not value.dtype.hasobject, (
            f"{verb} returned a state whose {name!r} holds Python objects, which no checkpoint "
            "takes"
        )
    return state


def check_frozen(given: object) -> None:
    """Refuse what is not an object of a frozen dataclass."""
    assert not isinstance(given, type), "this is a class: pass an object of it"
    parameters = getattr(given, "__dataclass_params__", None)
    assert parameters is not None and parameters.frozen, (  # noqa: PT018
        "it is not a frozen dataclass: its hyper-parameters never change, "
        "and its state is kept outside it"
    )


def same(one: Any, other: Any) -> bool:
    """Whether two arrays, or lists, tuples and mappings of arrays, are equal bit for bit."""
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return all(map(same, one, other))
    alike: bool = one.dtype == other.dtype and one.shape == other.shape
    return alike and one.tobytes() == other.tobytes()
