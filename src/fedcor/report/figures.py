"""Numbers to ink. Every function takes what was computed and saved before, and returns a matplotlib Figure; none computes.

One palette (Okabe and Ito's, which colour-blind readers can tell apart) and one line style a series, so that a figure can be
read in grey as well.
"""

from __future__ import annotations

import io
import itertools
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedcor.errors import MissingExtraError
from fedcor.files import write_whole
from fedcor.report.tables import NAMES

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as error:
    raise MissingExtraError("matplotlib", "plot") from error

__all__ = [
    "client_map",
    "curves",
    "differences",
    "frequencies",
    "histograms",
    "save_figure",
    "similarities",
    "toy_picture",
]

PALETTE = ["#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442"]
COLOURS = {
    "fedcor": "#D55E00",
    "random": "#000000",
    "afl": "#009E73",
    "power_of_choice": "#0072B2",
    "complement": "#CC79A7",
    "full": "#999999",
}
STYLES = {
    "fedcor": "-",
    "random": ":",
    "afl": "-.",
    "power_of_choice": "--",
    "complement": "-",
    "full": (0, (6, 1)),
}
TITLES = {
    "2spc": "2SPC: two shards a client",
    "1spc": "1SPC: one shard a client",
    "dir": "Dir: Dirichlet, α = 0.2",
}


def _row(panels: int, width: float = 3.6, height: float = 3.0) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width * panels, height), layout="constrained")
    axes = [figure.add_subplot(1, panels, i + 1) for i in range(panels)]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25, linewidth=0.6)
    return figure, axes


def _say(figure: Figure, caption: str) -> None:
    """What the figure shows of what, below it, in lines that fit."""
    text = textwrap.fill(caption, width=int(17 * figure.get_figwidth()))
    figure.supxlabel(text, fontsize=7.5, color="#444444")


def _look(label: str, i: int) -> dict[str, Any]:
    styles = ["-", "--", ":", "-."]
    free = [colour for colour in PALETTE if colour not in COLOURS.values()]
    return {
        "color": COLOURS.get(label, free[i % len(free)]),
        "linestyle": STYLES.get(label, styles[i % len(styles)]),
    }


def curves(
    panels: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]],
    caption: str,
    target: Mapping[str, float],
) -> Figure:
    """Test accuracy over rounds: panels[setting][series] has `round`, `mean`, `low`, `high`."""
    figure, axes = _row(len(panels), width=3.6 + 1.2 / len(panels))  # and room for the legend
    for ax, (setting, series) in zip(axes, panels.items(), strict=True):
        for i, (label, numbers) in enumerate(series.items()):
            look = _look(label, i)
            ax.plot(
                numbers["round"],
                numbers["mean"],
                label=NAMES.get(label, label),
                linewidth=1.5,
                **look,
            )
            ax.fill_between(
                numbers["round"],
                numbers["low"],
                numbers["high"],
                color=look["color"],
                alpha=0.15,
                linewidth=0,
            )
        if setting in target:
            ax.axhline(target[setting], color="grey", linewidth=0.8)
            ax.text(
                0.01,
                target[setting],
                "target",
                va="bottom",
                fontsize=7,
                color="grey",
                transform=ax.get_yaxis_transform(),
            )
        ax.set_title(TITLES.get(setting, setting), fontsize=10)
        ax.set_xlabel("communication round")
    axes[0].set_ylabel("test accuracy")
    handles, labels = axes[-1].get_legend_handles_labels()
    figure.legend(
        handles, labels, fontsize=8, loc="outside right center", frameon=False
    )  # where it hides no curve
    _say(figure, caption)
    return figure


def histograms(panels: Mapping[str, Sequence[Mapping[str, Any]]], caption: str) -> Figure:
    """Principal components: panels[setting] is a list with `scores`, `share`, `skewness`, `excess_kurtosis`, `p_value`."""
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
    _say(figure, caption)
    return figure


