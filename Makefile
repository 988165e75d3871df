# Two commands do everything on a fresh machine: `make demo` (the main job) and `make test`.
PYTHON ?= python3
BIN := .venv/bin

# The oldest and the newest Flower that pyproject.toml promises.
FLOWER_OLDEST := 1.24.0
FLOWER_NEWEST := 1.42.0
# Their tests: those that need no Ray, without those that are about our own arithmetic.
FLOWER_TESTS := $(filter-out $(patsubst %, tests/flower/test_flower_%.py, simulation bridge optimisers \
    quarantine quickstart rules), $(wildcard tests/flower/test_flower*.py))

# The accessibility checker of the browser tests, which npm's registry has.
AXE_VERSION := 4.14.0
AXE := .venv/axe-core-$(AXE_VERSION).js

# FedLab, FLGo and pfl-research, and what they import that the main environment does not have.
RECIPES := fedlab==1.3.0 flgo==0.4.4 pfl==0.6.0 munch nvidia-ml-py prettytable ujson \
    dp-accounting==0.5.1 prv-accountant==0.2.0 dm-tree absl-py wrapt

.PHONY: demo test test-all coverage test-flower-versions test-browser test-trackers test-nvflare test-recipes \
    lint check format bench \
    torture licences docs package \
    package-test clean

demo: .venv/ready
	$(BIN)/fedcor demo

test: .venv/ready
	scripts/fetch-data fmnist
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not browser"

# The slow tests too.
test-all: test
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow

# Both with branch coverage, which takes about half as long again.
coverage: .venv/ready
	scripts/fetch-data fmnist
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not browser" --cov --cov-report=term

# Most of the Flower tests, on the oldest and the newest Flower that we promise.
test-flower-versions: .venv-flower/$(FLOWER_OLDEST)/ready .venv-flower/$(FLOWER_NEWEST)/ready
	for version in $(FLOWER_OLDEST) $(FLOWER_NEWEST); do \
	    echo "Flower $$version" && \
	    .venv-flower/$$version/bin/python -c \
	        "import flwr; assert flwr.__version__ == '$$version', flwr.__version__" && \
	    .venv-flower/$$version/bin/python -m pytest -n 2 -m "not slow" $(FLOWER_TESTS) || exit 1; \
	done

# The report page in Chromium. Debian's is installed if there is none and we may; elsewhere, name one
# in FEDCOR_CHROMIUM.
test-browser: .venv/ready .venv/browser $(AXE)
	@chromium=$${FEDCOR_CHROMIUM:-/usr/bin/chromium}; \
	if [ ! -x "$$chromium" ] && [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	    apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; \
	fi; \
	if [ ! -x "$$chromium" ]; then \
	    echo "there is no $$chromium: install Chromium (Debian: apt-get install chromium)," \
	        "or name it in FEDCOR_CHROMIUM"; exit 1; \
	fi
	FEDCOR_AXE=$(CURDIR)/$(AXE) $(BIN)/python -m pytest -m browser tests/reporting/test_browser.py

# The trackers' tests, with the real packages.
test-trackers: .venv-trackers/ready
	FEDCOR_TRACKERS=1 .venv-trackers/bin/python -m pytest -n 2 --dist worksteal \
	    tests/runs/test_trackers.py

# The recipes for other packages, with these packages.
test-recipes: .venv-recipes/ready
	FEDCOR_RECIPES=1 .venv-recipes/bin/python -m pytest -n 2 tests/runs/test_recipes.py

# Jobs in NVFlare's simulator, one file of tests per process. They mostly wait.
test-nvflare: .venv-nvflare/ready
	FEDCOR_NVFLARE=1 .venv-nvflare/bin/python -m pytest -n 4 --dist loadfile tests/nvflare

lint: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint test-all

format: .venv/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Every benchmark as one table of ratios: benchmarks/results.md and .json, and the page that shows
# them. FedLab and Flower get environments of their own when they are first needed.
bench: .venv/ready
	scripts/fetch-data fmnist
	scripts/fetch-data cifar10
	$(BIN)/python -m benchmarks.run

# Counted trials of crashes, disks, damaged files and bad input, one process per core: what was tried,
# how often, what was lost. Also written to runs/torture.md and runs/torture.json.
torture: .venv/ready
	scripts/fetch-data fmnist
	mkdir -p runs
	$(BIN)/python -m torture --out runs/torture

# Name, version and licence of everything that is installed; fails where one is unknown or not free.
licences: .venv/ready
	$(BIN)/python -m torture.licences

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
	rm -rf .venv .venv-bench .venv-flower .venv-nvflare .venv-recipes .venv-trackers build dist \
	    .coverage .coverage.* .pytest_cache .mypy_cache \
	    .ruff_cache .hypothesis

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip -c constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable '.[dev]'
	touch .venv/ready

.venv/browser: .venv/ready
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable '.[browser]'
	touch $@

$(AXE): .venv/ready
	$(BIN)/python tests/support/fetch_axe.py $(AXE_VERSION) $@

# TensorBoard, MLflow and Weights & Biases: 200 MB for one file of tests. All else is the main
# environment's, which is found last.
.venv-trackers/ready: .venv/ready
	$(PYTHON) -m venv .venv-trackers
	$(BIN)/python -c "import sysconfig; \
	    print(f'import site; site.addsitedir({sysconfig.get_path(\"purelib\")!r})')" \
	    > $$(echo .venv-trackers/lib/python3*/site-packages)/main.pth
	.venv-trackers/bin/python -m pip install --quiet -c constraints.txt \
	    tensorboard mlflow-skinny wandb
	touch $@

# Without their dependencies: they name torchvision, and versions of packages that the main environment
# has already. All else is the main environment's, which is found last.
.venv-recipes/ready: .venv/ready
	$(PYTHON) -m venv .venv-recipes
	$(BIN)/python -c "import sysconfig; \
	    print(f'import site; site.addsitedir({sysconfig.get_path(\"purelib\")!r})')" \
	    > $$(echo .venv-recipes/lib/python3*/site-packages)/main.pth
	.venv-recipes/bin/python -m pip install --quiet -c constraints.txt --no-deps $(RECIPES)
	touch $@

# NVFlare, for one folder of tests. All else is the main environment's, which is found last.
.venv-nvflare/ready: .venv/ready
	$(PYTHON) -m venv .venv-nvflare
	$(BIN)/python -c "import sysconfig; \
	    print(f'import site; site.addsitedir({sysconfig.get_path(\"purelib\")!r})')" \
	    > $$(echo .venv-nvflare/lib/python3*/site-packages)/main.pth
	.venv-nvflare/bin/python -m pip install --quiet -c constraints.txt nvflare
	touch $@

# One Flower, and what it needs where the main environment has other versions. All else is the main
# environment's, which is found last.
.venv-flower/%/ready: .venv/ready
	$(PYTHON) -m venv .venv-flower/$*
	$(BIN)/python -c "import sysconfig; \
	    print(f'import site; site.addsitedir({sysconfig.get_path(\"purelib\")!r})')" \
	    > $$(echo .venv-flower/$*/lib/python3*/site-packages)/main.pth
	.venv-flower/$*/bin/python -m pip install --quiet --no-warn-conflicts $(FLOWER_FLAGS) flwr==$*
	touch $@

# It needs newer patches of packages than every index has; its tests run with those that are there.
.venv-flower/$(FLOWER_NEWEST)/ready: FLOWER_FLAGS := --no-deps
