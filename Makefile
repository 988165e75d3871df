# Two commands do everything on a fresh machine: `make demo` (the main job) and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-all lint check format bench docs package package-test clean

demo: .venv/ready
	$(BIN)/fedcor demo

test: .venv/ready
	$(BIN)/fedcor data fetch fmnist
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" --cov --cov-report=

# The slow tests too, and the coverage of all of them.
test-all: test
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow --cov --cov-append --cov-report=term

lint: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint test-all

format: .venv/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/ready
	$(BIN)/fedcor data fetch fmnist
	$(BIN)/python benchmarks/run.py
	$(BIN)/python benchmarks/flower_overhead.py

# The documentation site in site/. A warning is an error, and so is a link that leads nowhere.
docs: .venv/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --clean

# A wheel and an sdist in dist/.
package: .venv/ready
	rm -rf dist
	$(BIN)/python -m build --quiet

# The wheel, installed in a clean environment outside the repository, runs the demo there.
package-test: package
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
	$(PYTHON) -m venv "$$folder/venv" && \
	"$$folder/venv/bin/python" -m pip install --quiet -c constraints.txt \
	    "$$(ls dist/*.whl)[sim,plot]" && \
	cd "$$folder" && venv/bin/fedcor demo

clean:
	rm -rf .venv build dist .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip -c constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable '.[dev]'
	touch .venv/ready
