"""What MkDocs builds beside the written pages: the reference, the command line, the notebooks.

They are made from the code at each build, so they cannot say anything else than the code.
"""

from __future__ import annotations

import argparse
import base64
import importlib
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ROOT / "examples" / "notebooks"
log = logging.getLogger("mkdocs.hooks.fedcor")

# The names of the package by what they are for. One that is public and not here comes last.
GROUPS = {
    "Run and compare": ["compare", "run", "simulate", "load", "Result"],
    "Experiments": ["experiment", "Experiment", "Faults", "Devices", "Byzantine", "Rules"],
    "Partitions": ["IID", "Shards", "Dirichlet"],
    "Federated optimisers": [
        "FedAvg", "FedProx", "FedAvgM", "FedAdagrad", "FedAdam", "FedYogi", "FedNova", "Scaffold",
        "FedDyn", "MIFA", "FedVARP", "FedStale", "FedExP", "FedRecall", "TrimmedMean",
        "GeometricMedian", "MultiKrum",
    ],
    "Selectors": [
        "FedCor", "Complement", "Random", "AFL", "PowerOfChoice", "Oort", "Proxy", "Full",
        "build_selector",
    ],
    "Writing a selector": ["Selector", "Federation", "Outcome", "Population", "State"],
    "Writing a federated optimiser": ["Optimiser", "Delivery"],
}  # fmt: skip
# Of `fedcor.data`, what a user needs beside the names above; the rest serves the package.
DATA = [
    "as_dataset", "parts_of", "Dataset", "load", "available", "Listing", "fetch", "cache_dir",
    "ClientData", "SyntheticPopulation", "FolderPopulation",
]  # fmt: skip


# Protocols of a user's own parts, and the records that functions return.
TYPES = [
    "fedcor.core.types.SelectorTraits",
    "fedcor.core.types.Questions",
    "fedcor.core.types.OptimiserTraits",
    "fedcor.simulation.schedules.Schedule",
    "fedcor.rounds.rules.seats.Seats",
    "fedcor.runs.record.RoundRecord",
    "fedcor.runs.record.RunRecord",
    "fedcor.simulation.state.SimulationState",
    "fedcor.runs.tracking.callback.Callback",
    "fedcor.runs.tracking.callback.StartedRun",
]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are made from the code."""
    pages = {
        "reference/fedcor.md": package_page(),
        "reference/data.md": module_page("fedcor.data", DATA),
        "reference/flower.md": module_page("fedcor.flower"),
        "reference/testing.md": module_page("fedcor.testing"),
        "reference/types.md": types_page(),
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


def types_page() -> str:
    """What the functions above take and return, beside the public names."""
    listed = "".join(f"\n::: {name}\n" for name in TYPES)
    return (
        f"# Protocols and records\n\nWhat your own parts look like, and what comes back.\n{listed}"
    )


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


def module_page(name: str, wanted: list[str] | None = None) -> str:
    """The public names of a module, or those that are wanted of them."""
    public = importlib.import_module(name).__all__
    names = [each for each in wanted or public if each in public]
    return "\n".join([f"# {name}", *(f"\n::: {name}.{each}" for each in names)]) + "\n"


def command_line_page() -> str:
    """The help of `fedcor` and of each of its commands."""
    from fedcor.cli.parser import build_parser

    os.environ["COLUMNS"] = "76"
    lines = ["# Command line", "", "What `fedcor --help` and `fedcor COMMAND --help` print."]
    for name, text in helps(build_parser()):
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
