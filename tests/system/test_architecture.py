"""The shape of the package: imports point one way, the core is light, every name is explained."""

from __future__ import annotations

import ast
import doctest
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import fedcor
import fedcor.testing
from fedcor.cli import main

SOURCE = Path(fedcor.__file__).parent
# A room may import only rooms that stand before it (and itself).
ORDER = [
    "core", "rounds", "selectors", "optimisers", "testing", "data", "simulation", "runs",
    "reporting", "flower", "nvflare", "api", "cli", "__main__",
]  # fmt: skip
# The Gaussian process is maths on arrays: it knows no federation.
GP_MAY_IMPORT = {"fedcor.core.types", "fedcor.selectors.numba_passes"}


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(parse(path)):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = (
                [node.module]
                if node.module != "fedcor"
                else [f"fedcor.{alias.name}" for alias in node.names]
            )
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}: relative import"
        rooms |= {name.split(".")[1] for name in names if name.startswith("fedcor.")}
    return rooms


def test_imports_point_one_way():
    files = [path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py"]
    assert len(files) > 30
    assert {path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in files} == set(ORDER)
    for path in files:
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        for other in imported_rooms(path) - {room}:
            assert ORDER.index(other) < ORDER.index(room), f"{path} imports {other}"


def test_the_process_knows_no_federation():
    for path in (SOURCE / "selectors" / "gp").glob("*.py"):
        for node in ast.walk(parse(path)):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            if module and module.startswith("fedcor."):
                own = module.startswith("fedcor.selectors.gp.")
                assert own or module in GP_MAY_IMPORT, f"{path} imports {module}"


def functions(path: Path) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(parse(path)) if isinstance(node, ast.FunctionDef)]


def test_no_module_is_long_and_no_function_is_long_or_takes_many_positional_arguments():
    flowers_own = {("flower", "start")}  # its signature is Flower's
    for path in SOURCE.rglob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 500, path
        for node in functions(path):
            body = node.body[1:] if ast.get_docstring(node) and node.body[1:] else node.body
            lines = node.end_lineno - body[0].lineno + 1
            assert lines <= 60, f"{path}: {node.name} has {lines} lines"
            positional = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
            count = len([name for name in positional if name not in ("self", "cls")])
            if (path.parent.name, node.name) not in flowers_own:
                assert count <= 5, f"{path}: {node.name} takes {count} positional arguments"


def test_only_their_rooms_import_flower_nvflare_ray_and_dask():
    for path in SOURCE.rglob("*.py"):
        nodes = list(ast.walk(parse(path)))
        modules = [n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)]
        modules += [a.name for n in nodes if isinstance(n, ast.Import) for a in n.names]
        packages = {name.split(".")[0] for name in modules}
        if "flwr" in packages:
            assert path.parent.name == "flower", path
        if "nvflare" in packages:
            assert path.parent.name == "nvflare", path
        if packages & {"ray", "distributed"}:
            assert path.parent.name in ("flower", "cluster"), path


def test_without_flower_the_room_says_what_to_install(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("fedcor.flower")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ImportError, match=r"pip install 'fedcor\[flower\]'"):
        import fedcor.flower  # noqa: F401
    assert main(["run", "digits", "--engine", "flower"]) == 2
    assert "pip install 'fedcor[flower-sim]'" in capsys.readouterr().err


def test_without_nvflare_the_room_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("fedcor.nvflare")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ImportError, match=r"pip install 'fedcor\[nvflare\]'"):
        import fedcor.nvflare  # noqa: F401


