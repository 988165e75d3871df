"""What the documents say is run, and the site is built."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
from html.parser import HTMLParser
from pathlib import Path

import pytest
from studies.__main__ import build_parser as build_study_parser

from fedcor.cli import main
from fedcor.cli.parser import build_parser
from studies import NAMES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(DOCS.rglob("*.md")),
    ROOT / "examples" / "flower" / "README.md",
    ROOT / "examples" / "flower-quickstart" / "README.md",
    ROOT / "examples" / "nvflare" / "README.md",
]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, language: str) -> list[tuple[str, str | None]]:
    """(text, title) of each block; a title is a file's name."""
    found = re.findall(
        rf'^( *)```{language}(?: title="(.*?)")?\n(.*?)^\1```',
        path.read_text(encoding="utf-8"),
        flags=re.DOTALL | re.MULTILINE,
    )
    return [(textwrap.dedent(text), title or None) for _, title, text in found]


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [path for path in DOCUMENTS if blocks(path, "python")], ids=name_of
)
def test_the_python_of_a_page_runs(path, tmp_path):
    """As a reader runs it: all blocks of a page in one script, those with a title also as files."""
    page = blocks(path, "python")
    for text, title in page:
        if title:
            (tmp_path / title).write_text(text, encoding="utf-8")
    (tmp_path / "page.py").write_text("\n".join(text for text, _ in page), encoding="utf-8")
    environment = {**os.environ, "MPLBACKEND": "Agg"}
    done = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_every_command_in_a_document_parses(path):
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")

    def arguments(program: str) -> list[list[str]]:
        found = re.findall(rf"(?:^|`|&& |do ){program}\b([^`\n;#&>|]*)", text, re.MULTILINE)
        return [shlex.split(words) for words in found]

    for words in arguments("fedcor (?=demo|run|compare|report|watch|explain|data)"):
        if len(words) > 1:  # `fedcor explain` alone names the command
            build_parser().parse_args(words)
    for words in arguments("python -m studies"):
        if words:
            assert build_study_parser().parse_args(words).what in (*NAMES, "NAME")
    assert "fedcor reproduce" not in text


def test_the_documented_experiment_runs(tmp_path):
    ((file, _),) = blocks(DOCS / "how-to" / "experiments.md", "toml")
    (tmp_path / "mine.toml").write_text(file)
    assert (
        main(["run", str(tmp_path / "mine.toml"), "--rounds", "3", "--out", str(tmp_path / "o")])
        == 0
    )


def test_the_documented_changes_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ((commands, _),) = blocks(DOCS / "how-to" / "experiments.md", "bash")
    for command in commands.splitlines():
        assert main([*shlex.split(command)[1:], "--rounds", "2"]) == 0


PLUGINS = ["own-partition.md", "own-optimiser.md", "own-metric.md", "optimisers.md", "faults.md"]


