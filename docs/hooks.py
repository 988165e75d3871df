"""The pages that MkDocs generates from the code: the reference, the command lines, the notebooks.

They are made anew at each build, so they always agree with the code.
"""

from __future__ import annotations

import argparse
import base64
import importlib
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ROOT / "examples" / "notebooks"
log = logging.getLogger("mkdocs.hooks.fedcor")

# The public names by purpose. A public name that is missing here comes last, under "More".
GROUPS = {
    "Run and compare": ["compare", "run", "simulate", "load", "Result"],
    "Your own training loop": ["Rounds"],
    "Experiments": [
        "experiment", "Experiment", "Faults", "Devices", "Byzantine", "Defence", "Rules",
        "Callback", "FedcorError",
    ],
    "Data and partitions": [
        "IID", "Shards", "Dirichlet", "as_dataset", "ClientData", "SyntheticPopulation",
        "FolderPopulation",
    ],
    "Federated optimisers": [
        "FedAvg", "FedProx", "FedAvgM", "FedAdagrad", "FedAdam", "FedYogi", "FedNova", "Scaffold",
        "FedDyn", "MIFA", "FedVARP", "FedStale", "FedExP", "FedRecall", "TrimmedMean",
        "GeometricMedian", "MultiKrum",
    ],
    "Selectors": [
        "Aligned", "FedCor", "Complement", "Random", "RoundRobin", "AFL", "PowerOfChoice", "Oort",
        "Proxy", "Full", "build_selector",
    ],
    "Writing a selector": ["Selector", "Federation", "Outcome", "Population", "State"],
    "Writing a federated optimiser": ["Optimiser", "Delivery"],
}  # fmt: skip
# What a user may need of `fedcor.data` beside the public names.
DATA = [
    "fedcor.data.own_data.clients_of",
    "fedcor.data.datasets.Dataset",
    "fedcor.data.datasets.load",
    "fedcor.data.datasets.available",
    "fedcor.data.datasets.Listing",
    "fedcor.data.downloads.fetch",
    "fedcor.data.cache.cache_dir",
]
# Protocols of a user's own parts, and the records that functions return.
TYPES = [
    "fedcor.core.types.SelectorTraits",
    "fedcor.core.types.Questions",
    "fedcor.core.types.OptimiserTraits",
    "fedcor.simulation.schedules.Schedule",
    "fedcor.rounds.rules.seats.Seats",
    "fedcor.rounds.record_line.RoundRecord",
    "fedcor.runs.record.RunRecord",
    "fedcor.runs.answers.Question",
    "fedcor.runs.loop_settings.LoopSettings",
    "fedcor.simulation.state.SimulationState",
    "fedcor.runs.tracking.callback.StartedRun",
]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are generated from the code."""
    pages = {
        "reference/fedcor.md": package_page(),
        "reference/data.md": listing_page("fedcor.data", "Data sets and their files.", DATA),
        "reference/flower.md": module_page("fedcor.flower"),
        "reference/testing.md": module_page("fedcor.testing"),
        "reference/types.md": listing_page(
            "Protocols and records", "The form of your own parts, and of what is returned.", TYPES
        ),
        "reference/command-line.md": command_line_page(),
    }
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        page, pictures = notebook_page(path)
        pages[f"notebooks/{path.stem}.md"] = page
        for name, content in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def listing_page(title: str, about: str, names: list[str]) -> str:
    """A page of names, each with the module that defines it."""
    return f"# {title}\n\n{about}\n" + "".join(f"\n::: {name}\n" for name in names)


def package_page() -> str:
    """The public names of `fedcor`, by group."""
    import fedcor

    public = [name for name in fedcor.__all__ if not name.startswith("_")]
    grouped = {name for names in GROUPS.values() for name in names}
    groups = {**GROUPS, "More": [name for name in public if name not in grouped]}
    lines = ["# fedcor", "", "`import fedcor` gives these names."]
    for title, names in groups.items():
        here = [name for name in names if name in public]
        if here:
            # All selectors have the same methods; they are explained at `Selector`.
            options = "\n    options:\n      members: false" if title == "Selectors" else ""
            lines += ["", f"## {title}", *(f"\n::: fedcor.{name}{options}" for name in here)]
    return "\n".join(lines) + "\n"


def module_page(name: str) -> str:
    """The public names of a module."""
    public = importlib.import_module(name).__all__
    return "\n".join([f"# {name}", *(f"\n::: {name}.{each}" for each in public)]) + "\n"


def command_line_page() -> str:
    """The help of `fedcor`, of each of its commands, and of `python -m studies`."""
    from fedcor.cli import parser

    sys.path.insert(0, str(ROOT))  # studies/ is beside the package, and not installed
    from studies import __main__ as studies

    os.environ["COLUMNS"] = "76"
    lines = ["# Command line", "", "What `fedcor --help` and `fedcor COMMAND --help` print."]
    lines += ["`python -m studies` runs in a copy of the repository; it is not installed."]
    for build in (parser.build_parser, studies.build_parser):
        for name, text in helps(build()):
            lines += ["", f"## {name}", "", "```text", text.rstrip(), "```"]
    return "\n".join(lines) + "\n"


def helps(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """(command, help) of a parser and of the commands below it."""
    yield parser.prog, parser.format_help()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from helps(below)


def notebook_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as a page with its stored outputs, and the pictures that the page shows."""
    notebook = nbformat.read(path, as_version=4)
    pictures: dict[str, bytes] = {}
    parts = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        elif cell.cell_type == "code":
            parts.append(f"```py\n{cell.source}\n```")
            parts += [shown(output, path.stem, pictures) for output in cell.outputs]
    if any(cell.get("execution_count", 0) is None for cell in notebook.cells):
        log.warning("%s was not run: python examples/notebooks/run.py", path.name)
    source = f"*This page is the notebook `{path.relative_to(ROOT)}`.*"
    title, _, rest = "\n\n".join(part for part in parts if part).partition("\n")
    return f"{title}\n\n{source}\n{rest}\n", pictures


def shown(output: Any, stem: str, pictures: dict[str, bytes]) -> str:
    """One output of a cell in Markdown: a picture, a table, or text."""
    if output.output_type == "stream":
        return (
            f"```{{.text .output}}\n{output.text.rstrip()}\n```" if output.name == "stdout" else ""
        )
    data = output.get("data", {})
    if "image/png" in data:
        name = f"{stem}-{len(pictures)}.png"
        pictures[name] = base64.b64decode(data["image/png"])
        return f"![What the cell above draws]({name})"
    if "text/html" in data:
        plain = re.sub(r' (border|class)="[^"]*"', "", data["text/html"])  # the site's own style
        plain = re.sub(r"<style.*?</style>", "", plain, flags=re.DOTALL)
        lines = [line.strip() for line in plain.splitlines()]
        return f'<div class="output">{" ".join(line for line in lines if line)}</div>'
    if "text/plain" in data:
        return as_text(data["text/plain"])
    return ""


def as_text(text: str) -> str:
    """Text that a cell shows."""
    return f"``` {{.text .output}}\n{text.rstrip()}\n```"
