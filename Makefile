# `make demo` and `make test` work on a fresh clone with nothing but Python, and again when run twice.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_CONSTRAINT := constraints.txt
export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint install clean

demo: $(VENV)/.demo-installed
	$(BIN)/holdfast reproduce toy --preset paper --seeds 1 --jobs 2 --no-extras --out demo

test: lint
	$(BIN)/pytest

lint: $(VENV)/.dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(VENV)/.dev-installed

$(VENV)/.dev-installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@ $(VENV)/.demo-installed

$(VENV)/.demo-installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[experiments]'
	touch $@

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) demo .pytest_cache .mypy_cache .ruff_cache
