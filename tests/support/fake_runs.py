"""Records of runs that never ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedcor.rounds.record_line import FORMAT
from fedcor.runs.record import RunRecord


def fake_run(
    accuracy: Sequence[float | None],
    selector: str = "random",
    seed: int = 1,
    *,
    target: float | None = 0.5,
    planned: int | None = None,
    experiment: str = "toy",
    down: int = 100,
    up: int = 10,
    loss: Sequence[float | None] | None = None,
    metrics: Mapping[str, Sequence[float | None]] | None = None,
    better: Mapping[str, str | None] | None = None,
    versions: Mapping[str, str] | None = None,
    optimiser: str | Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> RunRecord:
    """A run in memory with these accuracies; `better` names metrics in the settings, and says which
    direction is better, or None; `optimiser` is its name or its settings, `options` those of the
    selector."""
    config: dict[str, Any] = {
        "training": {"rounds": len(accuracy) if planned is None else planned},
        "target_accuracy": target,
    }
    if optimiser is not None:
        config["optimiser"] = {"name": optimiser} if isinstance(optimiser, str) else optimiser
    if options is not None:
        config["selectors"] = {selector: options}
    if better:
        config["metrics"] = {
            name: f"m:{name}" if said is None else {"function": f"m:{name}", "better": said}
            for name, said in better.items()
        }
    header: dict[str, Any] = {
        "kind": "header",
        "format": FORMAT,
        "experiment": experiment,
        "selector": selector,
        "seed": seed,
        "config": config,
        "versions": versions or {},
    }
    rows = []
    for t, value in enumerate(accuracy):
        row: dict[str, Any] = {
            "round": t,
            "selected": [t % 3, 3],
            "participated": [3],
            "test_accuracy": value,
            "test_loss": 1.0 if loss is None else loss[t],
            "learning_rate": 0.1,
            "probed": 2,
            "refused": 0,
            "bytes_down": down,
            "bytes_up": up,
            "seconds": 0.5,
        }
        if metrics:
            row["metrics"] = {name: values[t] for name, values in metrics.items()}
        rows.append(row)
    return RunRecord(None, header, rows)


def regression_run(loss: Sequence[float | None], *args: Any, **options: Any) -> RunRecord:
    """A run without accuracy."""
    return fake_run([None] * len(loss), *args, loss=loss, **{"target": None, **options})
