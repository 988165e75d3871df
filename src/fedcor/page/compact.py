"""Numbers for the page: as many digits as can be seen, and nothing that JSON does not have."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

__all__ = ["compact", "compact_list", "escaped_json"]

DIGITS = 4


def compact(value: float | None, digits: int = DIGITS) -> float | int | None:
    """A number with so many significant digits; None where it is not finite.

    Example:
        >>> compact(0.123456), compact(3.0), compact(float("nan"))
        (0.1235, 3, None)
    """
    if value is None or not math.isfinite(value):
        return None
    if value == int(value) and abs(value) < 10**15:
        return int(value)
    return float(f"{value:.{digits}g}")


def compact_list(values: Iterable[float | None], digits: int = DIGITS) -> list[float | int | None]:
    """`compact` of each; of an array, of its values."""
    listed = values.tolist() if isinstance(values, np.ndarray) else values
    return [compact(value, digits) for value in listed]


def escaped_json(data: Any) -> str:
    """JSON that can stand within a script element: it holds no `<`, and no line separator that an
    older browser would take for the end of a line."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
