# `make demo` and `make test` need Python 3.11 or newer, make and a package index, nothing else.

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= cpu,test
BIN := $(VENV)/bin

OLDEST := .venv-oldest

# One process each: those of folders, and those that build, read and run what is written.
IN_PROCESS := $(addprefix tests/,callbacks cluster collectives comm compression engine gossip local_sgd model_parallel optimizers parameter_server pipeline quorum runtime strategies test_docs.py test_import.py test_packaging.py)

.PHONY: demo test test-oldest lint docs clean

$(VENV)/installed: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	touch $@

demo: $(VENV)/installed  ## Train a small CNN on two processes
	$(BIN)/tfdist run -n 2 examples/digits.py
	@echo
	@echo "To use tfdist in this shell, activate its environment:  . $(VENV)/bin/activate"

test: $(VENV)/installed  ## Run all tests: those within one process side by side, then those that start processes
	$(BIN)/python -m pytest --durations 10 --numprocesses 2 --dist loadfile $(IN_PROCESS)
	$(BIN)/python -m pytest --durations 20 $(addprefix --ignore=,$(IN_PROCESS))

$(OLDEST)/installed: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --upgrade pip
	$(OLDEST)/bin/python -m pip install --quiet --editable '.[cpu,test]' 'tensorflow-cpu==2.18.*' 'keras==3.10.*'
	touch $@

test-oldest: $(OLDEST)/installed  ## A smoke test on the oldest TensorFlow and Keras that are supported
	$(OLDEST)/bin/python -m pytest tests/multiprocess/smoke.py

lint: $(VENV)/installed  ## Check style and types
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS),dev]'
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/installed  ## Build the site into docs/_build
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS),docs]'
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build

clean:
	rm -rf $(VENV) $(OLDEST) build dist docs/_build *.egg-info
