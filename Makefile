# `make demo` and `make test` need Python 3.11 or newer, make and a package index, nothing else.

PYTHON ?= python3
VENV ?= .venv
BUILD ?= cpu
BIN := $(VENV)/bin

OLDEST := .venv-oldest

# What pip reads or builds.
INSTALLED := setup.cfg setup.py pyproject.toml $(wildcard tfdist/*/*.c)

# Two workers, each of which runs the tests of a file. Three take no less time on two cores.
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-all test-flaky test-oldest lint docs clean

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

# One file for each set of extras that is installed: $(VENV)/with-examples has those of the extra `examples`.
$(VENV)/with-%: $(VENV)/bin/python $(INSTALLED)
	$(BIN)/python -m pip install --quiet --editable '.[$(BUILD),$*]'
	touch $@

demo: $(VENV)/with-examples  ## Train a small CNN on two processes
	$(BIN)/tfdist run -n 2 examples/digits.py
	@echo
	@echo "To use tfdist in this shell, activate its environment:  . $(VENV)/bin/activate"

test: $(VENV)/with-test  ## Run the tests, in about 20 minutes on two cores
	$(PYTEST)

test-all: $(VENV)/with-test $(VENV)/with-ray  ## Run the tests with all sweeps, as before a release
	$(PYTEST) --all

test-flaky: $(VENV)/with-test  ## Run the tests that depend most on time, 20 times each beside 20 busy processes
	$(BIN)/python -m tests.flaky

$(OLDEST)/installed: $(INSTALLED)
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --upgrade pip
	$(OLDEST)/bin/python -m pip install --quiet --editable '.[cpu,test]' 'tensorflow-cpu==2.18.*' 'keras==3.10.*'
	touch $@

test-oldest: $(OLDEST)/installed  ## A smoke test, and private members, on the oldest TensorFlow and Keras
	$(OLDEST)/bin/python -m pytest tests/multiprocess/smoke.py tests/private

lint: $(VENV)/with-dev  ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/with-docs  ## Build the site into docs/_build
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build

clean:
	rm -rf $(VENV) $(OLDEST) build dist docs/_build *.egg-info tfdist/*/*.so
