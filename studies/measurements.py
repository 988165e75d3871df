"""The experiments that look inside a round: normality, stationarity, and the map of clients."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np

from fedcor.core.errors import ConfigError
from fedcor.core.types import FloatArray
from fedcor.reporting.plots import save_figure
from fedcor.simulation.build import build_simulation
from studies.analysis.embedding import chance_purity, project, purity
from studies.analysis.normality import principal_components
from studies.analysis.stationarity import cosine_similarity, expected_similarity
from studies.measured_figures import client_map, histograms, similarities
from studies.measuring import Measurement, advance, measure, plan_measurement
from studies.paper import STATIONARITY_BOUND
from studies.plan import Plan
from studies.variants import preset_fedcor

COMPONENTS = 5  # principal components shown


def normality(plan: Plan) -> list[Path]:
    """Loss changes of random selections in the last warm-up round, component by component."""
    measurements = []
    for setting in plan.settings:
        last = preset_fedcor(plan, setting).warmup - 1
        experiment = plan.experiment(setting)
        measurements.append(plan_measurement(plan, "normality", experiment, [last]))
    measure(plan, measurements)
    panels: dict[str, list[dict[str, Any]]] = {}
    for setting, measurement in zip(plan.settings, measurements, strict=True):
        changes = measurement.read(measurement.rounds[0])
        panels[setting] = [
            {**dataclasses.asdict(component), "scores": component.scores.round(3).tolist()}
            for component in principal_components(changes, COMPONENTS)
        ]
    saved = plan.save("normality", {"selections": plan.selections, "components": panels})
    source = f"{plan.dataset}, seed {plan.seeds[0]}, last round of the warm-up"
    figure = histograms(panels, f"{source}, {plan.selections} random selections; line: Gaussian")
    return [saved, *save_figure(figure, plan.out / f"normality-{plan.dataset}")]


def stationarity(plan: Plan) -> list[Path]:
    """Cosine similarity of covariances Δt rounds apart, over a whole run of random selection."""
    measurements = []
    for setting in plan.settings:
        experiment = plan.experiment(setting, "random")
        step = preset_fedcor(plan, setting).interval
        rounds = list(range(0, experiment.rounds, step))
        if len(rounds) < 2:
            allowed = f"must be more than {step}: covariances {step} rounds apart are compared"
            raise ConfigError("training.rounds", experiment.rounds, allowed)
        measurements.append(plan_measurement(plan, "stationarity", experiment, rounds))
    measure(plan, measurements)
    series = {
        setting: _similarity_over_rounds(measurement)
        for setting, measurement in zip(plan.settings, measurements, strict=True)
    }
    lowest = {setting: min(numbers["similarity"]) for setting, numbers in series.items()}
    bound = STATIONARITY_BOUND[plan.dataset]
    numbers = {"minimum": lowest, "paper": bound, "series": series}
    saved = plan.save("stationarity", {"selections": plan.selections, **numbers})
    caption = (
        f"{plan.dataset}, seed {plan.seeds[0]}, {plan.selections} selections a round; "
        "thin: two halves of one round's samples, what sampling noise alone leaves"
    )
    figure = similarities(series, bound, caption)
    return [saved, *save_figure(figure, plan.out / f"stationarity-{plan.dataset}")]


def _similarity_over_rounds(measurement: Measurement) -> dict[str, list[float]]:
    """Of covariances and of correlations, each round with the one before; and what noise leaves."""
    rounds = measurement.rounds
    measured = [measurement.read(t) for t in rounds]
    covariances = [np.cov(changes, rowvar=False) for changes in measured]
    # Without the sizes of the loss changes.
    correlations = [np.asarray(np.corrcoef(changes, rowvar=False)) for changes in measured]
    return {
        "round": [float(t) for t in rounds[1:]],
        "similarity": _consecutive_similarity(covariances),
        "correlation": _consecutive_similarity(correlations),
        "noise_round": [float(t) for t in rounds],
        "noise": [round(expected_similarity(changes), 5) for changes in measured],
    }


def _consecutive_similarity(matrices: list[FloatArray]) -> list[float]:
    return [round(cosine_similarity(a, b), 5) for a, b in itertools.pairwise(matrices)]


def embedding(plan: Plan) -> list[Path]:
    """The clients' embeddings after the warm-up, one label per client: how many of the nearest
    neighbours hold the same label, against chance."""
    experiment, warmup = plan.experiment("1spc"), preset_fedcor(plan, "1spc").warmup
    results: list[dict[str, Any]] = []
    with plan.progress("embedding", len(plan.seeds)) as update:
        for done, seed in enumerate(plan.seeds, start=1):
            simulation = build_simulation(experiment, seed)
            X = advance(simulation, warmup).selector["embedding"]  # (N, d)
            labels = simulation.engine.majority_labels()
            # As many neighbours as hold the same label.
            neighbours = max(1, round(len(labels) / len(np.unique(labels))) - 1)
            results.append(
                {
                    "seed": seed,
                    "neighbours": neighbours,
                    "purity": purity(X, labels, neighbours),
                    "chance": chance_purity(labels),
                    "labels": labels.tolist(),
                    "points": project(X, seed).round(3).tolist(),
                }
            )
            update(done, "")
    saved = plan.save("embedding", {"results": results})
    first = results[0]
    caption = (
        f"{plan.dataset} 1SPC, seed {first['seed']}, after the warm-up; "
        f"share of each client's {first['neighbours']} nearest with its label: "
        f"{first['purity']:.2f}, chance {first['chance']:.2f}"
    )
    figure = client_map(first["points"], first["labels"], caption)
    return [saved, *save_figure(figure, plan.out / f"embedding-{plan.dataset}")]
