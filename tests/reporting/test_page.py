"""The page: what it says is what `report` says, and nothing of a record becomes markup."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from fake_runs import fake_run, regression_run
from hypothesis import given
from hypothesis import strategies as st
from page_runs import write_run

import fedcor
from fedcor.cli import main
from fedcor.reporting.curves import SeedMeans, bucket_ends, downsample
from fedcor.reporting.explanations import explanation
from fedcor.reporting.page import SCRIPTS, _asset, escaped_json, render_page
from fedcor.reporting.page.data import page_data, repeat_command
from fedcor.reporting.page.run_data import (
    checkpoint_of,
    client_losses,
    client_map,
    count_clients,
    distribution,
    label_mix,
    principal_components,
    rounded,
    run_data,
)
from fedcor.reporting.results import Result
from fedcor.reporting.summary import summarise
from fedcor.reporting.verdict import experiment_verdict
from fedcor.runs.checkpoints import CHECKPOINT
from fedcor.runs.record import read_run, read_runs
from fedcor.runs.runner import run as simulate_run
from fedcor.selectors.update_memory import ROWS
from fedcor.simulation.experiment_files import load_experiment

EVIL = '<script>alert(1)</script><img src=x onerror="alert(2)">'


class Elements(HTMLParser):
    """Every element of a page, and what the scripts and styles hold."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[str] = []
        self.open = False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self.inside.append("")
            self.open = True

    def handle_endtag(self, tag):
        self.open = False

    def handle_data(self, data):
        if self.open:
            self.inside[-1] += data


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for seed in (1, 2):
        for selector in ("random", "fedcor"):
            write_run(folder, selector, seed)
    return folder


@pytest.fixture(scope="module")
def data(folder):
    return page_data(read_runs(folder))


def held_data(page: bytes):
    return json.loads(page.decode().split('id="data">')[1].split("</script>")[0])


# --- the file ---


def test_the_page_holds_the_data_and_loads_nothing(data):
    page = render_page(data)
    found = Elements(page.decode())
    assert held_data(page) == json.loads(json.dumps(data))
    assert not [tag for tag, attributes in found.tags if {"src", "srcset"} & {*attributes}]
    assert {tag for tag, _ in found.tags}.isdisjoint({"link", "iframe", "img", "object", "base"})
    for tag, attributes in found.tags:
        assert not any(name.startswith("on") or name == "style" for name in attributes), tag
        if tag == "a":
            assert attributes["href"].startswith("#")


@pytest.mark.parametrize("live", [False, True])
def test_the_policy_names_the_style_and_the_script_by_their_hashes(data, live):
    page = render_page(data, live=live).decode()
    found = Elements(page)
    policy = next(a["content"] for tag, a in found.tags if a.get("http-equiv"))
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    style, _, script = found.inside
    for name, content in (("style-src", style), ("script-src", script)):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert rules.pop(name) == f"'sha256-{digest}'"
    assert rules.pop("connect-src", None) == ("'self'" if live else None)
    assert set(rules.values()) == {"'none'"}
    assert rules.keys() == {"default-src", "base-uri", "form-action"}


def test_nothing_of_a_record_becomes_markup(tmp_path):
    evil = dict.fromkeys(range(20), EVIL)
    path = write_run(tmp_path, "fedcor", names=evil)
    text = (path / "rounds.jsonl").read_text()
    text = text.replace('"toy"', json.dumps(EVIL)).replace('"gain"', json.dumps(EVIL))
    (path / "rounds.jsonl").write_text(text)
    (path / CHECKPOINT).unlink()  # whose checksum no longer fits
    page = render_page(page_data(read_runs(tmp_path)))
    found = Elements(page.decode())
    assert [tag for tag, _ in found.tags].count("script") == 2
    assert "img" not in {tag for tag, _ in found.tags}
    assert page.count(b"<script") == 2
    assert EVIL in held_data(page)["experiments"][0]["name"]
    assert held_data(page)["experiments"][0]["runs"][0]["clients"]["names"][3] == EVIL


