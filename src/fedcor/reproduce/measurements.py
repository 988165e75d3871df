"""The experiments that look inside a round: normality, stationarity, the map of clients; and the toy experiment."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedcor.analysis.candidates import loss_changes
from fedcor.analysis.embedding import chance_purity, project, purity
from fedcor.analysis.normality import principal_components
from fedcor.analysis.stationarity import cosine_similarity, expected_similarity
from fedcor.analysis.toy import play
from fedcor.build import build_simulation
from fedcor.experiment import Experiment
from fedcor.files import save_arrays
from fedcor.processes import for_each
from fedcor.progress import refresh
from fedcor.reproduce.paper import STATIONARITY_BOUND
from fedcor.reproduce.plan import Plan
from fedcor.rng import stream
from fedcor.selectors.base import uniform
from fedcor.selectors.fedcor import FedCor
from fedcor.simulate import Simulation, SimulationState
from fedcor.types import FloatArray, IntArray

__all__ = ["embedding", "normality", "stationarity", "toy"]

COMPONENTS = 5  # principal components shown


def normality(plan: Plan) -> list[Path]:
    """Loss changes of random selections in the last round of the warm-up, component by component."""
    from fedcor.report.figures import histograms, save_figure

    folder = plan.out / "measured" / f"normality-{plan.selections}"
    jobs = []
    for setting in plan.settings:
        experiment = plan.experiment(setting)
        last = _fedcor(experiment).warmup - 1
        jobs.append(
            (
                experiment,
                plan.seeds[0],
                [last],
                plan.selections,
                folder / f"{experiment.name}-seed-{plan.seeds[0]}",
            )
        )
    _measure(plan, jobs)
    panels: dict[str, list[dict[str, Any]]] = {}
    for setting, (_, _, (last,), _, where) in zip(plan.settings, jobs, strict=True):
        components = principal_components(_read(where, last), COMPONENTS)
        panels[setting] = [
            {**dataclasses.asdict(component), "scores": component.scores.round(3).tolist()}
            for component in components
        ]
    saved = plan.save("normality", {"selections": plan.selections, "components": panels})
    where_from = f"{plan.dataset}, seed {plan.seeds[0]}, last round of the warm-up"
    caption = f"{where_from}, {plan.selections} random selections; line: Gaussian"
    return [
        saved,
        *save_figure(histograms(panels, caption), plan.out / f"normality-{plan.dataset}"),
    ]


def stationarity(plan: Plan) -> list[Path]:
    """Cosine similarity of the covariances Δt rounds apart, over a whole run of random selection."""
    from fedcor.report.figures import save_figure, similarities

    folder = plan.out / "measured" / f"stationarity-{plan.selections}"
    jobs = []
    for setting in plan.settings:
        experiment = plan.experiment(setting, "random")
        step = _fedcor(plan.experiment(setting)).interval
        rounds = list(range(0, experiment.training.rounds, step))
        jobs.append(
            (
                experiment,
                plan.seeds[0],
                rounds,
                plan.selections,
                folder / f"{experiment.name}-seed-{plan.seeds[0]}",
            )
        )
    _measure(plan, jobs)
    series: dict[str, dict[str, list[float]]] = {}
    for setting, (_, _, rounds, _, where) in zip(plan.settings, jobs, strict=True):
        measured = [_read(where, t) for t in rounds]
        covariances = [np.cov(changes, rowvar=False) for changes in measured]
        correlations = [
            np.asarray(np.corrcoef(changes, rowvar=False)) for changes in measured
        ]  # without the sizes
        series[setting] = {
            "round": [float(t) for t in rounds[1:]],
            "similarity": [
                round(cosine_similarity(a, b), 5) for a, b in itertools.pairwise(covariances)
            ],
            "correlation": [
                round(cosine_similarity(a, b), 5) for a, b in itertools.pairwise(correlations)
            ],
            "noise_round": [float(t) for t in rounds],
            "noise": [round(expected_similarity(changes), 5) for changes in measured],
        }
    lowest = {setting: min(numbers["similarity"]) for setting, numbers in series.items()}
    bound = STATIONARITY_BOUND[plan.dataset]
    saved = plan.save(
        "stationarity",
        {"selections": plan.selections, "minimum": lowest, "paper": bound, "series": series},
    )
    caption = (
        f"{plan.dataset}, seed {plan.seeds[0]}, {plan.selections} selections a round; "
        "thin: two halves of one round's samples, what sampling noise alone leaves"
    )
    return [
        saved,
        *save_figure(
            similarities(series, bound, caption), plan.out / f"stationarity-{plan.dataset}"
        ),
    ]


def embedding(plan: Plan) -> list[Path]:
    """The clients' embeddings after the warm-up, one label a client; label purity of nearest neighbours against chance."""
    from fedcor.report.figures import client_map, save_figure

    experiment = plan.experiment("1spc")
    results = []
    with plan.progress("embedding", len(plan.seeds)) as update:
        for done, seed in enumerate(plan.seeds, start=1):
            simulation = build_simulation(experiment, seed)
            progress = _at(simulation, _fedcor(experiment).warmup)
            labels = simulation.engine.majority_labels()
            X = progress.selector["embedding"]
            neighbours = max(
                1, round(len(labels) / len(np.unique(labels))) - 1
            )  # as many as hold the same label
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
    first = results[0]
    saved = plan.save("embedding", {"results": results})
    caption = (
        f"{plan.dataset} 1SPC, seed {first['seed']}, after the warm-up; share of each client's {first['neighbours']} nearest "
        f"with its label: {first['purity']:.2f}, chance {first['chance']:.2f}"
    )
    picture = client_map(first["points"], first["labels"], caption)
    return [saved, *save_figure(picture, plan.out / f"embedding-{plan.dataset}")]


