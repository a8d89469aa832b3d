# Needs only Python >= 3.11 (PYTHON=python3.12 make demo for another than python3).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml constraints.txt
# Modules are compiled once, and tests rewritten for pytest once, not by every process: that takes as long as collecting.
export PYTHONDONTWRITEBYTECODE :=
# What was skipped, a line a reason (tests/skips.py). With a space for the sign, pytest takes the file for tests to run
# before it has read the option.
SKIPS := $(VENV)/skipped.txt
# PAGE= where there is no Chromium: its tests are then counted among the skipped.
PAGE := --page
# How many examples hypothesis tries: a profile of tests/conftest.py.
EXAMPLES := penstock
CLIENTS := $(VENV)/clients
ARM := $(VENV)/arm
STACKS := tests/stacks/requirements.txt tests/stacks/requirements-instructor.txt tests/stacks/package-lock.json
# README.md and docs/start/install.md have the same line (tests/unit/test_install.py).
INSTALL := pip install --constraint constraints.txt --editable

.PHONY: install demo test test-in-process test-processes test-all test-page clients test-clients test-arm test-image check figures peers wheel release clean

install: $(VENV)/.installed

demo: $(VENV)/.installed
	$(BIN)/penstock demo

# Tests that start processes wait half of their time, which the others use. These print when all of them have ended, or
# their lines would be mixed with those of the processes'.
test: $(VENV)/.installed-dev
	@: > $(SKIPS)
	@$(MAKE) --no-print-directory --jobs=2 --keep-going EXAMPLES=$(EXAMPLES) check test-in-process test-processes
	@echo 'NOT RUN: the web page in Chromium. To run it: apt-get install chromium, then make test-page'
	@echo 'NOT RUN: the clients of other projects. To run them: apt-get install nodejs npm, then make test-clients'
	@echo 'NOT RUN: the container image, made without Docker. To run it, as root on Linux: make test-image'
	@cat $(SKIPS)

test-in-process: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "not processes and not stacks and not whole and not arm and not image" --hypothesis-profile $(EXAMPLES) --numprocesses auto --dist worksteal --skips=$(SKIPS) >$(VENV)/$@.txt 2>&1; code=$$?; cat $(VENV)/$@.txt; exit $$code

test-processes: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "processes and not page and not stacks and not whole and not arm and not image" --hypothesis-profile $(EXAMPLES) --numprocesses auto --maxprocesses 4 --dist worksteal --skips=$(SKIPS)

# The matrices from which the tests above sample, and more examples of what hypothesis draws.
test-all: EXAMPLES := whole
test-all: test
	@: > $(SKIPS)
	$(BIN)/python -m pytest -m "whole and not processes and not stacks and not arm and not image" --hypothesis-profile $(EXAMPLES) --numprocesses auto --dist worksteal --skips=$(SKIPS)
	$(BIN)/python -m pytest -m "whole and processes and not page and not stacks and not arm and not image" --hypothesis-profile $(EXAMPLES) --numprocesses auto --maxprocesses 4 --dist worksteal --skips=$(SKIPS)
	@cat $(SKIPS)

test-page: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m page $(PAGE) --numprocesses 2 --dist worksteal --skips=$(SKIPS) tests/integration/server/test_page.py

# The clients have environments of their own, with pinned versions.
clients: $(CLIENTS)/.installed

test-clients: $(VENV)/.installed-dev $(CLIENTS)/.installed
	@rm -f $(CLIENTS)/table-*.md
	$(BIN)/python -m pytest -m stacks --stacks=$(CLIENTS) --numprocesses 2 --dist loadscope --skips=$(SKIPS) tests/integration/clients/test_stacks.py
	@cat $(CLIENTS)/table-*.md

# Under qemu. What is fetched for it is kept, unpacked.
test-arm: $(VENV)/.installed-dev
	$(BIN)/python scripts/arm_root.py $(ARM)
	$(BIN)/python -m pytest -m arm --arm=$(ARM) --skips=$(SKIPS) tests/arm

# What the Dockerfile and compose.yaml say, done without Docker: as root on Linux, with a network.
test-image: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m image --image --skips=$(SKIPS) tests/integration/test_image.py

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# llama.cpp for this processor, beside the wheel of the extra `peers`. It compiles 140 files, one at a time; JOBS=4 takes four.
JOBS := 1
peers: $(VENV)/.installed-peers

$(VENV)/.installed-peers: $(VENV)/.installed-dev
	CMAKE_ARGS=-DGGML_NATIVE=ON CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) \
		$(BIN)/pip install --constraint constraints.txt --no-binary llama-cpp-python 'llama-cpp-python>=0.3.36' --quiet
	$(BIN)/python -c 'import llama_cpp; print(llama_cpp.llama_print_system_info().decode())'
	touch $@

figures: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.figures

# Without what Penstock needs to run: only what builds.
wheel: $(BIN)/python
	$(BIN)/pip install --quiet 'build>=1.2'
	$(BIN)/python -m scripts.release --wheel

# make release VERSION=0.1.0; nothing leaves this machine.
release: $(VENV)/.installed-dev
	$(BIN)/python -m scripts.release $(VERSION)

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("Penstock needs Python 3.11 or newer; set PYTHON=" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python $(SOURCES)
	$(BIN)/$(INSTALL) . --quiet
	touch $@

# Modules are compiled when they are imported, which most of these never are.
$(VENV)/.installed-dev: $(BIN)/python $(SOURCES)
	$(BIN)/$(INSTALL) '.[dev]' --quiet --no-compile
	touch $(VENV)/.installed $@

$(CLIENTS)/.installed: $(STACKS)
	$(PYTHON) -m venv $(CLIENTS)/python
	$(CLIENTS)/python/bin/pip install --quiet --requirement tests/stacks/requirements.txt
	$(PYTHON) -m venv $(CLIENTS)/instructor
	$(CLIENTS)/instructor/bin/pip install --quiet --requirement tests/stacks/requirements-instructor.txt
	mkdir -p $(CLIENTS)/node
	cp tests/stacks/package.json tests/stacks/package-lock.json $(CLIENTS)/node
	npm ci --prefix $(CLIENTS)/node --ignore-scripts --no-audit --no-fund
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
