"""A measure over rounds as one line of text per selector."""

from __future__ import annotations

import numpy as np
from rich.cells import cell_len, set_cell_size

from fedcor.report.compact import WIDTH
from fedcor.report.names import clean, short_names
from fedcor.report.numbers import numbers
from fedcor.report.ranking import ranking
from fedcor.report.seed_means import seed_means
from fedcor.report.summary import ExperimentSummary
from fedcor.types import FloatArray

__all__ = ["sparklines"]

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = ".:-=+*#@"


def sparklines(experiment: ExperimentSummary, ascii: bool = False) -> list[str]:
    """A title, and then one line per selector, best first: the mean over seeds, on one scale.

    Args:
        experiment: as `summarise` gives it
        ascii: whether to draw with ASCII characters

    Returns:
        The lines; none where there is nothing to draw.
    """
    marks = ASCII if ascii else BLOCKS
    names = short_names(s.name for s in experiment.selectors)
    margin = max(map(cell_len, names.values())) + 2
    means = {
        name: seed_means(experiment.curves[name], experiment.measure).mean
        for name in ranking(experiment)
    }
    longest = max((len(mean) for mean in means.values()), default=0)
    known = np.concatenate([mean[np.isfinite(mean)] for mean in means.values()])
    if not known.size or longest < 2:
        return []
    low, high = float(known.min()), float(known.max())
    columns = min(WIDTH - margin, longest)
    bottom, top = numbers(experiment.headline, [low, high])
    scale = f"from {marks[0]} {bottom} to {marks[-1]} {top}"
    lines = [f"{clean(experiment.measure)}, rounds 1 to {longest}, {scale}"]
    for name, mean in means.items():
        if not np.isfinite(mean).any():
            continue
        padded = np.full(longest, np.nan)
        padded[: len(mean)] = mean
        marked = "".join(_mark(part, low, high, marks) for part in np.array_split(padded, columns))
        lines.append((set_cell_size(names[name], margin) + marked).rstrip())
    return lines


def _mark(part: FloatArray, low: float, high: float, marks: str) -> str:
    """The mean of some rounds as one character; a blank where there is none."""
    known = part[np.isfinite(part)]
    if not known.size:
        return " "
    share = (float(known.mean()) - low) / (high - low) if high > low else 0.0
    return marks[min(int(share * len(marks)), len(marks) - 1)]
