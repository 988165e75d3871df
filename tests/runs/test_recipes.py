"""The recipes for other packages, each run with its package.

`make test-recipes` installs the packages and sets FEDCOR_RECIPES; else a recipe whose package is
missing is skipped.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "recipes"
PAGE = (ROOT / "docs" / "how-to" / "recipes.md").read_text(encoding="utf-8")
FILES = sorted(path.name for path in RECIPES.glob("*.py"))
PACKAGES = {"fedlab_recipe.py": "fedlab", "flgo_recipe.py": "flgo", "pfl_research_recipe.py": "pfl"}


@pytest.mark.parametrize("name", FILES)
def test_the_page_shows_the_file(name):
    block = PAGE.split(f'```py title="examples/recipes/{name}"\n')[1].split("```")[0]
    assert block == (RECIPES / name).read_text(encoding="utf-8")


@pytest.fixture
def stand_ins(tmp_path):
    """A folder with an empty torchvision, where the real one cannot be imported.

    FedLab imports it for image data sets of its own, and what an index has may be for another build
    of torch.
    """
    folder = tmp_path / "stand-ins"
    folder.mkdir()
    if subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True).returncode:
        package = folder / "torchvision"
        package.mkdir()
        for module in ("__init__", "datasets", "transforms"):
            (package / f"{module}.py").touch()
    return folder


@pytest.mark.parametrize(
    ("name", "selector"),
    [
        *((name, "None") for name in PACKAGES),
        ("fedlab_recipe.py", '"fedcor"'),
        ("flgo_recipe.py", '"fedcor"'),
    ],
)
def test_the_recipe_runs(name, selector, tmp_path, stand_ins):
    package = PACKAGES[name]
    if importlib.util.find_spec(package) is None:
        assert "FEDCOR_RECIPES" not in os.environ, f"{package} is not installed"
        pytest.skip(f"{package} is not installed")
    text = (RECIPES / name).read_text(encoding="utf-8")
    changed = re.sub("^SELECTOR = None", f"SELECTOR = {selector}", text, flags=re.MULTILINE)
    assert (changed == text) == (selector == "None")
    (tmp_path / name).write_text(changed, encoding="utf-8")
    path = os.pathsep.join([*filter(None, sys.path), str(RECIPES), str(stand_ins)])
    done = subprocess.run(
        [sys.executable, name],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(re.search(r"accuracy (\S+)\s*$", done.stdout)[1]) > 0.3  # chance is .1
