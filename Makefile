# One virtual environment, made when first needed. `make help` lists the targets.

PYTHON ?= python3
VENV ?= .venv
# Installed first and alone, so that nothing else chooses the build. For another one name it with its index, as the
# install page of PyTorch gives it:  make study TORCH="torch==2.13.0 --index-url <the index of that build>"
TORCH ?= torch==2.13.0
STUDY ?= studies/quickstart.yaml
PYTEST_ARGS ?= -n 2 --dist loadfile --no-loadscope-reorder

BIN := $(VENV)/bin
BASE := $(VENV)/.installed
DEV := $(VENV)/.installed-dev

# Where it is set each process compiles all sources anew, and the tests start hundreds.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help study dashboard docs site lock audit golden test test-slow test-all storm partitions fuzz check bench gpu venv venv-dev

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

study: $(BASE) ## train the first study and print its table (STUDY=studies/other.yaml)
	$(BIN)/archlab run $(STUDY)
	$(BIN)/archlab report $(STUDY)

dashboard: $(BASE) ## show the studies in a browser
	$(BIN)/archlab dashboard

test: $(DEV) ## run the tests, without the slow ones (PYTEST_ARGS="-x -k gate")
	$(BIN)/python -m pytest -q -m "not slow" $(PYTEST_ARGS)

test-slow: $(DEV) ## run the slow tests
	$(BIN)/python -m pytest -q -m slow $(PYTEST_ARGS)

test-all: $(DEV) ## run all tests, with every value of every field and every kernel where test-slow tries some: an hour and more
	ARCHLAB_ALL=1 $(BIN)/python -m pytest -q $(PYTEST_ARGS)

storm: $(DEV) ## kill whatever runs a study, at random moments, in twenty studies (STORM_ARGS="--seeds 2")
	$(BIN)/python -m tests.search.storm $(STORM_ARGS)

partitions: $(DEV) ## take a cluster apart while it runs a study, fifty times (root, Linux; PARTITIONS_ARGS="--seeds 2")
	$(BIN)/python -m tests.search.partitions $(PARTITIONS_ARGS)

fuzz: $(DEV) ## 3,000 inputs that nobody wrote for each test that takes any: hours
	ARCHLAB_FUZZ=3000 $(BIN)/python -m pytest -q tests/fuzz --timeout 0 $(PYTEST_ARGS)

check: $(DEV) ## format, lint, types, and which way imports point
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

docs: $(DEV) ## write the pages that are made from the code
	$(BIN)/archlab primitives --format md > docs/reference/primitives.md.new && mv docs/reference/primitives.md.new docs/reference/primitives.md
	$(BIN)/archlab schema > docs/study.schema.json.new && mv docs/study.schema.json.new docs/study.schema.json

site: $(DEV) ## build the documentation as a site: build/docs/site/index.html
	$(BIN)/python docs/make_site.py

lock: ## choose the versions of .ci/locked.txt anew (needs uv)
	{ sed -n 1p .ci/locked.txt; echo "torch; sys_platform == 'never'" | uv pip compile pyproject.toml --override - --upgrade \
	    --generate-hashes --python-version 3.11 --python-platform x86_64-manylinux_2_28 --no-header --no-annotate --quiet; } \
	    > .ci/locked.new && mv .ci/locked.new .ci/locked.txt

audit: ## known vulnerabilities of these versions (needs pip-audit, and the network)
	pip-audit --requirement .ci/locked.txt --no-deps --disable-pip

golden: $(DEV) ## write what the variants of every study are, and the list of studies
	$(BIN)/python -m tests.golden

bench: $(DEV) ## measure ours beside what a user could pick instead
	set -e; for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script; done

gpu: $(BASE) ## check and measure the card of this machine, in 22 minutes at most: gpu-report-<card>.md to keep or to send
	$(BIN)/archlab bench --gpu

venv: $(BASE) ## install what a study needs

venv-dev: $(DEV) ## install what tests, lint and benchmarks need as well

$(BASE): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "archlab needs Python 3.11 or newer: make PYTHON=python3.12")'
	@echo 'Installing into $(VENV): a few minutes and some gigabytes, most of them torch.'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(DEV): $(BASE)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@