def test_modules_within_a_room_do_not_import_in_circles():
    graph = {}
    for path in SOURCE.rglob("*.py"):
        name = ".".join(("fedcor", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(
            ".__init__"
        )
        imports = [n for n in ast.walk(parse(path)) if isinstance(n, ast.ImportFrom)]
        graph[name] = {
            f"fedcor.{alias.name}" if n.module == "fedcor" else n.module
            for n in imports
            for alias in n.names
            if n.module
        }
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name in done or name not in graph:
            return
        for other in graph[name]:
            if other in graph and other != name:
                visit(other, (*trail, name))
        done.add(name)

    for name in graph:
        visit(name, ())


def test_the_core_needs_numpy_and_scipy_alone():
    """In an interpreter that refuses every other installed package."""
    program = """
import sys
from importlib.metadata import packages_distributions
others = set(packages_distributions()) - {"fedcor", "numpy", "scipy"}
assert {"torch", "rich", "sklearn"} <= others
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in others:
            raise ImportError(f"the core imported {name}")
sys.meta_path.insert(0, Refuse())
import fedcor, fedcor.selectors, fedcor.testing
from fedcor.testing import FakeFederation, check_selector
check_selector(fedcor.FedCor(3, warmup=2, interval=2, dimension=2))
try:
    import fedcor.simulation.engine
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "pip install 'fedcor[sim]'" in done.stdout


def test_public_names():
    assert set(fedcor.__all__) == {
        "AFL", "Complement", "Delivery", "Dirichlet", "Experiment", "Faults", "FedAvg", "FedCor",
        "FedProx", "Federation", "Full", "IID", "Optimiser", "Outcome", "Population",
        "PowerOfChoice", "Proxy", "Random", "Result", "Selector", "Shards", "State", "__version__",
        "build_selector", "compare", "experiment", "load", "run", "simulate",
        "FedAdagrad", "FedAdam", "FedAvgM", "FedDyn", "FedExP", "FedNova", "FedStale", "FedVARP",
        "FedYogi", "GeometricMedian", "MIFA", "MultiKrum", "Scaffold", "TrimmedMean",
        "Aligned", "Defence", "Devices", "FedRecall", "Byzantine", "Oort", "RoundRobin", "Rules",
        "Callback", "ClientData", "FedcorError", "FolderPopulation", "SyntheticPopulation",
        "Rounds", "as_dataset",
    }  # fmt: skip
    assert dir(fedcor) == sorted(fedcor.__all__)
    assert all(hasattr(fedcor, name) for name in fedcor.__all__)
    assert fedcor.testing.__all__ == [
        "FakeFederation",
        "check_optimiser",
        "check_selector",
        "round_trip",
    ]


def undocumented(node: ast.AST) -> list[str]:
    """The public classes, functions, methods and properties in `node` that have no docstring."""
    missing = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If | ast.Try):
            missing += undocumented(child)
        if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        decorators = {
            ast.unparse(decorator).rpartition(".")[2] for decorator in child.decorator_list
        }
        if child.name.startswith("_") or decorators & {"overload", "setter", "deleter"}:
            continue
        if ast.get_docstring(child) is None:
            missing.append(child.name)
        if isinstance(child, ast.ClassDef):
            missing += [f"{child.name}.{name}" for name in undocumented(child)]
    return missing


def test_every_public_name_has_a_docstring():
    missing = [
        f"{path.relative_to(SOURCE)}: {name}"
        for path in sorted(SOURCE.rglob("*.py"))
        for name in undocumented(parse(path))
    ]
    assert not missing, "no docstring:\n" + "\n".join(missing)


def modules_with_examples() -> list[str]:
    return [
        ".".join(("fedcor", *path.relative_to(SOURCE).with_suffix("").parts))
        for path in sorted(SOURCE.rglob("*.py"))
        if ">>>" in path.read_text(encoding="utf-8") and path.name != "__init__.py"
    ]


@pytest.mark.parametrize("name", modules_with_examples())
def test_the_examples_in_docstrings_run(name):
    failed, attempted = doctest.testmod(importlib.import_module(name))
    assert attempted
    assert not failed


def test_a_simulator_without_torch_says_what_to_install():
    program = """
import sys
sys.modules["torch"] = None
from fedcor.cli import main
sys.exit(main(["run", "digits"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install 'fedcor[sim]' (from a clone: pip install '.[sim]')" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_package_is_there_at_once_and_brings_its_names_when_they_are_used():
    program = """
import sys, fedcor
assert "numpy" not in sys.modules
assert fedcor.FedCor(3).clients_per_round == 3
try:
    fedcor.FedCro
except AttributeError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "module 'fedcor' has no attribute 'FedCro'"


def test_an_interrupt_while_packages_are_still_loading_is_a_line():
    program = """
import sys
class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == "fedcor.cli":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
from fedcor.__main__ import main
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 130
    assert done.stderr == "fedcor: interrupted before anything started\n"
