"""Which clients complement serves: how often each is chosen, how well its own data is learnt."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedcor.core.errors import RecordError
from fedcor.core.types import FloatArray
from fedcor.reporting.estimates import mean_estimate
from fedcor.reporting.plots import save_figure
from fedcor.reporting.tables import difference_text, display_name, estimate_text, markdown
from fedcor.runs.record import RunRecord, read_checkpoint
from fedcor.simulation.build import build_simulation
from studies.beyond.shared import ACCURACY, MAIN_THREE
from studies.comparison import times_chosen
from studies.figures import frequencies
from studies.plan import Plan
from studies.variants import Runs, run_variants

HEAD = [
    "accuracy on own training data",
    "worst tenth of the clients",
    "− Rand",
    "all clients",
    "chosen: most / mean / least often",
]


def fairness(plan: Plan) -> list[Path]:
    """How often each client is chosen, and the last model's accuracy on its own training data."""
    runs = run_variants(plan, MAIN_THREE)
    counts = {
        setting: {label: times_chosen(seed_runs) for label, seed_runs in by_label.items()}
        for setting, by_label in runs.items()
    }
    numbers: dict[str, Any] = {}
    tables = []
    for setting, accuracies in _accuracy_by_client(plan, runs).items():
        numbers[setting], rows = {}, []
        worst = {label: [_worst_tenth(a) for a in by_seed] for label, by_seed in accuracies.items()}
        for label, by_seed in accuracies.items():
            level, chosen = mean_estimate(worst[label]), counts[setting][label]
            everyone = mean_estimate(float(a.mean()) for a in by_seed)
            pairs = zip(worst[label], worst["random"], strict=True)
            paired = mean_estimate(ours - theirs for ours, theirs in pairs)
            numbers[setting][label] = {
                "worst_tenth": asdict(level),
                "worst_tenth_paired_to_random": asdict(paired),
                "all_clients": asdict(everyone),
                "times_chosen": chosen.round(2).tolist(),
            }
            rows.append(
                [
                    display_name(label),
                    estimate_text(ACCURACY, level),
                    "–" if label == "random" else difference_text(ACCURACY, paired),
                    estimate_text(ACCURACY, everyone),
                    f"{chosen[0]:.0f} / {chosen.mean():.0f} / {chosen[-1]:.0f}",
                ]
            )
        title = f"{plan.dataset} {setting.upper()}, last model, {plan.seeds_text}"
        tables.append(markdown(title, HEAD, rows))
    saved = plan.save("beyond-fairness", {"settings": numbers})
    order = "clients ordered within each run by how often they were chosen, mean over seeds"
    panels = {
        setting: {label: count.tolist() for label, count in by_label.items()}
        for setting, by_label in counts.items()
    }
    figure = frequencies(panels, f"{plan.dataset}, {plan.seeds_text}; {order}")
    paths = save_figure(figure, plan.out / f"beyond-fairness-{plan.dataset}")
    return [saved, *paths, plan.save_page("beyond-fairness", tables)]


def _accuracy_by_client(plan: Plan, runs: Runs) -> dict[str, dict[str, list[FloatArray]]]:
    """Setting -> variant -> for each seed, (N,) the last model's accuracy on each client's data."""
    accuracies: dict[str, dict[str, list[FloatArray]]] = {
        setting: {label: [] for label in by_label} for setting, by_label in runs.items()
    }
    with plan.progress("models measured", len(runs) * len(plan.seeds)) as update:
        done = 0
        for setting, by_label in runs.items():
            for i, seed in enumerate(plan.seeds):
                engine = build_simulation(plan.experiment(setting), seed).engine
                everyone = np.arange(engine.population.count)
                for label, seed_runs in by_label.items():
                    model = _last_model(seed_runs[i]).to(engine.device)
                    accuracies[setting][label].append(engine.accuracies(model, everyone))
                update(done := done + 1, "")
    return accuracies


def _last_model(run: RunRecord) -> torch.Tensor:
    """The model after the run's last round; refused where the checkpoint is of another round."""
    checkpoint = None if run.path is None else read_checkpoint(run.path)
    reached = 0 if checkpoint is None else int(checkpoint["round"])
    if checkpoint is None or reached != len(run.rounds):
        raise RecordError(
            f"{run.path}: its model is that of {reached} rounds, but {len(run.rounds)} are to be "
            "compared; ask for as many rounds as it has, or choose another folder"
        )
    return torch.from_numpy(checkpoint["model"])


def _worst_tenth(accuracies: FloatArray) -> float:
    """Mean over the tenth of the clients with the lowest accuracy."""
    return float(np.sort(accuracies)[: max(1, len(accuracies) // 10)].mean())
