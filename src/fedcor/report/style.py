"""How figures look. The palette is Okabe and Ito's, which colour-blind readers can tell apart, with
two colours of Tol's; each series has a line style of its own, so that a figure can be read in grey
as well.
"""

from __future__ import annotations

import io
import textwrap
from pathlib import Path
from typing import Any

from fedcor.errors import MissingExtraError
from fedcor.files import write_whole

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as error:
    raise MissingExtraError("matplotlib", "plot") from error

__all__ = [
    "PALETTE",
    "Axes",
    "Figure",
    "line_style",
    "panel_row",
    "save_figure",
    "setting_title",
    "write_caption",
]

PALETTE = ["#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442"]
_COLOURS = {
    "fedcor": "#D55E00",
    "random": "#000000",
    "afl": "#009E73",
    "power_of_choice": "#0072B2",
    "oort": "#117733",
    "complement": "#CC79A7",
    "aligned": "#332288",
    "aligned + FedRecall": "#332288",
    "round_robin": "#882255",
    "full": "#999999",
}
_LINES = {
    "fedcor": "-",
    "random": ":",
    "afl": "-.",
    "power_of_choice": "--",
    "oort": "-.",
    "complement": "-",
    "aligned": "--",
    "aligned + FedRecall": "-",
    "round_robin": ":",
    "full": (0, (6, 1)),
}
_TITLES = {
    "2spc": "2SPC: two shards a client",
    "1spc": "1SPC: one shard a client",
    "dir": "Dir: Dirichlet, α = 0.2",
}


def setting_title(setting: str) -> str:
    """The title of a panel: one of the paper's settings in words, else the name itself."""
    return _TITLES.get(setting, setting)


def panel_row(panels: int, width: float = 3.6, height: float = 3.0) -> tuple[Figure, list[Axes]]:
    """A figure with `panels` panels side by side, each `width` by `height` inches."""
    figure = Figure(figsize=(width * panels, height), layout="constrained")
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
    lines = ["-", "--", ":", "-."]
    free = [colour for colour in PALETTE if colour not in _COLOURS.values()]
    return {
        "color": _COLOURS.get(label, free[i % len(free)]),
        "linestyle": _LINES.get(label, lines[i % len(lines)]),
    }


def save_figure(figure: Figure, stem: Path) -> list[Path]:
    """Write `stem`.svg and `stem`.png, each atomically; without a date, so that the same numbers
    give the same file."""
    paths = []
    for suffix, options in ((".svg", {"metadata": {"Date": None}}), (".png", {"dpi": 160})):
        content = io.BytesIO()
        figure.savefig(content, format=suffix[1:], **options)
        write_whole(stem.with_suffix(suffix), content.getvalue())
        paths.append(stem.with_suffix(suffix))
    return paths
