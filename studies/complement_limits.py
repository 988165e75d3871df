"""Where `complement` may fail, and which clients it serves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch

from fedcor.core.errors import RecordError
from fedcor.core.rng import stream
from fedcor.core.types import FloatArray
from fedcor.data.partition import noisy_clients
from fedcor.reporting.metrics import mean_estimate
from fedcor.reporting.tables import difference_text, estimate_text
from fedcor.runs.record import RunRecord, read_checkpoint
from fedcor.simulation.build import LABEL_NOISE, build_simulation
from studies.complement import MAIN_THREE, complement_variant
from studies.figures import difference_draw, frequencies
from studies.plan import Plan
from studies.runs import build_experiment
from studies.scaffold import (
    COMPLEMENT,
    Result,
    Runs,
    Scenario,
    Study,
    Variant,
    always,
    paper_scenario,
    paper_scenarios,
)
from studies.summaries import (
    ACCURACY,
    accuracy_differences,
    chosen_clients,
    difference_rows,
    paired_accuracy,
    summarise_variants,
    summary_numbers,
    times_chosen,
)
from studies.tables import display_name, markdown

# --- limits ---------------------------------------------------------------------------------------

MANY = "many"
# With many clients, the sweep over all clients that never trained takes many rounds.
EXPLORING = (
    complement_variant("sweep mixed in", sweep=0.5),
    complement_variant("sweep and oldest mixed in", sweep=0.5, explore=0.2),
)


def _limits_of(plan: Plan) -> dict[str, tuple[str, tuple[str, ...], str]]:
    """Scenario -> the paper's setting, what is changed in it, and its title."""
    many = 100 if plan.dataset == "digits" else 1000
    unreliable = ("faults.availability=0.5", "faults.dropout=0.3")
    crowd = (f"partition.clients={many}", "training.clients_per_round=10")
    return {
        "iid": ("2spc", ("partition.kind=iid",), "iid"),
        "unequal": ("2spc", ("partition.size_skew=1.5",), "very unequal sizes"),
        "weighted": ("dir", ("optimiser.weighted=true",), "Dir, mean weighted by data"),
        "noise": ("2spc", ("data.noisy_clients=0.3333",), "a third with random labels"),
        "dropouts": ("2spc", unreliable, "half away, 30 % of the chosen die"),
        MANY: ("2spc", crowd, f"{many} clients, 10 a round"),
    }


def _limit_scenarios(plan: Plan) -> list[Scenario]:
    """The same whatever settings the plan names."""
    return [
        paper_scenario(plan, setting, name, changes, title)
        for name, (setting, changes, title) in _limits_of(plan).items()
    ]


def _limit_variants(plan: Plan, scenario: Scenario) -> Sequence[Variant]:
    return (*MAIN_THREE, *EXPLORING) if scenario.name == MANY else MAIN_THREE


def _limits(plan: Plan, runs: Runs) -> Iterator[Result]:
    """Six scenarios, paired with random choice and with complement."""
    declared = _limits_of(plan)
    to_random = summarise_variants(runs, "random")
    to_complement = summarise_variants(runs, COMPLEMENT.label)
    numbers: dict[str, Any] = {
        "summary": summary_numbers(to_random),
        "scenarios": {name: [where, *changes] for name, (where, changes, _) in declared.items()},
    }
    tables = []
    for name, (_, _, title) in declared.items():
        head = ["", "mean accuracy, − Rand", "− complement", "bytes / Rand's"]
        rows = difference_rows({name: to_random[name]}, "random")
        for row, s in zip(rows, to_complement[name].selectors, strict=True):
            row.insert(2, paired_accuracy(s))
        shares = {label: _noisy_share(of_label) for label, of_label in runs[name].items()}
        if None not in shares.values():
            numbers["picks_of_noisy_clients"] = shares
            head.append("picks of noisy clients")
            for row, share in zip(rows, shares.values(), strict=True):
                row.append(f"{share:.1%}")
        tables.append(markdown(f"{plan.dataset}, {title}, {plan.seeds_text}", head, rows))
    numbers["mean_accuracy_paired_to_complement"] = accuracy_differences(to_complement)
    titles = {name: title for name, (_, _, title) in declared.items()}
    yield Result(numbers, tables, difference_draw(plan, to_random, "Rand", titles))


def _noisy_share(runs: Sequence[RunRecord]) -> float | None:
    """The share of all picks that went to clients with random labels; None where there are none."""
    hits = picks = 0
    for run in runs:
        config = run.header["config"]
        share, clients = config["data"].get("noisy_clients"), config["partition"]["clients"]
        if not share:
            return None
        noisy = noisy_clients(clients, share, stream(run.header["seed"], LABEL_NOISE))
        chosen = chosen_clients(run)
        hits, picks = hits + int(np.isin(chosen, noisy).sum()), picks + len(chosen)
    return hits / max(picks, 1)


LIMITS = Study(_limits, _limit_scenarios, _limit_variants)

# --- fairness -------------------------------------------------------------------------------------

HEAD = [
    "accuracy on own training data",
    "worst tenth of the clients",
    "− Rand",
    "all clients",
    "chosen: most / mean / least often",
]
ORDER = "clients ordered within each run by how often they were chosen, mean over seeds"


def _fairness(plan: Plan, runs: Runs) -> Iterator[Result]:
    """How often each client is chosen, and the last model's accuracy on its own training data."""
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
    panels = {
        setting: {label: count.tolist() for label, count in by_label.items()}
        for setting, by_label in counts.items()
    }
    draw = partial(frequencies, panels, f"{plan.dataset}, {plan.seeds_text}; {ORDER}")
    yield Result({"settings": numbers}, tables, draw)


FAIRNESS = Study(_fairness, paper_scenarios, always(*MAIN_THREE))


def _accuracy_by_client(plan: Plan, runs: Runs) -> dict[str, dict[str, list[FloatArray]]]:
    """Setting -> variant -> for each seed, (N,) the last model's accuracy on each client's data."""
    accuracies: dict[str, dict[str, list[FloatArray]]] = {
        setting: {label: [] for label in by_label} for setting, by_label in runs.items()
    }
    with plan.progress("models measured", len(runs) * len(plan.seeds)) as update:
        done = 0
        for setting, by_label in runs.items():
            experiment = build_experiment(plan, paper_scenario(plan, setting))
            for i, seed in enumerate(plan.seeds):
                engine = build_simulation(experiment, seed).engine
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
