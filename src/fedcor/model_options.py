"""The models that settings can name, and their options. Builds none, so it needs no torch.

`fedcor.engine.models` has the factories of the built-in models. A test holds `MODEL_OPTIONS` equal
to their signatures.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

from fedcor.errors import ConfigError, suggest
from fedcor.plugins import load_object

__all__ = ["MODEL_OPTIONS", "check_model_options", "load_model_factory"]

MODEL_OPTIONS: dict[str, tuple[str, ...]] = {
    "mlp": ("hidden", "dropout"),
    "cnn": ("channels", "dense"),
    "logistic": (),
}


def check_model_options(name: str, options: Mapping[str, Any]) -> None:
    """Raises ConfigError for an unknown model, or for options that its factory does not take.

    Args:
        name: a built-in model, or the user's `module:factory`, which is imported.
        options: what the factory is to be called with, beside shape and number of classes.
    """
    known: tuple[str, ...] | None
    if name in MODEL_OPTIONS:
        known = MODEL_OPTIONS[name]
    else:
        load_model_factory(name)
        known = _option_names(_named(name))
    if known is None:
        return
    for key, value in options.items():
        if key not in known:
            allowed = f"the model {name} has no such option; it has: {', '.join(known) or 'none'}"
            raise ConfigError(key, value, allowed, suggest(key, known))


def load_model_factory(given: Any) -> Callable[..., Any]:
    """A user's model as a factory, to be called as factory(shape, classes, **options).

    Args:
        given: `module:factory`; or a function or class, called with shape and number of classes
            unless it needs nothing, such as `lambda: MyModule()`; or a module, which is copied.
    """
    factory = _named(given) if isinstance(given, str) else given
    if callable(getattr(factory, "state_dict", None)) and not isinstance(factory, type):
        return lambda *_: copy.deepcopy(factory)
    if not callable(factory):
        raise ConfigError("name", given, "must be a function or class that makes a module")
    if _needs_nothing(factory):
        return lambda _shape, _classes, **options: factory(**options)
    return cast(Callable[..., Any], factory)


def _named(name: str) -> Any:
    if ":" not in name:
        allowed = f"must be one of {', '.join(MODEL_OPTIONS)}, or module:factory"
        raise ConfigError("name", name, allowed, suggest(name, MODEL_OPTIONS))
    return load_object(name, "name")


def _needs_nothing(factory: Callable[..., Any]) -> bool:
    """Whether a factory can be called without anything, so without shape and classes."""
    try:
        inspect.signature(factory).bind()
    except (TypeError, ValueError):  # some callables written in C have no signature
        return False
    return True


def _option_names(factory: Any) -> tuple[str, ...] | None:
    """The options that a factory takes; None if it takes any, or does not say."""
    if not callable(factory):
        return ()
    try:
        parameters = inspect.signature(factory).parameters
    except ValueError:
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return tuple(parameters)[0 if _needs_nothing(factory) else 2 :]
