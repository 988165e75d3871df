"""Text that others wrote: whatever a client or a file says, it is shown, and nothing obeys it."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import logging
import warnings
from xml.etree import ElementTree

import pytest
from fake_runs import fake_run
from flower_grid import MemoryGrid, numpy_app
from flwr.app import Error, Message, RecordDict
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from fedcor.cli import main
from fedcor.core.errors import ConfigError
from fedcor.core.text import for_csv, for_figure, lines, one_line
from fedcor.flower.client_registry import Claim, Roster, _readable
from fedcor.flower.exchange import Exchange
from fedcor.reporting.explanations import explanation as explain
from fedcor.reporting.plots import plot_experiment
from fedcor.reporting.reason_texts import render_explanation
from fedcor.reporting.screen import screen_text, to_html, to_latex
from fedcor.reporting.summary import summarise
from fedcor.reporting.tables import render as render_tables
from fedcor.reporting.tables import to_csv, to_json
from fedcor.runs.progress import show_rounds
from fedcor.runs.record import RECORD, RunRecord, client_names, read_run
from fedcor.runs.resume import write_client_names

NASTY = [
    *(
        "[/b]",
        "[red]",
        "[",
        "\\[",
        "a\nb",
        "a\r\nb",
        "\x1b[31mred",
        "\x9b31m",
        "\u202eabc",
        "a\u200bb",
    ),
    *(
        "\ud800",
        "\x00",
        "\x7f",
        "\x85",
        "\u2028",
        "$x$",
        r"$\frac",
        "_hidden",
        "=1+1",
        "@x",
        "-1",
        "+1",
    ),
    *(
        "",
        " ",
        "<script>",
        "&amp;",
        "%n",
        "{0}",
        "x" * 5000,
        "\\",
        "a\\",
        "a\tb",
        "'",
        '"',
        "~",
        "^",
    ),
]
TEXTS = st.text(st.characters(), max_size=30) | st.sampled_from(NASTY)


def examples(test):
    for text in NASTY:
        test = example(text)(test)
    return test


@examples
@given(TEXTS)
def test_one_line_is_printable_short_and_stays_as_it_is(text):
    shown = one_line(text, 40)
    assert shown.isprintable()
    assert len(shown) <= 40
    assert one_line(shown, 40) == shown
    assert (shown == text) == (text.isprintable() and len(text) <= 40)
    assert lines(text).replace("\n", "").isprintable()


@given(TEXTS, TEXTS)
def test_texts_that_differ_in_what_is_not_seen_are_shown_differently(one, other):
    if "\\" not in one + other:
        assert (one_line(one, None) == one_line(other, None)) == (one == other)


@examples
@given(TEXTS)
def test_a_spreadsheet_reads_no_formula(text):
    assert not for_csv(text).lstrip().startswith(("=", "+", "-", "@"))
    assert for_csv(text).removeprefix("'") == one_line(text, None).removeprefix("'")


def runs_named(text):
    """Two selectors, an experiment and a metric with this name."""
    options = {"experiment": f"e{text}", "metrics": {text: [0.2, 0.4, 0.6]}}
    return [
        fake_run([0.1, 0.4, 0.6], text, **options),
        fake_run([0.2, 0.4, 0.7], "random" + text, **options),
    ]


def assert_safe(shown):
    bad = {c for c in shown if not c.isprintable()} - {"\n"}
    assert not bad, f"{bad} in {shown!r}"


@examples
@given(TEXTS)
def test_any_name_is_reported(text):
    runs = runs_named(text)
    for measure in (None, text):
        if measure in ("accuracy", "loss"):
            continue
        summary = summarise(runs, measure=measure)
        out = io.StringIO()
        render_tables(summary, Console(file=out, width=90))
        assert_safe(out.getvalue())
        assert_safe(screen_text(summary))
        assert_safe(to_html(summary))
        assert_safe(to_latex(summary))
        assert_safe(to_json(summary))
        assert_safe(to_csv(summary))
        rows = list(csv.reader(io.StringIO(to_csv(summary))))
        assert all(not cell.startswith(("=", "@")) for row in rows for cell in row)
        assert json.loads(to_json(summary))["experiments"][0]["selectors"][0]["name"] == text
        page = to_html(summary)
        ElementTree.fromstring(f"<div>{page}</div>")
        assert "<script" not in page


def draw(text):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # characters that the font lacks
        figure = plot_experiment(
            summarise(runs_named(text), measure=text).experiments[0], ["rounds"]
        )
        content = io.BytesIO()
        figure.savefig(content, format="svg")
    ElementTree.fromstring(content.getvalue())
    (legend,) = figure.legends
    assert len(legend.get_texts()) == 2


@pytest.mark.parametrize("text", ["", r"$\frac", "_hidden", "\x00\ud800\x1b[31m<b>"], ids=ascii)
def test_a_nasty_name_is_drawn(text):
    draw(text)


@pytest.mark.slow
@examples
@given(TEXTS)
def test_any_name_is_drawn(text):
    draw(text)


def test_a_dollar_is_no_formula_in_a_figure():
    from matplotlib.figure import Figure

    figure = Figure()
    for text in (r"$\frac$", "$x$", r"\$", "a$", "$$", r"\\$x$"):
        drawn = figure.text(0, 0, for_figure(text))
        assert drawn._preprocess_math(drawn.get_text()) == (text, False)


@examples
@given(TEXTS)
def test_any_client_is_explained(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("run")
    write_client_names(folder, [text, "second\x85", text + "2", "last"])
    names = client_names(folder)
    assert len(names) == 4
    assert names[3] == "last"
    run = fake_run([0.1, 0.2, 0.3], text)
    run.rounds[0]["why"] = {text: [1.0, 2.0], "gain": [None, 0.5]}
    for round in (0, 1):
        explanation = explain(RunRecord(folder, run.header, run.rounds), round)
        out = io.StringIO()
        render_explanation(explanation, Console(file=out, width=100))
        assert_safe(out.getvalue())
        assert_safe(json.dumps(explanation))


def test_markup_in_a_name_is_explained_by_the_command(tmp_path, capsys):
    run = fake_run([0.1], "[/b]")
    content = [json.dumps(run.header), *map(json.dumps, run.rounds)]
    (tmp_path / RECORD).write_text("\n".join(content) + "\n")
    (tmp_path / "clients.tsv").write_bytes(b"0\t[/b]\x1b[31m\n1\t\xff\n2\tc\n3\td\n")
    assert main(["explain", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "[/b], round 0" in shown
    assert r"[/b]\x1b[31m" in shown
    for form in ("", "--full", "--csv", "--json", "--latex"):
        assert main(["report", str(tmp_path), *form.split()]) == 0
        assert_safe(capsys.readouterr().out)
    assert read_run(tmp_path).header["selector"] == "[/b]"


def test_what_the_command_refuses_is_shown_safely(capsys):
    assert main(["report", "a\x1b[31m"]) == 2
    assert main(["run", "digits", "--set", 'training."a\x1bb"=1']) == 2
    assert_safe(capsys.readouterr().err)


@examples
@given(TEXTS)
def test_an_error_is_short_and_printable(text):
    error = ConfigError(text, text, "must be something else")
    assert str(error).isprintable()
    assert len(str(error)) < 1000


def test_brackets_in_the_title_of_a_bar_are_no_markup(monkeypatch):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    monkeypatch.setattr("fedcor.runs.progress._console", lambda: console)
    with show_rounds("[/b]\x1b]0;x", 2) as update:
        update(1, "[/b]")
    assert r"[/b]\x1b]0;x" in Text.from_ansi(out.getvalue()).plain


# --- Flower ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def logged():
    records = []

    class Keep(logging.Handler):
        def emit(self, record):
            records.append(record.getMessage())

    log, handler = logging.getLogger("flwr.fedcor"), Keep()
    log.addHandler(handler)
    try:
        yield records
    finally:
        log.removeHandler(handler)


@examples
@given(TEXTS)
def test_what_clients_say_is_one_line_of_the_log(text):
    roster = Roster()
    with logged() as said:
        roster.enrol({1: Claim(text), 2: Claim(text)})
        exchange = Exchange(MemoryGrid(numpy_app(), 1), roster.names, 0)
        exchange.refuse(0, "unusable", text.replace("\n", " ") * 100, task="train")
        exchange.log_faults()
    assert len(said) == 2
    assert all(one.isprintable() and len(one) < 1000 for one in said), said


def test_an_errors_reason_forges_no_line_of_the_log():
    grid, roster = MemoryGrid(numpy_app(), 1), Roster()
    roster.enrol({7: Claim("c")})
    message = Message(RecordDict(), 7, "train")
    forged = "died\n2026-01-01 INFO: all is well\x1b[2J"
    reply = Message(Error(0, forged), reply_to=message)
    with logged() as said:
        exchange = Exchange(grid, roster.names, 0)
        exchange.match({0: message}, [reply], task="train")
        exchange.log_faults()
    (shown,) = said
    first, *others = shown.split("\n")
    assert first == r"round 1: client 0 (c): error: 2026-01-01 INFO: all is well\x1b[2J. In full:"
    assert others == ["    | died", r"    | 2026-01-01 INFO: all is well\x1b[2J"]


def test_names_that_differ_in_what_is_not_seen_are_two_clients():
    assert _readable("a") != _readable("a\u200b")
    assert _readable(" a\n") == "a"


@pytest.mark.parametrize("name", ["\x1b", "x" * 1000])
def test_a_name_is_printable_and_short(name):
    assert _readable(name).isprintable()
    assert 0 < len(_readable(name)) <= 200
