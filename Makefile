# Every target sets itself up: it needs Python 3.11 or newer, pip and make, and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo test check format bench clean
help:
	@echo "make demo    train on real data, get preempted half-way, resume, verify, list"
	@echo "make test    run the tests"
	@echo "make check   lint, formatting and types"
	@echo "make format  put the code into shape"
	@echo "make bench   compare with other ways to save checkpoints, on this disk"
	@echo "make clean   remove everything that make has made"

$(READY): pyproject.toml constraints.txt hatch_build.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY)
	$(BIN)/python -m holdfast.cli.demo

test: $(READY)
	$(BIN)/python -m pytest

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python -m benchmarks.compare

clean:
	rm -rf $(VENV) build dist runs .mypy_cache .pytest_cache .ruff_cache .hypothesis
