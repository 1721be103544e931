# `make demo` and `make test` do all their own set-up, on a machine with Python 3.11 or newer and make.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false
# The tests start hundreds of processes: each would compile the package anew where byte code is not kept.
unexport PYTHONDONTWRITEBYTECODE
export PATH := $(CURDIR)/$(BIN):$(PATH)

# Two pytest workers, each with gangs of processes of its own: what two cores can use.
WORKERS ?= 2
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
# What `make quick` leaves out: real runs, but for one of each engine in tests/test_engines.py, whole processes, and
# thousands of configs and files that differ in one value.
REAL := tests/applying tests/audit/test_script.py tests/differential tests/loading tests/objects tests/observe tests/ranks \
	tests/saving tests/training tests/predict/test_measured.py tests/support tests/test_examples.py \
	tests/test_real_input.py tests/test_ray.py tests/test_whole_run.py tests/tools tests/torch_suites \
	tests/codec/test_changed_leaves.py tests/codec/test_every_field.py \
	tests/planner/test_settings.py tests/rules/test_neighbours.py \
	tests/resolve/deepspeed/test_every_key.py tests/resolve/deepspeed/test_pairs.py \
	property_tests/test_hostile_files.py property_tests/test_reading_law.py property_tests/test_rehearsal_law.py

GOLDEN := tests/audit/test_rules.py tests/codec tests/planner tests/predict tests/render tests/resolve tests/rules

.PHONY: demo quick test lint types contracts bench faults drawn docs page golden counts mutants clean

demo: $(READY)  ## Plan, show and train a language model, and compare the engines
	$(BIN)/python examples/demo.py

quick: $(READY)  ## All pure layers and one real run of each engine, in three minutes on two cores
	$(PYTEST) $(addprefix --ignore=,$(REAL))

test: $(READY)  ## The whole test suite, in twelve to twenty-five minutes on two idle cores
	$(PYTEST)

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

docs: $(READY)  ## The pages of docs/ as a site in build/site; a dead link fails
	$(BIN)/python -m tests.docs.generate
	$(BIN)/zensical build --strict --clean

page: $(READY)  ## The page on which prepkit is tried without installing it, in build/page; takes npm
	npm install --no-audit --no-fund --prefix build/node pyodide
	$(BIN)/python -m tests.tools.page build/page build/node/node_modules

golden: $(READY)  ## The texts that tests compare with, written anew: read what has changed in them
	WRITE_GOLDEN=1 $(BIN)/python -m pytest -q $(GOLDEN)

counts: $(READY)  ## Sizes of the package, and what had been repeated in it, with their ceilings
	$(BIN)/python -m tests.tools.house

mutants: $(READY)  ## Small changes of the source, and how many the tests notice; later runs try what has changed
	$(BIN)/python -m tests.mutants

# torch goes first and pinned, so that nothing else decides which build of it is installed; DeepSpeed's own set-up
# imports it. Its kernels are compiled when they are first needed, not here.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch setuptools wheel ninja
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation deepspeed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,deepspeed,docs]'
	touch $(READY)

clean:
	rm -rf .venv demo-out build/site .cache
