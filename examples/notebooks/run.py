"""Run the notebooks, and keep what they show: `python examples/notebooks/run.py`.

The site shows the kept outputs, and a test runs the notebooks.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent


def run(path: Path, folder: Path) -> nbformat.NotebookNode:
    """The notebook at `path` with its outputs, run in `folder`; raises if a cell fails."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}})
    client.km = client.create_kernel_manager()
    with tempfile.TemporaryDirectory() as sockets:  # files in the place of ports
        client.km.transport, client.km.ip = "ipc", f"{sockets}/kernel"
        client.execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times, which differ in every run
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if is_result(each)]
    return notebook


def is_result(output: nbformat.NotebookNode) -> bool:
    """Whether an output is more than progress and warnings."""
    shown = output.get("data", {}).get("text/html", "")
    return output.get("name") != "stderr" and "<progress" not in shown


if __name__ == "__main__":
    for path in sorted(HERE.glob("*.ipynb")):
        print(path.name)
        nbformat.write(run(path, HERE), path)
