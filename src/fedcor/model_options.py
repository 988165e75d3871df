"""The models that settings can name, and their options. Builds none, so it needs no torch.

`fedcor.engine.models` has the factories of the built-in models. A test holds `MODEL_OPTIONS` equal
to their signatures.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

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
    known = (
        MODEL_OPTIONS[name] if name in MODEL_OPTIONS else _option_names(load_model_factory(name))
    )
    if known is None:
        return
    for key, value in options.items():
        if key not in known:
            allowed = f"the model {name} has no such option; it has: {', '.join(known) or 'none'}"
            raise ConfigError(key, value, allowed, suggest(key, known))


def load_model_factory(name: str) -> Callable[..., Any]:
    """The user's `module:factory`, to be called as factory(shape, classes, **options)."""
    if ":" not in name:
        allowed = f"must be one of {', '.join(MODEL_OPTIONS)}, or module:factory"
        raise ConfigError("name", name, allowed, suggest(name, MODEL_OPTIONS))
    factory: Callable[..., Any] = load_object(name, "name")
    if not callable(factory):
        raise ConfigError("name", name, "must be a function or class that makes a module")
    return factory


def _option_names(factory: Callable[..., Any]) -> tuple[str, ...] | None:
    """The options that a factory takes; None if it takes any, or does not say."""
    try:
        parameters = inspect.signature(factory).parameters
    except ValueError:  # some callables written in C have no signature
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return tuple(parameters)[2:]
