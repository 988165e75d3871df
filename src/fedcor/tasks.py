"""Interim: the names of losses and metrics, until there are tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedcor.plugins import load_object

__all__ = ["find_loss", "find_metrics"]


def find_loss(loss: Any) -> Any:
    """The loss as a function."""
    return load_object(loss, "loss") if isinstance(loss, str) and ":" in loss else loss


def find_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics as functions."""
    return {
        name: load_object(given, f"metrics.{name}") if isinstance(given, str) else given
        for name, given in metrics.items()
    }
