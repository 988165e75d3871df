"""Which passes are compiled (`compiled.py`): those over very many clients."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

# Below, a run would hardly win back the seconds in which Numba compiles. The sums of compiled code
# have another order, so its results differ by rounding errors.
COMPILED_FROM = 100_000  # clients


def compiled_pass(name: str, clients: int) -> Callable[..., Any] | None:
    """The pass `compiled.<name>` over so many clients.

    None where they are fewer than `COMPILED_FROM`, and where Numba is not installed.
    """
    if clients < COMPILED_FROM:
        return None
    try:
        compiled = importlib.import_module("fedcor.selectors.compiled")
    except ImportError:
        return None
    found: Callable[..., Any] = getattr(compiled, name)
    return found
