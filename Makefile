# Every target sets itself up: `make quickstart` and `make test` work in a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TOGETHER := --numprocesses auto --dist loadfile  # a process a core, which takes whole files: fixtures are made once
PIP_FLAGS := --quiet --disable-pip-version-check -c constraints.txt

.PHONY: bench-gpu setup quickstart test test-full lint bench clean
setup: $(VENV)/.ready

# torch first and alone: its pin decides which build everything else is resolved against.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install $(PIP_FLAGS) torch setuptools
	$(BIN)/pip install $(PIP_FLAGS) --no-build-isolation -e '.[dev]'
	touch $@

.venv-bench/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/pip install $(PIP_FLAGS) torch setuptools
	.venv-bench/bin/pip install $(PIP_FLAGS) --no-build-isolation -e '.[bench]'
	touch $@

quickstart: setup
	$(BIN)/daebm run digits --out runs/quickstart $(if $(wildcard runs/quickstart/config.json),--resume)

test: setup
	$(BIN)/pytest $(TOGETHER) -m 'not long'

test-full: setup
	$(BIN)/pytest $(TOGETHER)

lint: setup
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy

bench: .venv-bench/.ready
	.venv-bench/bin/python benchmarks/mala.py

bench-gpu: setup
	$(BIN)/python benchmarks/gpu.py $(if $(MODEL),--model $(MODEL))

clean:
	rm -rf $(VENV) .venv-bench build dist
