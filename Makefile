# Each target installs what it needs. Only Python 3.11+, make and git have to be there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
# A machine with an NVIDIA card gets pip's own (CUDA) torch; every other one the CPU build.
CONSTRAINTS := $(shell command -v nvidia-smi >/dev/null 2>&1 || echo -c configs/constraints-cpu.txt)

export OMP_NUM_THREADS ?= 1
# Tests wait for one another's messages as often as they compute: two at a time keep two cores busy.
TESTS_AT_ONCE ?= 2

.PHONY: help install quickstart quickstart-full test test-all lint bench clean

help:
	@echo "install           create .venv and install lightning-swift into it"
	@echo "quickstart        fine-tune a real small model by QLoRA on a CPU, merge, export and try it"
	@echo "quickstart-full   the same with all weights, by FSDP2 on 2 CPU ranks"
	@echo "test              install what tests need and run them"
	@echo "test-all          lint, types and tests"
	@echo "lint              ruff and mypy --strict"
	@echo "bench             every benchmark, ours beside its peers"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.install: $(BIN)/python pyproject.toml configs/constraints-cpu.txt
	$(PIP) install $(CONSTRAINTS) torch
	$(PIP) install $(CONSTRAINTS) -e .
	@touch $@

$(VENV)/.test: $(VENV)/.install
	$(PIP) install $(CONSTRAINTS) -e ".[test]"
	@touch $@

$(VENV)/.dev: $(VENV)/.install
	$(PIP) install $(CONSTRAINTS) -e ".[dev]"
	@touch $@

$(VENV)/.quickstart: $(VENV)/.install
	$(PIP) install $(CONSTRAINTS) -e ".[quickstart]"
	@touch $@

install: $(VENV)/.install

# One process, so it may have every core.
quickstart: OMP_NUM_THREADS := $(shell getconf _NPROCESSORS_ONLN)
quickstart: $(VENV)/.quickstart
	$(BIN)/python -m recipes.quickstart

quickstart-full: $(VENV)/.quickstart
	$(BIN)/python -m recipes.quickstart full

test: $(VENV)/.test
	$(BIN)/python -m pytest --numprocesses $(TESTS_AT_ONCE) --dist worksteal

test-all: lint test

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build dist
