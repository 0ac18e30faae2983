# make test  the whole test suite       make lint  formatting, types, import rule       make venv  both need it
# make demo  stock Hugging Face beside ours on a small DeepSeek-V4, measured here; minutes
# make kernels  registers and spills of every kernel, from its sm_90 cubin; fails if any spills
# A fresh machine needs Python 3.10+, a C++ compiler and make; the first run builds its own environment.
PYTHON ?= python3
VENV ?= .venv
# one process per core, at most 8; WORKERS=0 takes none but its own
WORKERS ?= auto
PYTEST_ARGS ?=
DEMO_ARGS ?=

BIN := $(VENV)/bin
TEST_STAMP := $(VENV)/.installed-test
DEV_STAMP := $(VENV)/.installed-dev

# Inductor's pool of compile workers costs more than it saves on small graphs
export TORCHINDUCTOR_COMPILE_THREADS = 1

.PHONY: test demo lint kernels venv

test: $(TEST_STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal $(PYTEST_ARGS)

# waiting threads that spin would take the core from the compiler
demo: $(TEST_STAMP)
	OMP_WAIT_POLICY=passive $(BIN)/python -m dsv4_ops demo $(DEMO_ARGS)

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

kernels: $(TEST_STAMP)
	$(BIN)/python -m dsv4_ops kernels

venv: $(DEV_STAMP)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Python compiles what is imported; pip would compile all, for a quarter of its time.
$(TEST_STAMP): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --no-compile -e '.[test]'
	touch $@

# The dev extra holds the test extra, so this satisfies both stamps.
$(DEV_STAMP): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --no-compile -e '.[dev]'
	touch $(TEST_STAMP) $@