def toy(plan: Plan) -> list[Path]:
    """The two-client toy experiment: the picture of one seed, the numbers of twenty."""
    from fedcor.report.figures import save_figure, toy_picture

    games = {seed: play(seed) for seed in range(1, 21)}
    first = games[1]
    picture = {
        "samples": first.samples.round(4).tolist(),
        "labels": first.labels.tolist(),
        "start_loss": first.start_loss,
        "random_loss": first.random_loss,
        "choices": {
            name: {
                "clients": c.clients.tolist(),
                "model": c.model.tolist(),
                "global_loss": c.global_loss,
            }
            for name, c in first.choices.items()
        },
    }
    ratios = {
        name: [
            game.choices[name].global_loss / game.choices["Opt"].global_loss
            for game in games.values()
        ]
        for name in ("Ind", "Cor")
    }
    ratios["Random"] = [
        game.random_loss / game.choices["Opt"].global_loss for game in games.values()
    ]
    numbers = {
        "seed_1": picture,
        "loss_relative_to_opt_seeds_1_to_20": {
            k: [round(v, 4) for v in vs] for k, vs in ratios.items()
        },
    }
    saved = plan.save("toy", numbers, of_dataset=False)
    losses = (
        f"global loss before {first.start_loss:.3f}, mean over all pairs {first.random_loss:.3f}"
    )
    caption = f"40 clients, one sample each, two train; {losses}"
    return [saved, *save_figure(toy_picture(picture, caption), plan.out / "toy")]


def _fedcor(experiment: Experiment) -> FedCor:
    selector = dataclasses.replace(experiment, selector="fedcor").build_selector()
    assert isinstance(selector, FedCor)
    return selector


def _at(
    simulation: Simulation, round: int, progress: SimulationState | None = None
) -> SimulationState:
    """Where the federation stands at the start of `round`, from `progress` on."""
    progress = progress or simulation.start
    for _, reached in simulation.run(round, progress):
        progress = reached
    return progress


_Job = tuple[Experiment, int, Sequence[int], int, Path]


def _measure(plan: Plan, jobs: Sequence[_Job]) -> None:
    """Every job's rounds, as far as they are not measured yet, one process a setting."""
    wanted = [path for *_, rounds, _, folder in jobs for path in (_file(folder, t) for t in rounds)]
    missing = [job for job in jobs if not all(_file(job[4], t).exists() for t in job[2])]
    with plan.progress("rounds measured", len(wanted)) as update:
        with refresh(lambda: update(sum(path.exists() for path in wanted), "")):
            for _ in for_each(_measure_run, missing, plan.jobs):
                pass


def _measure_run(job: _Job) -> None:
    """Follow a run of random selection, and measure the loss changes of `selections` random selections in each of `rounds`."""
    torch.set_num_threads(1)
    experiment, seed, rounds, selections, folder = job
    simulation = build_simulation(dataclasses.replace(experiment, selector="random"), seed)
    progress = simulation.start
    for t in rounds:
        progress = _at(simulation, t, progress)
        if _file(folder, t).exists():
            continue
        rate = simulation.learning_rate.at(t)
        chosen = _random_selections(
            seed,
            t,
            simulation.engine.population.count,
            experiment.training.clients_per_round,
            selections,
        )
        changes = loss_changes(simulation.engine, progress.model, t, rate, chosen)
        save_arrays(_file(folder, t), {"changes": changes})


def _random_selections(
    seed: int, round: int, clients: int, count: int, selections: int
) -> IntArray:
    rng = stream(seed, "measured selections", round)
    return np.array([uniform(rng, np.arange(clients), count) for _ in range(selections)])


def _file(folder: Path, round: int) -> Path:
    return folder / f"round-{round}.npz"


def _read(folder: Path, round: int) -> FloatArray:
    with np.load(_file(folder, round), allow_pickle=False) as archive:
        changes: FloatArray = archive["changes"]
    return changes
