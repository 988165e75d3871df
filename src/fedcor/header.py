"""The first line of a record: what was run, with which settings and versions.

Every engine writes the same form. Records of earlier versions are read as if they had been written
today (`upgrade`).
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import numpy as np

__all__ = ["restore_name", "run_header", "upgrade"]

FORMAT = 2  # 1: a Flower app's selector was its class in lower case
# Selectors and modules that earlier records call by another name -> their name now.
_RENAMED = {"powerofchoice": "power_of_choice"}
_MOVED = {"fedcor.selectors.relatives": "fedcor.reproduce.relatives"}


def run_header(
    experiment: str,
    selector: str,
    seed: int,
    config: Mapping[str, Any],
    versions: Mapping[str, str],
    engine: str | None = None,
) -> dict[str, Any]:
    """The header of a run.

    Args:
        experiment: Name of the experiment.
        selector: Registered name of the selector, or `module:Class`.
        seed: Seed of everything that is drawn.
        config: Every setting, as plain values. `config["selectors"][selector]` holds those of the
            selector.
        versions: Versions of the engine's packages. Those of fedcor, Python and NumPy are added.
        engine: None for the simulator and for a user's own Flower app; "flower" for an experiment
            of the simulator that runs on Flower.
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
    """A header of any version with today's names. What it does not understand stays as it is.

    The format stays, too: it says what `restore_name` may do with the selector's name.
    """
    config = header.get("config")
    if isinstance(config, Mapping) and isinstance(config.get("optimiser"), Mapping):
        # A record did not name the default optimiser if the experiment did not.
        named = {"name": "fedavg", **config["optimiser"]}
        header = {**header, "config": {**config, "optimiser": named}}
    selector = header.get("selector")
    if not isinstance(selector, str):
        return dict(header)
    module, colon, cls = selector.rpartition(":")
    name = f"{_MOVED.get(module, module)}:{cls}" if colon else _RENAMED.get(selector, selector)
    return _rename_selector(header, name)


def restore_name(header: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The header with its selector called `name`, if that is the selector its record means.

    Records of Flower apps used to give the class of a selector in lower case: "mine" where they now
    give its registered name or "my_module:Mine". Any other header is returned as it is.
    """
    versions = header.get("versions")
    if not isinstance(versions, Mapping) or "flwr" not in versions:
        return header
    old, cls = str(header.get("selector")), name.rpartition(":")[2]
    lower = (cls.lower(), cls.lower().replace("_", ""))
    same_class = header.get("format") == 1 and old in lower
    # The module that is run as a script has another name when it is imported.
    as_script = "__main__" in (old.rpartition(":")[0], name.rpartition(":")[0])
    if same_class or (as_script and old.rpartition(":")[2] == cls):
        return _rename_selector(header, name)
    return header


def _rename_selector(header: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A copy in which the selector is called `name`, in the settings too."""
    old, config = header.get("selector"), header.get("config")
    renamed = {**header, "selector": name}
    if isinstance(config, Mapping):
        renamed["config"] = config = dict(config)
        if config.get("selector") == old:
            config["selector"] = name
        tables = config.get("selectors")
        if isinstance(tables, Mapping):
            config["selectors"] = {
                name if key == old else key: _current_options(options)
                for key, options in tables.items()
            }
    return renamed


def _current_options(options: Any) -> Any:
    """A selector's settings without those that are gone.

    FedCor had a `scale` that multiplied every gain. Without it, gains are what they were at 1.
    """
    if isinstance(options, Mapping) and options.get("scale") == 1.0 and "warmup_history" in options:
        return {key: value for key, value in options.items() if key != "scale"}
    return options
