"""Texts of the command line to values, each refused with what is allowed."""

from __future__ import annotations

import argparse
from pathlib import Path

from fedcor.checks import expand_home
from fedcor.errors import ConfigError

__all__ = ["parse_count", "parse_folder", "parse_jobs", "parse_names", "parse_seeds"]

_LARGEST = 2**31
_MOST_SEEDS = 10_000


def parse_count(text: str) -> int:
    """A whole number from 0 on."""
    if not text.isdecimal() or (value := int(text)) > _LARGEST:
        allowed = f"is not a whole number from 0 to {_LARGEST}"
        raise argparse.ArgumentTypeError(f"{text!r} {allowed}")
    return value


def parse_jobs(text: str) -> int:
    """A number of processes."""
    if not text.isdecimal() or not 1 <= (value := int(text)) <= _LARGEST:
        raise argparse.ArgumentTypeError(f"{text!r}: must be at least 1 (a whole number)")
    return value


def parse_folder(text: str) -> Path:
    """A path, with `~` for the home folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the name of the folder is empty")
    try:
        return expand_home("folder", text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error.allowed}") from None


def parse_seeds(text: str) -> list[int]:
    """`1-5` or `1,2,7` to the seeds, each once."""
    seeds: list[int] = []
    for part in text.split(","):
        low, dash, high = part.partition("-")
        first, last = parse_count(low), parse_count(high if dash else low)
        seeds += range(first, min(last, first + _MOST_SEEDS) + 1)
    if not seeds or len(seeds) > _MOST_SEEDS or len(set(seeds)) < len(seeds):
        raise argparse.ArgumentTypeError(
            f"{text!r} is empty, repeats a seed, or has over {_MOST_SEEDS} seeds; use 1-5 or 1,2,7"
        )
    return seeds


def parse_names(text: str) -> list[str]:
    """`a,b,c` to the names, each once."""
    names = [name.strip() for name in text.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(
            f"{text!r} has an empty or repeated name; separate names by commas"
        )
    return names
