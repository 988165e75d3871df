"""Figures of what is measured within rounds: loss changes, embeddings, the toy experiment.

Every function takes numbers that were computed and saved before, and returns a matplotlib Figure.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedcor.reporting.plots import (
    PALETTE,
    Figure,
    line_style,
    panel_row,
    setting_title,
    write_caption,
)


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


def toy_picture(toy: Mapping[str, Any], caption: str) -> Figure:
    """The clients, the three choices of two, and the line that each choice's model draws."""
    figure, (ax,) = panel_row(1, width=5.6, height=4.8)
    samples, labels = np.asarray(toy["samples"]), np.asarray(toy["labels"])
    for sign, marker, name in ((1, "+", "label +1"), (-1, "_", "label −1")):
        mine = samples[labels == sign]
        ax.scatter(
            mine[:, 0], mine[:, 1], marker=marker, s=55, color="#555555", linewidth=1.4, label=name
        )
    low, high = samples.min(axis=0) - 0.5, samples.max(axis=0) + 0.5
    across = np.linspace(low[0], high[0], 2)
    marks = {"Ind": ("s", PALETTE[1]), "Cor": ("o", PALETTE[0]), "Opt": ("^", PALETTE[2])}
    for (name, choice), style, size in zip(
        toy["choices"].items(), (":", "-", "--"), (190, 150, 110), strict=True
    ):
        marker, colour = marks[name]
        chosen = samples[choice["clients"]]
        slope_x, slope_y, bias = choice["model"]
        ax.scatter(
            chosen[:, 0],
            chosen[:, 1],
            marker=marker,
            s=size,
            facecolor="none",
            edgecolor=colour,
            linewidth=1.8,
        )
        ax.plot(
            across,
            -(bias + slope_x * across) / slope_y,
            style,
            color=colour,
            linewidth=1.7,
            marker=marker,
            markersize=6,
            markerfacecolor="none",
            label=f"{name}: global loss {choice['global_loss']:.3f}",
        )
    ax.set_xlim(low[0], high[0])
    ax.set_ylim(low[1], high[1])
    ax.set_xlabel("first coordinate")
    ax.set_ylabel("second coordinate")
    ax.legend(fontsize=8, loc="upper left", framealpha=0.9)
    write_caption(figure, caption)
    return figure
