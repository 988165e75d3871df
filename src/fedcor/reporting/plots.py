"""Plots of runs: a measure against rounds, bytes or time, with bands over seeds; how figures look.

The palette is Okabe and Ito's, which colour-blind readers can tell apart, with two colours of
Tol's; each series has a line style of its own, so that a figure can be read in grey as well.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedcor.core.config import check_at_least, check_one_of
from fedcor.core.errors import ConfigError, MissingExtraError, RecordError
from fedcor.core.files import write_whole
from fedcor.core.text import BYTE_UNITS, TIME_UNITS, for_figure, unit_for
from fedcor.core.types import FloatArray
from fedcor.reporting.curves import SeedMeans, seed_means
from fedcor.reporting.metrics import percent
from fedcor.reporting.series import short_names
from fedcor.reporting.summary import ExperimentSummary, every_curve, ranking

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Figure
except ImportError as error:
    raise MissingExtraError("matplotlib", "plot") from error


PALETTE = ["#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442"]
_LOOKS: dict[str, tuple[str, Any]] = {  # colour and line of a selector
    "fedcor": ("#D55E00", "-"),
    "random": ("#000000", ":"),
    "afl": ("#009E73", "-."),
    "power_of_choice": ("#0072B2", "--"),
    "oort": ("#117733", "-."),
    "complement": ("#CC79A7", "-"),
    "aligned": ("#332288", "--"),
    "aligned + FedRecall": ("#332288", "-"),
    "round_robin": ("#882255", ":"),
    "full": ("#999999", (0, (6, 1))),
}


class Plot(Figure):
    """A matplotlib figure that a notebook shows as it is, whether or not pyplot is in use."""

    def _repr_png_(self) -> bytes:
        content = io.BytesIO()
        self.savefig(content, format="png", dpi=110)
        return content.getvalue()


def panel_row(panels: int, width: float = 3.6, height: float = 3.0) -> tuple[Plot, list[Axes]]:
    """A figure with `panels` panels side by side, each `width` by `height` inches."""
    figure = Plot(figsize=(width * panels, height), layout="constrained")
    axes = [figure.add_subplot(1, panels, i + 1) for i in range(panels)]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25, linewidth=0.6)
    return figure, axes


def write_caption(figure: Figure, caption: str) -> None:
    """Below the figure: what it shows and from what, in lines that fit."""
    text = textwrap.fill(caption, width=int(17 * figure.get_figwidth()))
    figure.supxlabel(text, fontsize=7.5, color="#444444")


def line_style(label: str, i: int) -> dict[str, Any]:
    """Colour and line of a series: a selector's own, else those of the i-th series."""
    used = [colour for colour, _ in _LOOKS.values()]
    free = [colour for colour in PALETTE if colour not in used]
    colour, line = _LOOKS.get(label, (free[i % len(free)], ["-", "--", ":", "-."][i % 4]))
    return {"color": colour, "linestyle": line}


# --- plots of runs --------------------------------------------------------------------------------

# What a measure is drawn against -> the label of the axis, and its units.
AXES: dict[str, tuple[str, Any]] = {
    "rounds": ("communication round", None),
    "bytes": ("down and up", BYTE_UNITS),
    "seconds": ("seconds", None),
    "time": ("of simulated time", TIME_UNITS),
}
# Without a date, the same numbers give the same file.
FORMATS: dict[str, dict[str, Any]] = {
    "png": {"dpi": 160},
    "svg": {"metadata": {"Date": None}},
    "pdf": {"metadata": {"CreationDate": None}},
}


def cannot_draw(experiment: ExperimentSummary) -> str:
    """Why there is nothing to draw; empty where there is, and before the first round."""
    begun = [curve for curve in every_curve(experiment.curves) if curve.done]
    if not begun or any(np.isfinite(curve.of(experiment.measure)).any() for curve in begun):
        return ""
    return f"{experiment.name} cannot be drawn: no round has a value of {experiment.measure}"


