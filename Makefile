# Two commands do everything on a fresh machine: `make demo` (the main job) and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check format bench clean

demo: .venv/ready
	$(BIN)/fedcor demo

test: .venv/ready
	$(BIN)/fedcor data fetch fmnist
	$(BIN)/python -m pytest -n 2 --cov --cov-report=term

check: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(MAKE) test

format: .venv/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/ready
	$(BIN)/fedcor data fetch fmnist
	$(BIN)/python benchmarks/run.py
	$(BIN)/python benchmarks/flower_overhead.py

clean:
	rm -rf .venv build .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip -c constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable '.[dev]'
	touch .venv/ready
