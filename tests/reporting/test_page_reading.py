"""What a first-time reader of the page needs: names of numbers, a verdict, colours."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from fake_runs import fake_run
from hypothesis import given
from hypothesis import strategies as st
from page_runs import write_run

from fedcor.reporting.gp_calibration import calibration, health_sentence
from fedcor.reporting.page import _asset
from fedcor.reporting.page.data import page_data
from fedcor.reporting.summary import summarise
from fedcor.runs.record import read_runs


def test_the_table_says_how_many_seeds_reached_the_target_and_what_each_number_is():
    runs = [
        fake_run([0.1, 0.3, 0.2], "random", 1),
        fake_run([0.1, 0.95, 0.2], "random", 2),
        fake_run([0.1, 0.95, 0.2], "b", 1),
        fake_run([0.1, 0.2, 0.95], "b", 2),
    ]
    for run in runs:
        run.header["config"]["target_accuracy"] = 0.9
    shown = page_data(runs, baseline="random")["experiments"][0]
    titles = {column["key"]: column["title"] for column in shown["table"]["columns"]}
    assert titles == {
        "mean": "accuracy, mean of all rounds",
        "final": "accuracy, last 10 rounds",
        "rounds": "first round at 90 %",
        "bytes_to": "bytes to then",
        "bytes": "bytes in all",
        "gap": "mean accuracy minus random’s",
    }
    rows = {
        series["name"]: row
        for series, row in zip(shown["series"], shown["table"]["rows"], strict=True)
    }
    assert rows["random"]["rounds"] == [None, "1 of 2 seeds"]
    assert rows["b"]["rounds"] == [2.5, "2.5"]


def test_bytes_are_bytes_where_a_clock_adds_a_column_to_the_terminal_s_table(tmp_path):
    for selector in ("random", "fedcor"):
        write_run(tmp_path, selector)
    runs = read_runs(tmp_path)
    for run in runs:
        for entry in run.rounds:
            entry["duration"] = 60.0
    (shown,) = page_data(runs)["experiments"]
    assert summarise(runs).experiments[0].has_clock
    assert {row["bytes"][1] for row in shown["table"]["rows"]} == {"96.0 kB"}


@given(st.integers(1, 40), st.data())
def test_the_health_sentence_says_what_the_numbers_say(total, drawn):
    each, together = (drawn.draw(st.integers(0, total)) for _ in range(2))
    bins = drawn.draw(st.lists(st.integers(0, 50), min_size=20, max_size=20))
    fit = calibration(bins)
    said = health_sentence(
        {"forecasts": total, "better": together, "better_each": each, "calibration": fit}
    )
    parts = said.split("; ")
    for count, part in ((each, parts[0]), (together, parts[-1])):
        assert f" {count} of {total}" in part
        assert ("only" in part) == (count < total / 2)
    if sum(bins) < 30:
        assert len(parts) == 2
        return
    held = sum(bins[5:15]) / sum(bins)
    words = "too wide" if held > 0.6 else "too narrow" if held < 0.4 else "about as wide"
    assert words in parts[1]
    assert f"a 50 % interval holds {held:.0%}".replace("%", " %").replace("  ", " ") in parts[1]


def test_without_a_forecast_there_is_no_health_sentence():
    assert health_sentence({"forecasts": 0}) == ""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_selector_s_colour_means_nothing_else(scheme):
    """Perceived distances of colours, and contrasts with the paper of at least 3 to 1."""
    light, dark = _asset("style.css").split("@media screen and (prefers-color-scheme: dark)")
    found = re.findall(r"--([\w-]+): (#\w{6});", light if scheme == "light" else dark)
    colours = dict(found)
    selectors = [colours[f"s{place}"] for place in range(6)]  # those of the selectors of ours
    parts, health = [colours[f"p{n}"] for n in range(4)], [colours[f"h{n}"] for n in range(2)]
    others = [*parts, *health, colours["heat-1"], colours["heat-fail"]]
    assert min(distance(a, b) for a in others for b in selectors) > 20
    for group in (parts, health):
        assert min(distance(a, b) for a, b in itertools.combinations(group, 2)) > 28
    assert min(contrast(one, colours["paper"]) for one in others) >= 3


def test_no_two_labels_look_alike_on_the_map():
    hues = re.findall(r'"(#\w{6})"', _asset("map.js").split("HUES = [")[1].split("]")[0])
    assert len(hues) == 10
    assert min(distance(a, b) for a, b in itertools.combinations(hues, 2)) > 30


def linear(colour):
    values = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def distance(one, other):
    """Euclidean in CIELAB."""
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )

    def lab(colour):
        x, y, z = np.cbrt(to_xyz @ linear(colour) / to_xyz.sum(axis=1))
        return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])

    return float(np.linalg.norm(lab(one) - lab(other)))


def contrast(one, other):
    lights = sorted(float(linear(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (one, other))
    return (lights[1] + 0.05) / (lights[0] + 0.05)
