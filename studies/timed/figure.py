"""The figure: accuracy against simulated time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedcor.reporting.plots import Figure, line_style, panel_row, write_caption
from fedcor.reporting.tables import display_name
from studies.timed.runs import STATISTICAL

_LOOKS = {STATISTICAL.label: {"color": "#88CCEE", "linestyle": "--"}}


def draw(
    panels: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]],
    targets: Sequence[float],
    caption: str,
) -> Figure:
    """Test accuracy over time: panels[title][series] has `minutes`, `mean`, `low`, `high`."""
    figure, axes = panel_row(len(panels), width=3.9, height=3.4)
    for ax, (title, series) in zip(axes, panels.items(), strict=True):
        for i, (label, numbers) in enumerate(series.items()):
            look = _LOOKS.get(label) or line_style(label, i)
            x, band = numbers["minutes"], (numbers["low"], numbers["high"])
            ax.plot(x, numbers["mean"], label=display_name(label), linewidth=1.5, **look)
            ax.fill_between(x, *band, color=look["color"], alpha=0.08, linewidth=0)
        for target in targets:
            ax.axhline(target, color="grey", linewidth=0.8)
        ax.set_title(title, fontsize=10)
        ax.set_xlabel("minutes of simulated time")
    axes[0].set_ylabel("test accuracy")
    handles, labels = axes[-1].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside right center", frameon=False)
    write_caption(figure, caption)
    return figure