@given(st.recursive(st.text() | st.integers() | st.none(), st.lists, max_leaves=5))
def test_escaped_json_is_json_without_markup(value):
    text = escaped_json(value)
    assert json.loads(text) == value
    assert not {"<", ">", "&", "\u2028"} & {*text}


def test_templates_in_a_name_stay_as_they_are():
    page = render_page(page_data([fake_run([0.1], "{{script}}", experiment="{{data}}{{style}}")]))
    assert held_data(page)["experiments"][0]["name"] == "{{data}}{{style}}"


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_rounded_numbers_are_close_or_none(value):
    found = rounded(value)
    if np.isfinite(value):
        assert found == pytest.approx(value, rel=1e-3, abs=1e-300)
    else:
        assert found is None


# --- what it says ---


def test_verdict_table_and_curves_are_those_of_the_report(folder, data):
    experiment = summarise(read_runs(folder)).experiments[0]
    (shown,) = data["experiments"]
    assert shown["verdict"] == experiment_verdict(experiment)
    assert shown["notes"] == []
    for series, row in zip(shown["series"], shown["table"]["rows"], strict=True):
        selector = experiment.selector(series["name"])
        assert row["mean"][0] == pytest.approx(selector.estimates["mean_accuracy"].mean, rel=1e-5)
        curves = experiment.curves[series["name"]].values()
        mean, low, high = series["measures"][0]["raw"]
        values = np.array([curve.accuracy for curve in curves])
        np.testing.assert_allclose(mean, values.mean(axis=0), rtol=1e-3)
        np.testing.assert_allclose(low, values.min(axis=0), rtol=1e-3)
        np.testing.assert_allclose(high, values.max(axis=0), rtol=1e-3)
        assert series["bytes"] == np.cumsum([8000] * 12).tolist()
    assert [series["look"] for series in shown["series"]] == [
        {"random": 0, "fedcor": 1}[series["name"]] for series in shown["series"]
    ]


def test_why_is_what_explain_says(folder, data):
    (experiment,) = data["experiments"]
    names = [series["name"] for series in experiment["series"]]
    for run in experiment["runs"]:
        record = read_run(folder / names[run["series"]] / f"seed-{run['seed']}")
        for number, shown in enumerate(run["why"]["rounds"]):
            said = explanation(record, number)
            assert run["attendance"]["selected"][number] == [
                row["client"] for row in said["chosen"]
            ]
            if "parts" in shown:
                sums = np.sum(shown["parts"], axis=0)
                gains = [row["gain"] for row in said["chosen"]]
                np.testing.assert_allclose(sums, gains, rtol=0.05, atol=0.005)
                assert shown["rivals"] == [row["runner_up"]["client"] for row in said["chosen"]]
            note = run["why"]["notes"][shown["note"]] if "note" in shown else ""
            assert note == said["note"]
        failed = {int(t): clients for t, clients in run["attendance"]["failed"].items()}
        assert [*failed] == [3, 10]
        for t, clients in failed.items():
            kept = set(record.rounds[t]["participated"])
            assert clients == [c for c in record.rounds[t]["selected"] if c not in kept]


def test_a_page_of_long_runs_explains_some_rounds_and_the_last(folder, monkeypatch):
    monkeypatch.setattr("fedcor.reporting.page.data.MOST_REASONS", 300)
    for run in page_data(read_runs(folder))["experiments"][0]["runs"]:
        told = [t for t, one in enumerate(run["why"]["rounds"]) if one is not None]
        stride = run["why"]["stride"]
        assert stride > 1
        assert told == sorted({*range(0, 12, stride), 11})


