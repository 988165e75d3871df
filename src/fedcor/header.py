"""The first line of a record: what was run, with which settings and versions. One form for every engine.

Records of earlier versions are read as if they had been written today (`upgrade`).
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import numpy as np

__all__ = ["named_alike", "rename_selector", "run_header", "upgrade"]

FORMAT = 1
# Names of selectors in earlier records -> their names now.
_RENAMED = {"powerofchoice": "power_of_choice"}
_MOVED = ("fedcor.selectors.relatives:", "fedcor.reproduce.relatives:")


def run_header(
    experiment: str,
    selector: str,
    seed: int,
    config: Mapping[str, Any],
    versions: Mapping[str, str],
    engine: str | None = None,
) -> dict[str, Any]:
    """The header of a run.

    experiment  name of the experiment
    selector    registered name of the selector, or module:Class
    seed        of everything that is drawn
    config      every setting, as plain values; `config["selectors"][selector]` are the selector's own
    versions    of the engine's packages, beside those of fedcor, Python and NumPy
    engine      None for the simulator and for a Flower app of the user's; "flower" for an
                experiment of the simulator that runs on Flower
    """
    header = {
        "format": FORMAT,
        "experiment": experiment,
        "selector": selector,
        "seed": seed,
        "config": config,
        "versions": {
            "fedcor": version("fedcor"),
            "python": platform.python_version(),
            "numpy": np.__version__,
            **versions,
        },
    }
    return header if engine is None else {**header, "engine": engine}


def upgrade(header: Mapping[str, Any]) -> dict[str, Any]:
    """A header of any version, in today's words. Fields that it does not understand stay as they are."""
    selector = header.get("selector")
    if not isinstance(selector, str):
        return dict(header)
    name = _RENAMED.get(selector, selector)
    if name.startswith(_MOVED[0]):
        name = _MOVED[1] + name.removeprefix(_MOVED[0])
    return {**rename_selector(header, name), "selector": name}


def rename_selector(header: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The header with its selector called `name`, in its settings too."""
    config, old = header.get("config"), header.get("selector")
    if not isinstance(config, Mapping):
        return {**header, "selector": name}
    config = dict(config)
    if config.get("selector") == old:
        config["selector"] = name
    tables = config.get("selectors")
    if isinstance(tables, Mapping):
        config["selectors"] = {
            name if key == old else key: _current_options(options)
            for key, options in tables.items()
        }
    return {**header, "selector": name, "config": config}


def _current_options(options: Any) -> Any:
    """Without FedCor's `scale`, which multiplied every gain and so changed no choice."""
    if isinstance(options, Mapping) and options.get("scale") == 1.0 and "warmup_history" in options:
        return {key: value for key, value in options.items() if key != "scale"}
    return options


def named_alike(old: str, new: str) -> bool:
    """Whether `old` is how earlier versions wrote the selector `new` of a Flower app: its class in
    small letters."""
    return old == new.rpartition(":")[2].replace("_", "").lower()
