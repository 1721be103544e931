# `make demo` and `make test` do all their own set-up, on a machine with Python 3.11 or newer and make.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: demo test lint types contracts bench faults drawn mutants clean

demo: $(READY)  ## Plan, show and train a language model, and compare the engines
	$(BIN)/python examples/demo.py

test: $(READY)  ## The whole test suite
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

contracts: $(READY)
	$(BIN)/lint-imports

bench: $(READY)  ## Tables of ratios against hand-written torch, accelerate and transformers
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python -m tests.benchmarks

faults: $(READY)  ## Tables of planted faults and what catches them, and of what a failure anywhere leaves behind
	$(BIN)/python -m tests.tools.faults

drawn: $(READY)  ## Legal configs drawn at random, trained for real on two and four processes
	DS_ACCELERATOR=cpu $(BIN)/python -m tests.tools.drawn

mutants: $(READY)  ## Small changes of the source, and how many of them the tests notice; later runs try what has changed
	$(BIN)/python -m tests.mutants

# torch goes first and pinned, so that nothing else decides which build of it is installed; DeepSpeed's own set-up
# imports it. Its kernels are compiled when they are first needed, not here.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch setuptools wheel ninja
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation deepspeed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,deepspeed]'
	touch $(READY)

clean:
	rm -rf .venv demo-out
