"""The figure: in each scenario, how far every pair is from random."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedcor.reporting.plots import PALETTE, Figure, line_style, panel_row, write_caption
from studies.memory.runs import EVERYONE, OURS

# Label -> colour and marker. Selectors have the colours that they have elsewhere.
_LOOKS = {
    "power-of-choice": (line_style("power_of_choice", 0)["color"], "v"),
    "FedCor": (line_style("fedcor", 0)["color"], "s"),
    "complement": (line_style("complement", 0)["color"], "^"),
    "random + FedVARP": (PALETTE[5], "X"),
    "round-robin + FedVARP": (PALETTE[2], "P"),
    OURS.label: ("#000000", "D"),
    EVERYONE.label: (line_style("full", 0)["color"], "o"),
}
WIDTH = 6.4  # inches: about 1000 pixels
ROW = 0.066  # inches per pair


def draw(rows: Mapping[str, Mapping[str, Mapping[str, Any]]], caption: str) -> Figure:
    """Dots with intervals: rows[scenario][pair] has `mean`, `low`, `high` of a difference."""
    labels = [label for label in _LOOKS if any(label in pairs for pairs in rows.values())]
    height = 1.6 + ROW * (len(labels) + 2) * len(rows)
    figure, (ax,) = panel_row(1, WIDTH, height)
    ax.axvline(0, color="black", linewidth=0.8)
    for place in range(1, len(rows), 2):
        ax.axhspan(place - 0.5, place + 0.5, color="#000000", alpha=0.04, linewidth=0)
    for i, label in enumerate(labels):
        _draw_pair(ax, label, [pairs.get(label) for pairs in rows.values()], _offset(i, labels))
    ax.set_yticks(range(len(rows)), list(rows))
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.grid(visible=False, axis="y")
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel("mean accuracy, difference to random")
    figure.legend(fontsize=8.5, loc="outside upper center", ncols=3, frameon=False)
    write_caption(figure, caption)
    return figure


def _offset(i: int, labels: Sequence[str]) -> float:
    """Where the i-th pair stands within a scenario's row."""
    return (i - (len(labels) - 1) / 2) / (len(labels) + 2)


def _draw_pair(
    ax: Any, label: str, numbers: Sequence[Mapping[str, Any] | None], offset: float
) -> None:
    colour, marker = _LOOKS[label]
    ours = label == OURS.label
    shown = [(y + offset, n) for y, n in enumerate(numbers) if n and n["mean"] is not None]
    for y, n in shown:
        if n["low"] is not None:
            ax.plot([n["low"], n["high"]], [y, y], color=colour, linewidth=1.6, alpha=0.6)
    ax.plot(
        [n["mean"] for _, n in shown],
        [y for y, _ in shown],
        linestyle="none",
        marker=marker,
        color=colour,
        markersize=5.5 if ours else 4.5,
        label=label,
        zorder=3 if ours else 2,
    )