def test_runs_without_rounds_or_checkpoint_or_accuracy_have_a_page():
    assert (
        "No round is finished yet"
        in held_data(render_page(page_data([fake_run([], planned=5)])))["experiments"][0]["verdict"]
    )
    shown = page_data([regression_run([3.0, 2.0], "random", 1), regression_run([3.0, 1.0], "b", 1)])
    assert shown["experiments"][0]["measures"] == ["loss"]
    assert [run["map"] for run in shown["experiments"][0]["runs"]] == [None, None]
    render_page(shown)


def test_a_run_on_flower_says_who_failed_and_how(tmp_path):
    write_run(tmp_path, "fedcor", flower=True, names={1: "north"})
    (run,) = page_data(read_runs(tmp_path))["experiments"][0]["runs"]
    assert run["first_round"] == 1
    assert run["attendance"]["faults"] == {"3": {"late": 1}, "10": {"late": 1}}
    assert run["attendance"]["alone"] == {"5": [1]}
    assert run["clients"]["names"][1] == "north"
    assert [*run["attendance"]["failed"]] == ["3", "10"]


def test_a_run_with_faults_says_why_each_client_failed(tmp_path):
    changes = ["faults.dropout=0.3", "training.rounds=6"]
    simulate_run(load_experiment("digits", changes, "random"), 1, tmp_path)
    record = read_run(tmp_path)
    (run,) = page_data([record])["experiments"][0]["runs"]
    told = run["attendance"]["reasons"]
    assert told == {
        str(t): one["missing"] for t, one in enumerate(record.rounds) if "missing" in one
    }
    assert told
    for t, clients in run["attendance"]["failed"].items():
        assert sorted(clients) == sorted(c for who in told[t].values() for c in who)


def test_diverged_runs_give_json(tmp_path):
    runs = [fake_run([0.1, None], loss=[1.0, None]), fake_run([0.1, 0.2], "b")]
    render_page(page_data(runs))  # raises where a number is not finite


def test_many_series_have_colours_of_their_own():
    names = ["random", "fedcor", *"abcdefgh"]
    shown = page_data([fake_run([0.1], name) for name in names])["experiments"][0]
    looks = [series["look"] for series in shown["series"]]
    assert sorted(looks) == list(range(10))


# --- clients ---


def test_clients_are_counted_as_chosen(folder):
    run = read_run(folder / "fedcor" / "seed-1")
    shown = run_data(run, 0)
    clients = shown["clients"]
    assert shown["attendance"]["clients"] == count_clients(run) == 20
    for client in range(20):
        rows = [row for row in run.rounds if client in row["selected"]]
        assert clients["chosen"][client] == len(rows)
        assert clients["failed"][client] == sum(client not in row["participated"] for row in rows)
    losses, _ = client_losses(run, checkpoint_of(run), 20)
    assert losses.tolist() == run.rounds[10]["details"]["losses"]
    assert clients["losses"] == pytest.approx(losses, rel=1e-3)


def test_root_mean_squares_are_not_shown_as_losses(tmp_path):
    fedcor.run(load_experiment("digits", ["training.rounds=3"], "oort"), seed=1, out=tmp_path)
    run = read_run(tmp_path)
    kept = checkpoint_of(run)
    losses, _ = client_losses(run, kept, count_clients(run))
    remembered = kept["selector/rms_losses"]
    assert np.isfinite(remembered).any()
    assert not np.isin(losses, remembered[np.isfinite(remembered)]).any()


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=60))
def test_the_worst_tenth_is_the_mean_of_the_largest(values):
    found = distribution(np.array([*values, np.nan]))
    assert found["known"] == sum(found["counts"]) == len(values)
    worst = sorted(values)[-max(1, round(len(values) / 10)) :]
    assert found["worst"] == pytest.approx(np.mean(worst), abs=1e-6)


def test_principal_components_are_the_best_plane():
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(30, 6)) * [5, 3, 1, 0.5, 0.1, 0.1]
    points, explained = principal_components(rows)
    centred = rows - rows.mean(axis=0)
    values, vectors = np.linalg.eigh(centred.T @ centred)  # a slow twin
    twin = centred @ vectors[:, ::-1][:, :2]
    np.testing.assert_allclose(np.abs(points), np.abs(twin), atol=1e-9)
    np.testing.assert_allclose(explained, values[::-1][:2] / values.sum())


