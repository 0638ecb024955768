# Every target sets itself up: it needs Python 3.11 or newer, pip and make, and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

MINIMUM := .venv-minimum
PARALLEL := --numprocesses=auto --dist=loadgroup

.PHONY: help demo test test-all test-servers test-minimum check docs format bench gpu gpu-wheels clean
help:
	@echo "make demo          train on real data, get preempted half-way, resume, verify, list"
	@echo "make test          run the tests, in parallel"
	@echo "make test-all      run the tests and the sweeps over every combination"
	@echo "make test-servers  run the tests of object stores against the servers that are installed"
	@echo "make test-minimum  run the tests with the oldest supported versions of all dependencies"
	@echo "make check         lint, formatting and types"
	@echo "make docs          build the site of the documentation in build/site"
	@echo "make format        put the code into shape"
	@echo "make bench         compare with other ways to save checkpoints, on this disk"
	@echo "make gpu           test and measure on this machine's NVIDIA GPU, in eight minutes, without a network"
	@echo "make gpu-wheels    load what a machine with a GPU may lack for that into build/gpu-wheels"
	@echo "make clean         remove everything that make has made"

$(READY): pyproject.toml constraints.txt
	@echo "Installing what tests and documentation need into $(VENV): about 2.2 GB are loaded"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

# The demonstration needs jax and scikit-learn: an environment of its own, or that of the tests where it exists.
DEMO := $(if $(wildcard $(READY)),$(VENV),.venv-demo)
.venv-demo/.ready: pyproject.toml constraints.txt
	@echo "Installing what the demonstration needs into .venv-demo: about 190 MB to load, 830 MB on the disk; no torch"
	$(PYTHON) -m venv .venv-demo
	.venv-demo/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[flax,recipes]'
	@touch $@

demo: $(DEMO)/.ready
	$(DEMO)/bin/python -m holdfast.cli.demo

test: $(READY)
	$(BIN)/python -m pytest $(PARALLEL)

test-all: $(READY)
	$(BIN)/python -m pytest $(PARALLEL) -m "not servers"

test-servers: $(READY)
	PATH="$(CURDIR)/node_modules/.bin:$$PATH" $(BIN)/python -m pytest -m servers -rs tests/object_stores/test_real_servers.py

$(MINIMUM)/.ready: pyproject.toml minimum.txt
	$(PYTHON) -m venv $(MINIMUM)
	$(MINIMUM)/bin/python -m pip install --quiet --disable-pip-version-check --constraint minimum.txt torch
	$(MINIMUM)/bin/python -m pip install --quiet --disable-pip-version-check --constraint minimum.txt --editable '.[dev]'
	@touch $@

# TESTS=tests/format runs a part of them, TESTS=core the part that .ci/run takes.
CORE := tests/checkpoint tests/earlier_versions tests/format tests/pytree tests/storage \
	tests/integrations/test_init_from.py tests/integrations/lightning/test_lightning_resume.py \
	tests/test_exports.py tests/test_versions.py
test-minimum: $(MINIMUM)/.ready
	$(MINIMUM)/bin/python -m pytest $(PARALLEL) $(if $(filter core,$(TESTS)),$(CORE),$(TESTS))

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Strict: a broken link, a page outside of the navigation or an unknown name is an error. It needs no network.
docs: $(READY)
	$(BIN)/python -m docs.tools.prepare build/pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python -m benchmarks.compare

# With the Python that has torch and jax for the GPU. GPU_OPTIONS="--device cpu --gigabytes 0.01" tries it without a GPU.
gpu:
	$(PYTHON) -m benchmarks.gpu run $(GPU_OPTIONS)

gpu-wheels:
	$(PYTHON) -m benchmarks.gpu wheels $(GPU_OPTIONS)

clean:
	rm -rf $(VENV) $(MINIMUM) .venv-demo build dist runs .mypy_cache .pytest_cache .ruff_cache .hypothesis
