"""The figure of docs/results/scale.md: `python docs/results/scale/draw.py` writes it beside this
file, from growth.json, which `python -m benchmarks.scale --growth docs/results/scale/growth.json`
measures."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib as mpl

from fedcor.reporting.plots import PALETTE, Figure, panel_row

HERE = Path(__file__).parent
LINES = {
    "select": ("choice of C clients", "-", "o"),
    "read": ("reading the embedding C times", "--", "s"),
    "step": ("one step of a refit", ":", "^"),
}
AXES = {
    "N": "clients N\n(C = 10, d = 15)",
    "C": "clients per round C\n(N = 100,000, d = 15)",
    "d": "length of an embedding d\n(N = 100,000, C = 10)",
}


def draw(growth: dict[str, list[dict[str, float]]]) -> Figure:
    """Milliseconds over N, over C and over d, on logarithmic axes."""
    figure, axes = panel_row(3, 3.6, 3.2)
    for ax, (name, label) in zip(axes, AXES.items(), strict=True):
        for i, (key, (what, line, marker)) in enumerate(LINES.items()):
            points = [(p[name], 1e3 * p[key]) for p in growth[name] if key in p]
            if points:
                style = {"color": PALETTE[i], "linestyle": line, "marker": marker}
                ax.loglog(*zip(*points, strict=True), label=what, markersize=4, **style)
        ax.set(xlabel=label)
        if name == "d":
            ax.set_xticks([p["d"] for p in growth["d"]], [str(p["d"]) for p in growth["d"]])
            ax.minorticks_off()
    axes[0].set(ylabel="CPU milliseconds, one thread")
    axes[0].legend(frameon=False, fontsize=8)
    return figure


if __name__ == "__main__":
    found = json.loads((HERE / "growth.json").read_text(encoding="utf-8"))
    mpl.rcParams["svg.hashsalt"] = "fedcor"  # the same numbers give the same file
    draw(found).savefig(HERE / "growth.svg", metadata={"Date": None})