def test_a_map_leaves_out_clients_that_are_not_known():
    rows = np.eye(5)
    rows[2] = 0
    found = client_map({"selector/directions": rows, "round": np.array(7)})
    assert found["clients"] == [0, 1, 3, 4]
    assert (found["what"], found["round"]) == ("remembered updates", 7)
    assert client_map({}) is None
    assert client_map({"selector/embedding": np.empty((0, 3))}) is None


def test_a_map_of_many_clients_is_that_of_the_whole_table():
    rows = np.random.default_rng(1).standard_normal((ROWS + 9, 3))
    rows[ROWS + 1] = 0
    blocks = {f"selector/directions/{i}": rows[i * ROWS :][:ROWS] for i in range(2)}
    whole, found = client_map({"selector/directions": rows}), client_map(blocks)
    assert found == whole
    assert len(found["clients"]) == ROWS + 8
    damaged = {**blocks, "selector/directions/1": rows[ROWS:, :2]}
    assert client_map(damaged) is None


def test_a_damaged_checkpoint_leaves_the_page_without_a_map(tmp_path):
    path = write_run(tmp_path)
    (path / "checkpoint" / "state.npz").write_bytes(b"nothing")
    assert checkpoint_of(read_run(path)) == {}
    page_data(read_runs(tmp_path))


def test_the_label_mix_is_that_of_the_simulation():
    from fedcor.simulation.build import load_data, split_data

    experiment = fedcor.experiment("digits", rounds=1)
    result = fedcor.run(experiment, "random", seed=5)
    found, data = label_mix(result.runs[0]), load_data(experiment)
    for counts, part in zip(found, split_data(experiment, data, 5), strict=True):
        assert counts.tolist() == np.bincount(data.train_y[part], minlength=10).tolist()


def test_the_label_mix_of_own_data_is_unknown(folder):
    assert label_mix(read_run(folder / "random" / "seed-1")) is None


# --- what was run ---


def test_the_command_repeats_the_runs(tmp_path):
    changed = fedcor.experiment("digits", rounds=2, local_steps=3)
    result = fedcor.compare(changed, ["random", "aligned"], seeds=[1, 2])
    command = repeat_command(result.runs)
    assert command == (
        "fedcor compare digits --selectors random,aligned --seeds 1,2 --rounds 2 "
        "--set training.local_steps=3"
    )
    assert main([*command.split()[1:], "--out", str(tmp_path / "again")]) == 0
    for run in result.runs:
        twin = read_run(tmp_path / "again" / run.header["selector"] / f"seed-{run.header['seed']}")
        assert twin.header["config"] == json.loads(json.dumps(run.header["config"]))
        assert [row["test_loss"] for row in twin.rounds] == [row["test_loss"] for row in run.rounds]


def test_where_no_command_repeats_it_none_is_given(folder):
    assert repeat_command(read_runs(folder)) is None  # no preset
    renamed = fedcor.compare("digits", {"mine": fedcor.Random(10)}, seeds=[1], rounds=1)
    assert repeat_command(renamed.runs) is None
    named = fake_run([0.1], "os:system", experiment="digits")
    assert repeat_command([named]) is None


# --- fewer points ---


@given(st.integers(1, 5000), st.integers(1, 700))
def test_buckets_end_with_the_last_round_and_are_never_empty(rounds, most):
    ends = bucket_ends(rounds, most)
    assert len(ends) == min(rounds, most)
    assert ends[-1] == rounds
    assert (np.diff([0, *ends]) >= 1).all()


