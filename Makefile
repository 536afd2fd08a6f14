# demo: train the example on two processes.  test, lint: what a change must pass.  bench, zoo, soak: longer looks.
# Each target makes .venv if need be; stamps in it make the second call quick.

SHELL := /bin/bash
PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq
TORCH := torch==2.13.0

.DEFAULT_GOAL := help
.PHONY: help demo test lint format bench zoo soak clean

help:
	@sed -n '1,2s/^# //p' Makefile

# One pip command for torch and the rest: what is installed later can then never replace torch by another build.
$(VENV)/test.stamp: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing headway and what it needs into $(VENV) (torch is large: minutes, once)"
	$(PIP) -c constraints.txt $(TORCH) -e '.[test]'
	@touch $@

$(VENV)/lint.stamp: $(VENV)/test.stamp
	$(PIP) -c constraints.txt $(TORCH) -e '.[test,lint]'
	@touch $@

$(VENV)/bench.stamp: $(VENV)/test.stamp
	$(PIP) -c constraints.txt $(TORCH) -e '.[test,bench]'
	@touch $@

demo: $(VENV)/test.stamp
	@$(BIN)/headway run -n 2 examples/gpt.py

# Two at a time: whoever waits for another process leaves its core to somebody.
TEST_PROCESSES ?= 2
test: $(VENV)/test.stamp
	$(BIN)/python -m pytest -q -m 'not zoo' -n $(TEST_PROCESSES) --dist worksteal

lint: $(VENV)/lint.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/lint.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Step times beside torch's own, as ratios in one run: docs/benchmarks.md. Ten minutes; wants an idle machine.
bench: $(VENV)/bench.stamp
	@set -e; for script in $(filter-out %/rounds.py %/codec_quality.py,$(wildcard benchmarks/*.py)); do echo "== $$script"; $(BIN)/python $$script; done

# Record and split many model families, built from configurations.
zoo: $(VENV)/bench.stamp
	$(BIN)/python -m pytest -q -m zoo

# A long training: what leaks, drifts or hangs shows here. Then random programs under random plans: docs/soak.md.
SOAK_STEPS ?= 3000
SOAK_CASES ?= 100
soak: $(VENV)/test.stamp
	$(BIN)/headway run -n 2 examples/gpt.py --steps $(SOAK_STEPS)
	$(BIN)/python -m tests.soak.sweep --count $(SOAK_CASES) --ranks 2 3 4
	$(BIN)/python -m tests.soak.failures --count 10 --ranks 2 4

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
