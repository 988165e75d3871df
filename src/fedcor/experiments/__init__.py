"""Experiments: presets and TOML files become checked, frozen settings. Needs no extra."""

from fedcor.experiments.files import load_experiment, parse_experiment, preset_names
from fedcor.experiments.settings import DataSettings, Experiment, TrainingSettings

__all__ = [
    "DataSettings",
    "Experiment",
    "TrainingSettings",
    "load_experiment",
    "parse_experiment",
    "preset_names",
]