def test_downsampled_bands_keep_their_peaks():
    rng = np.random.default_rng(0)
    values = rng.random(2000)
    values[77], values[5:9] = 9.0, np.nan
    times = [np.arange(2000.0)] * 3
    means = SeedMeans(values, values - 1, values + 1, *times, seeds=2)
    ends, few = downsample(means, 100)
    assert len(ends) == len(few.mean) == 100
    assert np.nanmax(few.high) == 10.0
    start = 0
    for end, mean, low in zip(ends, few.mean, few.low, strict=True):
        assert mean == pytest.approx(np.nanmean(values[start:end]))
        assert low == pytest.approx(np.nanmin(values[start:end]) - 1)
        start = end
    assert few.bytes.tolist() == few.time.tolist() == (ends - 1).tolist()


# --- how it is asked for ---


def test_report_html_writes_the_page(folder, tmp_path, capsys):
    assert main(["report", str(folder), "--html", str(tmp_path / "a.html")]) == 0
    assert str(tmp_path / "a.html") in capsys.readouterr().out
    page = (tmp_path / "a.html").read_bytes()
    assert held_data(page)["experiments"][0]["name"] == "toy"
    assert main(["report", str(folder), "--html", "--json"]) == 0
    written = capsys.readouterr()
    json.loads(written.out)
    assert str(folder / "report.html") in written.err
    assert (folder / "report.html").read_bytes() == page


def test_a_result_gives_its_page(tmp_path, monkeypatch, folder):
    result = Result(read_runs(folder))
    page = result.to_html(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    path = result.show()
    assert opened == [path.as_uri()]
    assert path.read_text(encoding="utf-8") == page


def test_compare_writes_the_page_on_request(tmp_path, capsys):
    command = f"compare digits --selectors random --seeds 1 --rounds 2 --out {tmp_path} --html"
    assert main(command.split()) == 0
    assert capsys.readouterr().err.strip().endswith(str(tmp_path / "report.html"))
    command = held_data((tmp_path / "report.html").read_bytes())["experiments"][0]["run_with"]
    assert command["command"] == "fedcor run digits --selector random --seed 1 --rounds 2"


def test_a_study_writes_the_page_on_request(tmp_path, capsys):
    """Two variants of one selector are two rows."""
    from studies.__main__ import write_page

    assert not write_page(tmp_path / "runs", tmp_path / "a.html")
    runs = tmp_path / "runs" / "toy"
    for seed in (1, 2):
        write_run(runs, "fedcor", seed)
        (runs / "fedcor-beta").mkdir(exist_ok=True)
        write_run(runs / "other", "fedcor", seed).rename(runs / "fedcor-beta" / f"seed-{seed}")
        write_run(runs, "random", seed)
    assert write_page(tmp_path / "runs", tmp_path / "a.html")
    page = (tmp_path / "a.html").read_bytes()
    names = {series["name"] for series in held_data(page)["experiments"][0]["series"]}
    assert names == {"fedcor", "fedcor-beta", "random"}


@pytest.mark.slow
def test_a_quick_study_writes_the_page(tmp_path, capsys):
    from studies.__main__ import main as run_study

    assert run_study(f"table1 --quick --out {tmp_path} --html".split()) == 0
    assert capsys.readouterr().out.strip().endswith("report.html")


@pytest.mark.slow
def test_pages_of_many_and_of_long_runs_are_small(tmp_path):
    for seed in range(1, 6):
        for selector in ("random", "afl", "power_of_choice", "fedcor"):
            write_run(tmp_path / "many", selector, seed, rounds=500, clients=100, picks=10)
    assert len(render_page(page_data(read_runs(tmp_path / "many")))) < 5e6
    write_run(tmp_path / "long", "fedcor", 1, rounds=2000, clients=1000, picks=50)
    assert len(render_page(page_data(read_runs(tmp_path / "long")))) < 15e6


def test_scripts_set_text_only():
    for name in SCRIPTS:
        if not name.startswith("vendor/"):
            found = re.findall(
                r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", _asset(name)
            )
            assert not found, name
