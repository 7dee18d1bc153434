# Every target does its own set-up in a virtual environment here: Python 3.10 or newer and make are enough.
PYTHON ?= python3
.DELETE_ON_ERROR:

# what is imported is compiled then: of eleven thousand files that is a third
PIP := python -m pip install -qq --disable-pip-version-check --no-compile
CC_HERE := $(shell command -v $${CC:-cc} || command -v gcc || command -v clang)
EXTRAS := tvm$(if $(CC_HERE),,,cc)
NVCC_HERE := $(wildcard $(CUDA_HOME)/bin/nvcc $(CUDA_PATH)/bin/nvcc)$(shell command -v nvcc)
TEST_EXTRAS := $(EXTRAS)$(if $(NVCC_HERE),,,nvcc)
WORKLOADS := registry/tlhub_registry/workloads
PACKAGE := tlhub package build --into build/prebuilt --jobs 2
SOURCES := pyproject.toml README.md $(shell find tlhub plugins registry -type f -not -path '*/__pycache__/*' -not -name '.*')

.PHONY: help demo test test-all lint format bench prebuilt clean

help:
	@echo "make demo      compile a matrix product, check it, and time it against this machine's library"
	@echo "make test      lint, types, layers and tests, also against the built wheel"
	@echo "make test-all  the same with the long tests"
	@echo "make lint      lint, types and layers alone;  make format mends what can be mended"
	@echo "make prebuilt  wheels of binaries, for CPUs and for compute capability 9.0, in build/prebuilt"
	@echo "make bench     the measurements of docs/performance.md"
	@echo "make clean     remove what these targets made"

demo: .venv/.demo
	.venv/bin/tlhub bench gemm 1024,1024,1024 --dtype float32

test: .venv/.test .venv-wheel/.ready .venv-tvm/.ready
	@.venv/bin/python tests/run.py $(if $(CI),--no-skips)

test-all: .venv/.test .venv-wheel/.ready .venv-tvm/.ready prebuilt
	@.venv/bin/python tests/run.py --slow $(if $(CI),--no-skips)

lint: .venv/.test
	@.venv/bin/python tests/run.py --only lint

format: .venv/.test
	.venv/bin/ruff check --fix-only --quiet
	.venv/bin/ruff format

bench: .venv/.test
	for script in $(filter-out %/certify.py %/examination.py,$(wildcard benchmarks/*.py)); do .venv/bin/python "$$script"; done

# TLHUB_MATCH: what older sources gave is built anew
prebuilt: export TLHUB_CACHE_DIR := build/prebuilt/cache
prebuilt: export TLHUB_MATCH := compatible
prebuilt: .venv/.test
	.venv/bin/$(PACKAGE) --from $(WORKLOADS)/cpu.toml --arch cpu:x86-64-v3 --arch cpu:x86-64-v4
	.venv/bin/$(PACKAGE) --from $(WORKLOADS)/prebuilt/sm90a.toml

clean:
	rm -rf .venv .venv-wheel .venv-tvm build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find benchmarks plugins registry tests tlhub -name __pycache__ -prune -exec rm -rf {} +

# -- environments: a stamp says that one is whole ----------------------------------------------------------------------

.venv/bin/python .venv-wheel/bin/python .venv-tvm/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("tlhub needs Python 3.10 or newer: make PYTHON=python3.11" if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(@:/bin/python=)

.venv/.demo: pyproject.toml | .venv/bin/python
	.venv/bin/$(PIP) -e '.[$(EXTRAS)]'
	@touch $@

.venv/.test: pyproject.toml requirements-dev.txt | .venv/bin/python
	.venv/bin/$(PIP) "$$(grep '^torch' requirements-dev.txt)"
	.venv/bin/$(PIP) -r requirements-dev.txt -e '.[$(TEST_EXTRAS)]'
	@touch $@ .venv/.demo

build/wheels/.built: $(SOURCES) | .venv/bin/python
	@rm -rf build/wheels
	.venv/bin/python -m pip wheel -qq --disable-pip-version-check --no-deps -w build/wheels . ./plugins/template
	@touch $@

# the wheel as a user gets it, with nothing that compiles
.venv-wheel/.ready: build/wheels/.built | .venv-wheel/bin/python
	.venv-wheel/bin/$(PIP) "$$(echo build/wheels/tlhub_core-*.whl)[testing]" pytest-xdist
	.venv-wheel/bin/$(PIP) --force-reinstall --no-deps build/wheels/tlhub_core-*.whl
	@touch $@

# the wheel with the newest TVM
.venv-tvm/.ready: build/wheels/.built | .venv-tvm/bin/python
	.venv-tvm/bin/$(PIP) "$$(echo build/wheels/tlhub_core-*.whl)[$(TEST_EXTRAS),package,trust,testing]" 'apache-tvm==0.27.*' pytest-xdist
	.venv-tvm/bin/$(PIP) --force-reinstall --no-deps build/wheels/tlhub_core-*.whl
	@touch $@
