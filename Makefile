# `make test` and `make demo` each work as the only command after `git clone`.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# What pip installs as torch: a requirement, a wheel's path, or either with options of pip install.
TORCH ?= torch==2.13.0

VENV := .venv
PEERS := .venv-peers
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest
WORKERS ?= 2
# Hypothesis: `quick` draws new examples each time, `ci` the same ones, and a few less.
PROFILE ?= quick

.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help install test test-slow test-gpu peers laws mutants lint type imports docs demo bench clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

install: $(STAMP) ## build .venv from pyproject.toml, torch first

$(STAMP): pyproject.toml tools/install_torch.py
	@test -n "$(PYTHON)" || { echo "kvflow needs Python 3.11 or newer; none found (PYTHON=...)"; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || \
		{ echo "$(PYTHON) cannot build a venv; on Debian: apt-get install python3-venv"; exit 1; }
	$(BIN)/python tools/install_torch.py $(TORCH)
	$(BIN)/python -m pip install -qq --no-compile --editable '.[dev]'
	@touch $@

test: lint type imports ## everything but the slow and the GPU tier; what CI runs
	$(PYTEST) -q -n $(WORKERS) --dist worksteal --hypothesis-profile=$(PROFILE) \
		-m "not slow and not gpu and not peers"

test-slow: $(STAMP) ## thorough sweeps
	$(PYTEST) -q -n $(WORKERS) --dist worksteal -m "slow and not gpu and not peers"

test-gpu: $(STAMP) ## tests that need a CUDA device
	$(PYTEST) -m gpu

peers: $(PEERS)/.installed ## vLLM's own code, from its CPU wheel, against ours (x86-64 Linux)
	TRITON_INTERPRET=1 $(PEERS)/bin/python -m pytest -q -W default -p no:cacheprovider tests/differential

$(PEERS)/.installed: tests/differential/requirements.txt tools/install_torch.py
	@test -x $(PEERS)/bin/pip || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python tools/install_torch.py $(TORCH)
	$(PEERS)/bin/python -m pip install -qq --no-compile --no-deps -r tests/differential/requirements.txt
	@touch $@

laws: $(STAMP) ## the laws of layouts and transfers on 20,000 drawn pairs and more
	$(PYTEST) -q -n $(WORKERS) --dist worksteal -m "not gpu" --hypothesis-profile=thorough --timeout=3600 \
		tests/layouts tests/transfers/test_law.py tests/transfers/test_heads_and_copies.py

mutants: $(STAMP) ## plant faults in layouts and transfers; each must fail a test
	$(BIN)/python tools/mutants.py

lint: $(STAMP) ## ruff: format and rules
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .

type: $(STAMP) ## mypy --strict
	$(BIN)/mypy --strict kvflow

imports: $(STAMP) ## import contracts: describe, derive, move
	$(BIN)/lint-imports

docs: $(STAMP) ## run every example in README.md, docs/ and docstrings
	$(PYTEST) tests/test_docs.py

demo: $(STAMP) ## serve a small model from two engines and stream from it
	$(BIN)/python examples/serve_glm.py --demo --pcp 4 --dcp 4 --interleave 1 \
		--decode-ranks 2 --prefill-block 16 --decode-block 64 --kv-dtype fp8 \
		--num-drafts 3 --hisparse --host-tier-gib 0.25

bench: $(STAMP) ## planning, copies, gathers and transfers, each beside its baseline
	$(BIN)/python benchmarks/run_all.py

clean: ## remove .venv and caches
	rm -rf $(VENV) $(PEERS) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