def similarities(
    series: Mapping[str, Mapping[str, Sequence[float]]], reference: float, caption: str
) -> Figure:
    """Cosine similarity of covariances: series[setting] has `round`, `similarity`, `noise`."""
    figure, (ax,) = _row(1, width=6.4, height=3.4)
    for i, (setting, numbers) in enumerate(series.items()):
        look = _look("", i)
        ax.plot(
            numbers["round"],
            numbers["similarity"],
            marker="o",
            markersize=2.5,
            linewidth=1.2,
            label=TITLES.get(setting, setting),
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
    _say(figure, caption)
    return figure


def frequencies(panels: Mapping[str, Mapping[str, Sequence[float]]], caption: str) -> Figure:
    """How often each client was chosen, most chosen first: panels[setting][series] is one number a client."""
    figure, axes = _row(len(panels))
    for ax, (setting, series) in zip(axes, panels.items(), strict=True):
        for i, (label, counts) in enumerate(series.items()):
            ax.step(
                np.arange(1, len(counts) + 1),
                sorted(counts, reverse=True),
                where="mid",
                label=NAMES.get(label, label),
                **_look(label, i),
            )
        ax.set_title(TITLES.get(setting, setting), fontsize=10)
        ax.set_xlabel("client, most chosen first")
        ax.set_ylim(bottom=0)
    axes[0].set_ylabel("times chosen a run")
    axes[-1].legend(fontsize=8)
    _say(figure, caption)
    return figure


def differences(
    panels: Mapping[str, Mapping[str, Mapping[str, Any]]], what: str, caption: str
) -> Figure:
    """Paired differences with their intervals, a row a variant: panels[scenario][variant] has `mean`, `low`, `high`."""
    names = list(dict.fromkeys(name for rows in panels.values() for name in rows))
    width = 2.9 if len(panels) <= 3 else 2.4
    figure, axes = _row(len(panels), width=width, height=1.3 + 0.26 * len(names))
    shown = [row for rows in panels.values() for row in rows.values() if row["mean"] is not None]
    ends = [
        row[key] for row in shown for key in ("mean", "low", "high") if row[key] is not None
    ] + [0.0]
    room = 0.05 * (max(ends) - min(ends)) or 0.1
    for ax, (scenario, rows) in zip(axes, panels.items(), strict=True):
        ax.axvline(0, color="black", linewidth=0.8)
        for y, name in enumerate(names):
            if name not in rows or rows[name]["mean"] is None:
                continue
            mean, low, high = (rows[name][key] for key in ("mean", "low", "high"))
            clear = low is not None and (low > 0 or high < 0)
            colour = "#555555" if not clear else PALETTE[2] if mean > 0 else PALETTE[0]
            if low is not None:
                ax.plot(
                    [low, high],
                    [y, y],
                    color=colour,
                    linewidth=2.2,
                    alpha=0.6,
                    solid_capstyle="butt",
                )
            ax.plot(
                mean,
                y,
                marker="o" if not clear else "^" if mean > 0 else "v",
                color=colour,
                markersize=5,
            )
        ax.set_title(TITLES.get(scenario, scenario), fontsize=9)
        ax.set_yticks(
            range(len(names)),
            [NAMES.get(n, n) for n in names] if ax is axes[0] else [""] * len(names),
        )
        ax.set_ylim(len(names) - 0.5, -0.5)
        ax.set_xlim(min(ends) - room, max(ends) + room)  # one scale, so that panels can be compared
        ax.tick_params(labelsize=8)
    axes[len(axes) // 2].set_xlabel(what)
    _say(figure, f"{caption}; triangles: the interval excludes zero")
    return figure


def client_map(points: Sequence[Sequence[float]], labels: Sequence[int], caption: str) -> Figure:
    """Clients in the plane, coloured by the label they hold; its number stands beside its cluster."""
    figure, (ax,) = _row(1, width=5.2, height=4.6)
    place, label = np.asarray(points), np.asarray(labels)
    colours = [*PALETTE[:7], "#999999", "#7B3294", "#A6761D"]
    for value in np.unique(label):
        mine = place[label == value]
        ax.scatter(
            mine[:, 0],
            mine[:, 1],
            s=60,
            color=colours[value % len(colours)],
            alpha=0.35,
            linewidth=0,
        )
        colour, (x, y) = colours[value % len(colours)], np.median(mine, axis=0)
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
    _say(figure, caption)
    return figure


def toy_picture(toy: Mapping[str, Any], caption: str) -> Figure:
    """The clients, the three choices of two, and the line that each choice's model draws."""
    figure, (ax,) = _row(1, width=5.6, height=4.8)
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
        ax.plot(across, -(bias + slope_x * across) / slope_y, style, color=colour, linewidth=1.7, marker=marker, markersize=6,
                markerfacecolor="none", label=f"{name}: global loss {choice['global_loss']:.3f}")  # fmt: skip
    ax.set_xlim(low[0], high[0])
    ax.set_ylim(low[1], high[1])
    ax.set_xlabel("first coordinate")
    ax.set_ylabel("second coordinate")
    ax.legend(fontsize=8, loc="upper left", framealpha=0.9)
    _say(figure, caption)
    return figure


def save_figure(figure: Figure, stem: Path) -> list[Path]:
    """`stem`.svg and `stem`.png, each written whole; without a date, so that the same numbers give the same file."""
    paths = []
    for suffix, options in ((".svg", {"metadata": {"Date": None}}), (".png", {"dpi": 160})):
        content = io.BytesIO()
        figure.savefig(content, format=suffix[1:], **options)
        write_whole(stem.with_suffix(suffix), content.getvalue())
        paths.append(stem.with_suffix(suffix))
    return paths
