"""Studies that look inside a round: normality, stationarity, and the map of clients.

Normality (Appendix D.2): are the loss changes of random selections Gaussian? The paper's test looks
at their principal components, one by one. Stationarity (Appendix D.3): how much does their
covariance move between rounds? The map (Sec. 5.5): do embeddings show which clients hold the same
label?
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from scipy import stats

from fedcor.core.errors import ConfigError, MissingExtraError
from fedcor.core.rng import stream_seed
from fedcor.core.types import FloatArray, IntArray
from fedcor.reporting.plots import (
    PALETTE,
    Figure,
    line_style,
    panel_row,
    write_caption,
)
from fedcor.simulation.build import build_simulation
from studies.loss_changes import Measurement, advance, measure, plan_measurement
from studies.plan import Plan
from studies.runs import build_experiment, preset_fedcor
from studies.scaffold import RANDOM, Result, Runs, Study, paper_scenario
from studies.tables import setting_title

COMPONENTS = 5  # principal components shown
# Sec. 4.5: "the similarity keeps very high (> 0.97 for FMNIST and > 0.95 for CIFAR-10)".
STATIONARITY_BOUND = {"fmnist": 0.97, "cifar10": 0.95, "digits": 0.97}

# --- normality ------------------------------------------------------------------------------------


def _normality(plan: Plan, runs: Runs) -> Iterator[Result]:
    """Loss changes of random selections in the last warm-up round, component by component."""
    measurements = []
    for setting in plan.settings:
        last = preset_fedcor(plan, setting).warmup - 1
        experiment = build_experiment(plan, paper_scenario(plan, setting))
        measurements.append(plan_measurement(plan, "normality", experiment, [last]))
    measure(plan, measurements)
    panels: dict[str, list[dict[str, Any]]] = {}
    for setting, measurement in zip(plan.settings, measurements, strict=True):
        changes = measurement.read(measurement.rounds[0])
        panels[setting] = [
            {**dataclasses.asdict(component), "scores": component.scores.round(3).tolist()}
            for component in principal_components(changes, COMPONENTS)
        ]
    source = f"{plan.dataset}, seed {plan.seeds[0]}, last round of the warm-up"
    caption = f"{source}, {plan.selections} random selections; line: Gaussian"
    yield Result(
        {"selections": plan.selections, "components": panels},
        draw=partial(histograms, panels, caption),
    )


NORMALITY = Study(_normality)


@dataclass(frozen=True)
class Component:
    """One principal component of the loss changes, and how far it is from a Gaussian.

    Attributes:
        scores: `(m,)` with mean 0 and standard deviation 1.
        share: Its fraction of the total variance.
        skewness: 0 for a Gaussian.
        excess_kurtosis: 0 for a Gaussian.
        distance: Kolmogorov-Smirnov: the largest gap between the two distribution functions.
        statistic: D'Agostino and Pearson's K^2, of skewness and kurtosis together; for a Gaussian,
            chi-squared with 2 degrees of freedom.
        p_value: Of `statistic`.
    """

    scores: FloatArray
    share: float
    skewness: float
    excess_kurtosis: float
    distance: float
    statistic: float
    p_value: float


def principal_components(changes: FloatArray, count: int) -> list[Component]:
    """The first `count` components of the loss changes `(m, N)`, largest variance first."""
    centred = changes - changes.mean(axis=0)
    left, singular, _ = np.linalg.svd(centred, full_matrices=False)
    share = singular**2 / np.sum(singular**2)
    components = []
    for j in range(min(count, len(singular))):
        scores = left[:, j] / left[:, j].std()
        # The sign of a component is arbitrary: the longer tail points right.
        scores *= np.sign(stats.skew(scores)) or 1.0
        test = stats.normaltest(scores)
        components.append(
            Component(
                scores,
                float(share[j]),
                float(stats.skew(scores)),
                float(stats.kurtosis(scores)),
                float(stats.kstest(scores, "norm").statistic),
                float(test.statistic),
                float(test.pvalue),
            )
        )
    return components


def histograms(panels: Mapping[str, Sequence[Mapping[str, Any]]], caption: str) -> Figure:
    """Principal components beside a Gaussian: panels[setting] has, for each component, `scores`,
    `share`, `skewness` and `excess_kurtosis`."""
    columns = max(len(components) for components in panels.values())
    figure = Figure(figsize=(2.3 * columns, 2.2 * len(panels) + 0.3), layout="constrained")
    grid = figure.subplots(len(panels), columns, squeeze=False)
    line = np.linspace(-4, 4, 200)
    density = np.exp(-0.5 * line**2) / np.sqrt(2 * np.pi)
    for row, (setting, components) in zip(grid, panels.items(), strict=True):
        for ax, component in itertools.zip_longest(row, components):
            if component is None:
                ax.set_visible(False)
                continue
            ax.hist(
                component["scores"],
                bins=40,
                range=(-4, 4),
                density=True,
                color=PALETTE[5],
                edgecolor="white",
                linewidth=0.3,
            )
            ax.plot(line, density, color=PALETTE[0], linewidth=1.4)
            ax.set_title(
                f"{component['share']:.1%} of variance\n"
                f"skew {component['skewness']:.2f}, kurtosis {component['excess_kurtosis']:+.2f}",
                fontsize=7.5,
            )
            ax.spines[["top", "right"]].set_visible(False)
            ax.tick_params(labelsize=7)
        row[0].set_ylabel(f"{setting}\ndensity", fontsize=8)
    for ax in grid[-1]:
        ax.set_xlabel("standardised component", fontsize=8)
    write_caption(figure, caption)
    return figure


# --- stationarity ---------------------------------------------------------------------------------


def _stationarity(plan: Plan, runs: Runs) -> Iterator[Result]:
    """Cosine similarity of covariances Δt rounds apart, over a whole run of random selection."""
    measurements = []
    for setting in plan.settings:
        experiment = build_experiment(plan, paper_scenario(plan, setting), RANDOM)
        step = preset_fedcor(plan, setting).interval
        rounds = list(range(0, experiment.rounds, step))
        if len(rounds) < 2:
            allowed = f"must be more than {step}: covariances {step} rounds apart are compared"
            raise ConfigError("rounds", experiment.rounds, allowed)
        measurements.append(plan_measurement(plan, "stationarity", experiment, rounds))
    measure(plan, measurements)
    series = {
        setting: _similarity_over_rounds(measurement)
        for setting, measurement in zip(plan.settings, measurements, strict=True)
    }
    lowest = {setting: min(numbers["similarity"]) for setting, numbers in series.items()}
    bound = STATIONARITY_BOUND[plan.dataset]
    caption = (
        f"{plan.dataset}, seed {plan.seeds[0]}, {plan.selections} selections a round; "
        "thin: two halves of one round's samples, what sampling noise alone leaves"
    )
    yield Result(
        {"selections": plan.selections, "minimum": lowest, "paper": bound, "series": series},
        draw=partial(similarities, series, bound, caption),
    )


STATIONARITY = Study(_stationarity)


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


def cosine_similarity(A: FloatArray, B: FloatArray) -> float:
    """tr(A'B) / sqrt(tr(A'A) tr(B'B)) of two matrices; the paper's formula omits the root."""
    return float(np.sum(A * B) / np.sqrt(np.sum(A * A) * np.sum(B * B)))


def expected_similarity(changes: FloatArray) -> float:
    """The similarity that sampling noise alone leaves: of the covariances of two halves of a round.

    Each half has half the samples, so the estimate is too low rather than too high: a similarity
    above it shows no change at all.

    Args:
        changes: `(m, N)` loss changes of the selections of one round.
    """
    half = len(changes) // 2
    return cosine_similarity(
        np.cov(changes[:half], rowvar=False), np.cov(changes[half:], rowvar=False)
    )


def similarities(
    series: Mapping[str, Mapping[str, Sequence[float]]], reference: float, caption: str
) -> Figure:
    """Cosine similarity of covariances: series[setting] has `similarity` by `round`, and what
    sampling noise leaves of it, `noise` by `noise_round`; `reference` is the paper's bound."""
    figure, (ax,) = panel_row(1, width=6.4, height=3.4)
    for i, (setting, numbers) in enumerate(series.items()):
        look = line_style("", i)
        ax.plot(
            numbers["round"],
            numbers["similarity"],
            marker="o",
            markersize=2.5,
            linewidth=1.2,
            label=setting_title(setting),
            **look,
        )
        ax.plot(
            numbers["noise_round"], numbers["noise"], color=look["color"], linewidth=0.7, alpha=0.5
        )
    ax.axhline(reference, color="grey", linewidth=0.8)
    ax.text(
        0.99,
        reference,
        "the paper's bound ",
        ha="right",
        va="bottom",
        fontsize=7,
        color="grey",
        transform=ax.get_yaxis_transform(),
    )
    ax.set_xlabel("communication round")
    ax.set_ylabel("cosine similarity of covariances")
    ax.set_ylim(top=1.005)
    ax.legend(fontsize=8, loc="lower right")
    write_caption(figure, caption)
    return figure


# --- the map of clients ---------------------------------------------------------------------------


def _embedding(plan: Plan, runs: Runs) -> Iterator[Result]:
    """The clients' embeddings after the warm-up, one label per client: how many of the nearest
    neighbours hold the same label, against chance."""
    experiment = build_experiment(plan, paper_scenario(plan, "1spc"))
    warmup = preset_fedcor(plan, "1spc").warmup
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
    first = results[0]
    caption = (
        f"{plan.dataset} 1SPC, seed {first['seed']}, after the warm-up; "
        f"share of each client's {first['neighbours']} nearest with its label: "
        f"{first['purity']:.2f}, chance {first['chance']:.2f}"
    )
    draw = partial(client_map, first["points"], first["labels"], caption)
    yield Result({"results": results}, draw=draw)


EMBEDDING = Study(_embedding)


def normalised(X: FloatArray) -> FloatArray:
    """The rows of X `(N, d)` scaled to unit length, so that distance reflects correlation."""
    unit: FloatArray = X / np.maximum(np.linalg.norm(X, axis=1, keepdims=True), 1e-12)
    return unit


def purity(X: FloatArray, labels: IntArray, neighbours: int) -> float:
    """How often the nearest neighbours of a client hold its label, from 0 to 1.

    Args:
        X: `(N, d)` client embeddings.
        labels: `(N,)` the label that each client holds.
        neighbours: How many nearest neighbours (by correlation) of each client count.
    """
    similarity = normalised(X) @ normalised(X).T
    np.fill_diagonal(similarity, -np.inf)
    nearest = np.argsort(-similarity, axis=1)[:, :neighbours]  # (N, k)
    return float(np.mean(labels[nearest] == labels[:, None]))


def chance_purity(labels: IntArray) -> float:
    """The expected purity of neighbours drawn at random."""
    same = labels[:, None] == labels
    return float((same.sum() - len(labels)) / (len(labels) * (len(labels) - 1)))


def project(X: FloatArray, seed: int) -> FloatArray:
    """(N, 2) t-SNE of the normalised embeddings X `(N, d)`; the same for the same seed."""
    try:
        from sklearn.manifold import TSNE
    except ImportError as error:
        raise MissingExtraError("scikit-learn", "sim") from error

    tsne = TSNE(
        perplexity=min(10.0, (len(X) - 1) / 3),
        init="pca",
        random_state=stream_seed(seed, "t-SNE") % 2**32,
        n_jobs=1,
    )
    points: FloatArray = tsne.fit_transform(normalised(X)).astype(np.float64)
    return points


def client_map(points: Sequence[Sequence[float]], labels: Sequence[int], caption: str) -> Figure:
    """Clients in the plane, coloured by the label they hold, which stands beside each cluster."""
    figure, (ax,) = panel_row(1, width=5.2, height=4.6)
    place, label = np.asarray(points), np.asarray(labels)
    colours = [*PALETTE[:7], "#999999", "#7B3294", "#A6761D"]
    for value in np.unique(label):
        mine, colour = place[label == value], colours[value % len(colours)]
        ax.scatter(mine[:, 0], mine[:, 1], s=60, color=colour, alpha=0.35, linewidth=0)
        x, y = np.median(mine, axis=0)
        ax.annotate(
            str(value),
            (x, y),
            xytext=(11, 8),
            textcoords="offset points",
            fontsize=10,
            weight="bold",
            color=colour,
        )
    ax.set_xlabel("t-SNE 1")
    ax.set_ylabel("t-SNE 2")
    write_caption(figure, caption)
    return figure
