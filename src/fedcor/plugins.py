"""A user's own code, which settings name as `module:attribute`."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from fedcor.errors import ConfigError, suggest

__all__ = ["load_object"]


def load_object(reference: str, key: str) -> Any:
    """The object that `reference` names.

    Args:
        reference: `module:attribute`. Modules in the current folder are found too.
        key: the setting that holds `reference`, for error messages.

    Raises:
        ConfigError: the module cannot be imported, or has no such attribute.
    """
    module_name, _, attribute = reference.partition(":")
    if not module_name or not attribute:
        raise ConfigError(key, reference, "must have the form module:attribute")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may fail in any way
        why = f"{type(error).__name__}: {error}"
        allowed = f"the module {module_name} could not be imported ({why})"
        raise ConfigError(key, reference, allowed) from error
    if not hasattr(module, attribute):
        names = [name for name in vars(module) if not name.startswith("_")]
        allowed = f"the module {module_name} has no {attribute}"
        raise ConfigError(key, reference, allowed, suggest(attribute, names))
    return getattr(module, attribute)
