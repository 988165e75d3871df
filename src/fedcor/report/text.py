"""How names and numbers are written: in tables on the screen, in Markdown and in figures."""

from __future__ import annotations

from collections.abc import Sequence

from fedcor.report.estimates import Estimate
from fedcor.report.metrics import Metric
from fedcor.report.numbers import TIME_UNITS

__all__ = ["difference_text", "display_name", "estimate_text", "markdown"]

_DISPLAY_NAMES = {
    "fedcor": "FedCor",
    "random": "Rand",
    "afl": "AFL",
    "power_of_choice": "Pow-d",
    "oort": "Oort",
    "full": "everyone trains",
    "round_robin": "round-robin",
}
_BYTE_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def display_name(selector: str) -> str:
    """What a selector or variant is called in the paper's tables and figures; else its own name."""
    return _DISPLAY_NAMES.get(selector, selector)


def estimate_text(metric: Metric, estimate: Estimate, between: str = " ") -> str:
    """`0.680 ± 0.012`; `0.680` without an interval; `N/A (2/3)` without a mean; `-` where no run
    was ever measured.

    Args:
        metric: gives the unit and the number of digits
        estimate: what is written
        between: separates the mean from what follows; a newline makes a narrow cell
    """
    if estimate.n == 0 and not metric.to_target:
        return "-"
    if estimate.mean is None:
        return f"N/A{between}({estimate.n}/{estimate.of})"
    if estimate.half_width is None:
        return "{} {}".format(*_formatted(metric, "", estimate.mean)).strip()
    mean, half, unit = _formatted(metric, "", estimate.mean, estimate.half_width)
    return f"{mean}{between}± {half} {unit}".strip()


def difference_text(metric: Metric, estimate: Estimate) -> str:
    """`+0.052 [+0.041, +0.063]`; without the bracket where there is no interval."""
    if estimate.mean is None:
        return f"N/A ({estimate.n}/{estimate.of})" if estimate.of else "no common seed"
    if estimate.low is None or estimate.high is None:
        return "{} {}".format(*_formatted(metric, "+", estimate.mean)).strip()
    mean, low, high, unit = _formatted(metric, "+", estimate.mean, estimate.low, estimate.high)
    return f"{mean} [{low}, {high}] {unit}".strip()


def _formatted(metric: Metric, sign: str, *values: float) -> list[str]:
    """Each value in the metric's format, all in one unit, and then the unit; never a `-0.0`."""
    if metric.unit == "bytes":
        size = max(abs(value) for value in values)
        scale, unit = next((pair for pair in _BYTE_UNITS if size >= pair[0]), _BYTE_UNITS[-1])
        # Three significant digits: 1.23, 12.3, 123.
        digits = sum(size < bound * scale for bound in (10, 100)) if scale > 1 else 0
        return [f"{value / scale:{sign}z.{digits}f}" for value in values] + [unit]
    if metric.unit == "seconds":
        size = max(abs(value) for value in values)
        scale, unit = next((pair for pair in TIME_UNITS if size >= 2 * pair[0]), TIME_UNITS[-1])
        digits = sum(size < bound * scale for bound in (10, 100))
        return [f"{value / scale:{sign}z.{digits}f}" for value in values] + [unit]
    if metric.unit == "number":
        return [f"{value:{sign}.4g}" for value in values] + [""]
    digits = 1 if metric.unit == "rounds" else 3
    return [f"{value:{sign}z.{digits}f}" for value in values] + [""]


def markdown(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A heading with a table below it."""
    lines = [head, ["---"] * len(head), *rows]
    return f"### {title}\n\n" + "".join("| " + " | ".join(line) + " |\n" for line in lines) + "\n"
