"""Names of runs in messages, and short names of selectors for columns that are narrow."""

from __future__ import annotations

import re
from collections.abc import Iterable

from rich.cells import cell_len, set_cell_size

from fedcor.core.text import one_line
from fedcor.runs.record import RunRecord

NAME_WIDTH = 22
_MODULE_AND_CLASS = re.compile(r"[\w.<>]+:([\w.<>]+(\(.*\))?( \+ [\w.<>]+)?)")


def short_names(names: Iterable[str], width: int = NAME_WIDTH) -> dict[str, str]:
    """Each name in at most `width` columns, no two alike.

    Of `module:Class` the class is kept; what is still too long is cut in the middle.

    Example:
        >>> short_names(["random", "my_package.selectors:LongestUnseen"])
        {'random': 'random', 'my_package.selectors:LongestUnseen': 'LongestUnseen'}
    """
    taken: dict[str, str] = {}
    for name in dict.fromkeys(names):
        whole = clean(name)
        if found := _MODULE_AND_CLASS.fullmatch(whole):
            whole = found[1].rpartition("<locals>.")[2]
        short = _cut(whole, width)
        number = 2
        while short in taken.values():
            ending = f"~{number}"
            short = _cut(whole, width - len(ending)) + ending
            number += 1
        taken[name] = short
    return taken


def find_name(given: str, names: Iterable[str]) -> str | None:
    """The one of `names` that `given` is, or is the short form of; None if there is none.

    A selector stands for itself with its optimiser, if it is there with one only.

    Example:
        >>> find_name("Mine", ["random", "my_module:Mine"])
        'my_module:Mine'
        >>> find_name("aligned", ["random", "aligned + FedRecall"])
        'aligned + FedRecall'
    """
    names = list(names)
    if given in names:
        return given
    short = short_names(names, 10_000)
    found = [name for name in names if short[name] == given]
    if not found:
        alone = {name: (_selector(name), _selector(short[name])) for name in names}
        found = [name for name in names if given in alone[name]]
    return found[0] if len(found) == 1 else None


def _selector(name: str) -> str:
    """`aligned` of `aligned + FedRecall`."""
    return name.rpartition(" + ")[0]


def run_name(run: RunRecord) -> str:
    """Where a run is; one that lives in memory is called by what it ran."""
    if run.path is not None:
        return str(run.path)
    header = run.header
    parts = (header.get(key) for key in ("experiment", "selector"))
    return f"the run of {', '.join(map(str, parts))}, seed {header.get('seed')}"


def clean(text: str) -> str:
    """The text on one line: characters that a terminal would act on are shown, as `\\x1b`."""
    return one_line(text, None)


def _cut(text: str, width: int) -> str:
    """The beginning and the end, if the whole is too long: the end is often what differs."""
    if cell_len(text) <= width:
        return text
    last = (width - 2) // 2
    end = text[-last:] if last > 0 else ""
    while cell_len(end) > last:
        end = end[1:]
    return set_cell_size(text, width - 2 - last).rstrip() + ".." + end
