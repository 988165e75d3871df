"""A user's own code, named `module:attribute` in a config."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from fedcor.errors import ConfigError, suggest

__all__ = ["load_object"]


def load_object(reference: str, key: str) -> Any:
    """The object behind `module:attribute`; modules of the current folder are found too."""
    module_name, _, attribute = reference.partition(":")
    if not module_name or not attribute:
        raise ConfigError(key, reference, "must have the form module:attribute")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may fail in any way while it is imported
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(
            key, reference, f"the module {module_name} could not be imported ({why})"
        ) from error
    if not hasattr(module, attribute):
        names = [name for name in vars(module) if not name.startswith("_")]
        raise ConfigError(
            key,
            reference,
            f"the module {module_name} has no {attribute}",
            suggest(attribute, names),
        )
    return getattr(module, attribute)