@pytest.mark.parametrize("page", PLUGINS)
def test_the_tables_that_name_a_readers_own_code_run(page, tmp_path, monkeypatch):
    """A preset, with the page's table in the place of the preset's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    ((table, _),) = blocks(DOCS / "how-to" / page, "toml")
    for text, title in blocks(DOCS / "how-to" / page, "python"):
        if title:
            Path(title).write_text(text, encoding="utf-8")
    metrics = [
        f"def {name}(targets, outputs):\n    return 0.5" for name in ("macro_f1", "top3_error")
    ]
    Path("mymetrics.py").write_text("\n\n".join(metrics))
    preset = (ROOT / "src" / "fedcor" / "simulation" / "presets" / "digits.toml").read_text(
        encoding="utf-8"
    )
    name = re.match(r"\[(\w+)\]", table)[1]
    rest = re.sub(rf"^\[{name}\]\n(?:(?!\[).*\n)*", "", preset, flags=re.MULTILINE)
    Path("mine.toml").write_text(f"{rest}\n{table}")
    assert main(["run", "mine.toml", "--selector", "random", "--rounds", "2"]) == 0


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_to_files_lead_somewhere(path):
    if path.is_relative_to(DOCS):
        return  # `make docs` checks them, and their anchors
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target


def test_the_design_page_has_every_room():
    text = (DOCS / "design.md").read_text(encoding="utf-8")
    for path in (ROOT / "src" / "fedcor").iterdir():
        room = path.name.removesuffix(".py")
        if path.suffix in ("", ".py") and not room.startswith("_"):
            assert re.search(rf"`{room}/?`", text), room


def test_make_has_the_readmes_two_commands():
    targets = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in ("demo", "test"):
        assert f"make {command}" in (ROOT / "README.md").read_text(encoding="utf-8")
        assert f"\n{command}:" in targets


@pytest.mark.slow
def test_the_pictures_are_those_that_the_script_draws(tmp_path):
    pictures = DOCS / "pictures"
    subprocess.run([sys.executable, str(pictures / "draw.py"), "--out", str(tmp_path)], check=True)
    assert {p.name for p in tmp_path.iterdir()} == {p.name for p in pictures.glob("*.svg")}


class Loaded(HTMLParser):
    """What a browser loads for a page from other machines."""

    def __init__(self):
        super().__init__()
        self.elsewhere: list[str] = []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        address = values.get("src") or (values.get("href") if tag == "link" else None) or ""
        if re.match(r"(https?:)?//", address):
            self.elsewhere.append(address)


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        loaded = Loaded()
        loaded.feed(page.read_text(encoding="utf-8"))
        assert not loaded.elsewhere, page
    for style in tmp_path.rglob("*.css"):
        assert "url(http" not in style.read_text(encoding="utf-8"), style


def test_the_flower_that_is_promised_is_the_flower_that_is_tested():
    make = (ROOT / "Makefile").read_text()
    tested = [
        re.search(rf"FLOWER_{age} := 1\.(\d+)\.\d+\n", make)[1] for age in ("OLDEST", "NEWEST")
    ]
    oldest, newest = map(int, tested)
    project = (ROOT / "pyproject.toml").read_text()
    promised = re.findall(r'"flwr(?:\[simulation\])?(.*?)"', project)
    assert promised == [f">=1.{oldest},<1.{newest + 1}"] * 2
    page = (DOCS / "how-to" / "flower.md").read_text(encoding="utf-8")
    assert f"`flwr` 1.{oldest} to 1.{newest}" in page


def test_the_page_on_flower_has_every_setting():
    flower = pytest.importorskip("fedcor.flower")
    page = (DOCS / "how-to" / "flower.md").read_text(encoding="utf-8")
    table = page.split("## Settings")[1].split("##")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(named) == sorted(vars(flower.SelectionSettings)["__dataclass_fields__"])


def test_the_explained_round_is_what_the_command_prints(tmp_path, monkeypatch, capsys):
    """Words and clients as on the page; numbers but for the rounding of another machine."""
    from fedcor.reporting.gp_calibration import health
    from fedcor.runs.record import read_run

    page = DOCS / "how-to" / "explain.md"
    run, explain = (
        shlex.split(line)[1:] for line in blocks(page, "bash")[0][0].strip().splitlines()
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    assert main(run) == 0
    capsys.readouterr()
    assert main(explain) == 0
    shown, text = capsys.readouterr().out, blocks(page, "text")[0][0]
    number = r"-?\d+\.?\d*(?:e-?\d+)?"
    folded = [re.sub(number, "#", " ".join(one.split())) for one in (shown, text)]
    assert folded[0] == folded[1]
    for ours, theirs in zip(re.findall(number, shown), re.findall(number, text), strict=True):
        assert float(ours) == pytest.approx(float(theirs), rel=0.02, abs=2e-4)

    found = health(read_run(tmp_path / "runs" / "why"))
    said = re.search(
        rf"over the (\d+) probe rounds after the first fit, `each` is ({number}) nats per client, "
        rf"`independent` ({number}), and `log_score` ({number})\. `agreement` is ({number}) in "
        rf"round 1 and ({number}) in round 12; `residual` is between ({number}) and ({number})\.",
        " ".join(page.read_text(encoding="utf-8").split()),
    )
    assert said is not None
    columns, values = found["rounds"], [found[k] for k in ("forecasts", "each", "independent")]
    agreed = dict(zip(columns["round"], columns["agreement"], strict=True))
    residuals = columns["residual"][1:]
    values += [found["log_score"], agreed[1], agreed[12], min(residuals), max(residuals)]
    assert [float(one) for one in said.groups()] == pytest.approx(values, rel=0.02)
