# Needs only Python >= 3.11 (PYTHON=python3.12 make demo for another than python3).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml constraints.txt
# What was skipped, a line a reason (tests/skips.py). With a space for the sign, pytest takes the file for tests to run
# before it has read the option.
SKIPS := $(VENV)/skipped.txt
# PAGE= where there is no Chromium: its tests are then counted among the skipped.
PAGE := --page
# By a path, not by a finder, which a folder named penstock beside a script of one's own would hide.
EDITABLE := --config-settings editable_mode=compat --editable

.PHONY: demo test test-page check figures clean

demo: $(VENV)/.installed
	$(BIN)/penstock demo

test: $(VENV)/.installed-dev check
	@: > $(SKIPS)
	$(BIN)/python -m pytest -m "not processes" --numprocesses auto --dist worksteal --skips=$(SKIPS)
	$(BIN)/python -m pytest -m "processes and not page" --numprocesses auto --maxprocesses 4 --dist worksteal --skips=$(SKIPS)
	@echo 'NOT RUN: the web page in Chromium. To run it: apt-get install chromium, then make test-page'
	@cat $(SKIPS)

test-page: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m page $(PAGE) --skips=$(SKIPS) tests/integration/server/test_page.py

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

figures: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.figures

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("Penstock needs Python 3.11 or newer; set PYTHON=" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python $(SOURCES)
	$(BIN)/pip install --quiet --constraint constraints.txt $(EDITABLE) .
	touch $@

$(VENV)/.installed-dev: $(BIN)/python $(SOURCES)
	$(BIN)/pip install --quiet --constraint constraints.txt $(EDITABLE) '.[dev]'
	touch $(VENV)/.installed $@

clean:
	rm -rf $(VENV) build dist *.egg-info
