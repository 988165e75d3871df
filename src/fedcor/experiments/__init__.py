"""Experiments: keywords, presets and TOML files become checked, frozen settings. Needs no extra."""

from fedcor.experiments.change import experiment
from fedcor.experiments.files import load_experiment, parse_experiment, preset_names
from fedcor.experiments.given import OwnClients, OwnData
from fedcor.experiments.settings import Experiment
from fedcor.experiments.variants import Selectors, variants

__all__ = [
    "Experiment",
    "OwnClients",
    "OwnData",
    "Selectors",
    "experiment",
    "load_experiment",
    "parse_experiment",
    "preset_names",
    "variants",
]
