"""Tables in Markdown, and the names of selectors and settings in the paper's tables and figures."""

from __future__ import annotations

from collections.abc import Sequence

_DISPLAY_NAMES = {
    "fedcor": "FedCor",
    "random": "Rand",
    "afl": "AFL",
    "power_of_choice": "Pow-d",
    "oort": "Oort",
    "full": "everyone trains",
    "round_robin": "round-robin",
}

_TITLES = {
    "2spc": "2SPC: two shards a client",
    "1spc": "1SPC: one shard a client",
    "dir": "Dir: Dirichlet, α = 0.2",
}


def display_name(selector: str) -> str:
    """What a selector or variant is called in the paper's tables and figures; else its own name."""
    return _DISPLAY_NAMES.get(selector, selector)


def markdown(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A heading with a table below it."""
    lines = [head, ["---"] * len(head), *rows]
    return f"### {title}\n\n" + "".join("| " + " | ".join(line) + " |\n" for line in lines) + "\n"


def setting_title(setting: str) -> str:
    """The title of a panel: one of the paper's settings in words, else the name itself."""
    return _TITLES.get(setting, setting)