def plot_experiment(
    experiment: ExperimentSummary,
    xs: Sequence[str] | None = None,
    smooth: int | None = None,
) -> Plot:
    """A panel for each of `xs`, one curve per selector: the mean over seeds, with a band from the
    lowest to the highest seed.

    Args:
        experiment: as `summarise` gives it
        xs: what the measure is drawn against: `rounds`, `bytes`, `seconds` (that the run took) or
            `time` (simulated); None for rounds, bytes, and time where it was simulated
        smooth: rounds in each point, itself and those before it; None for a twentieth of the
            rounds, at most 10

    Raises:
        RecordError: No run was ever measured, or time was not simulated.
    """
    if xs is None:
        xs = ("rounds", "bytes", "time") if experiment.has_clock else ("rounds", "bytes")
    if why := cannot_draw(experiment):
        raise RecordError(why)
    for x in xs:
        check_one_of("x", x, AXES)
        if x == "time" and not experiment.has_clock:
            raise RecordError(
                f"{experiment.name} has no simulated time: set faults.devices, and run it again"
            )
    short = short_names((s.name for s in experiment.selectors), 24)
    names = {name: for_figure(shown) for name, shown in short.items()}
    # A panel is 3.6 inches wide, and the legend as wide as its longest name.
    legend = 0.7 + 0.075 * max(map(len, names.values()))
    figure, axes = panel_row(len(xs), 3.6 + legend / len(xs), 3.2)
    window = experiment.smoothing if smooth is None else smooth
    check_at_least("smooth", window, 1)
    means = {
        name: seed_means(experiment.curves[name], experiment.measure, window)
        for name in ranking(experiment)
    }
    for ax, x in zip(axes, xs, strict=True):
        _draw(ax, experiment, means, names, x)
    axes[0].set_ylabel(for_figure(experiment.measure_title, 60))
    handles, labels = axes[0].get_legend_handles_labels()
    if handles:
        # Outside, where it hides no curve.
        figure.legend(handles, labels, fontsize=8, loc="outside right center", frameon=False)
    write_caption(figure, _caption(experiment, means, window))
    return figure


def check_format(path: Path) -> str:
    """The format that the end of a file's name stands for; another is refused."""
    kind = path.suffix.removeprefix(".").lower()
    if kind not in FORMATS:
        endings = ", ".join(f".{name}" for name in FORMATS)
        raise ConfigError("plot", str(path), f"must end in one of {endings}")
    return kind


def save_plot(figure: Figure, path: Path) -> None:
    """Write a figure as a whole; the end of the name says in which format.

    Args:
        figure: as `plot_experiment` gives it
        path: a `.png`, `.svg` or `.pdf`
    """
    kind = check_format(path)
    content = io.BytesIO()
    figure.savefig(content, format=kind, **FORMATS[kind])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content.getvalue())


def _draw(
    ax: Axes,
    experiment: ExperimentSummary,
    means: dict[str, SeedMeans],
    names: dict[str, str],
    x: str,
) -> None:
    """One panel."""
    label, units = AXES[x]
    across: dict[str, FloatArray] = {name: getattr(mean, x) for name, mean in means.items()}
    scale, unit = 1.0, ""
    if units:
        most = max((float(xs[-1]) for xs in across.values() if len(xs)), default=0.0)
        scale, unit = unit_for(most, units)
    places = [s.name for s in experiment.selectors]  # a selector keeps its look
    for name, mean in means.items():
        known = np.isfinite(mean.mean)  # rounds that were not measured are bridged
        if not known.any():
            continue
        look = line_style(name, places.index(name))
        few: dict[str, Any] = {"marker": "o", "markersize": 3} if known.sum() < 3 else {}
        xs = across[name][known] / scale
        ax.plot(xs, mean.mean[known], label=names[name], linewidth=1.5, **few, **look)
        low, high = mean.low[known], mean.high[known]
        ax.fill_between(xs, low, high, color=look["color"], alpha=0.15, linewidth=0)
    if experiment.target is not None:
        ax.axhline(experiment.target, color="grey", linewidth=0.8)
        look = {"va": "top", "ha": "right", "fontsize": 7, "color": "grey"}
        text = f"target {percent(experiment.target)}"
        ax.text(0.99, experiment.target, text, transform=ax.get_yaxis_transform(), **look)
    ax.set_xlabel(f"{unit} {label}".strip())


def _caption(experiment: ExperimentSummary, means: dict[str, SeedMeans], window: int) -> str:
    fewest, most = (pick(mean.seeds for mean in means.values()) for pick in (min, max))
    seeds = f"{most}" if fewest == most else f"{fewest} to {most}"
    parts = [
        for_figure(experiment.name),
        f"mean over {seeds} {'seed' if most == 1 else 'seeds'}",
        "band: lowest to highest seed" if most > 1 else "",
        f"{window}-round means" if window > 1 else "",
        "" if experiment.finished else "not finished: up to the round that all seeds have",
    ]
    return "; ".join(filter(None, parts))
