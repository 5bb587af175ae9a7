# Everything runs in .venv, made once from pyproject.toml and constraints.txt and re-used. Needs python3 (3.10 or newer)
# with pip; pip's own settings (PIP_INDEX_URL, PIP_FIND_LINKS, ...) are honoured, e.g. to take a CPU build of torch.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

NPROC ?= 2
ARGS ?=

.PHONY: help setup serve test test-gpu sanitize lint bench clean

help:
	@echo "make serve      the main job on real text: torchrun, NPROC=$(NPROC) ranks, GPU or CPU (ARGS=... for its options)"
	@echo "make test       tests that need no GPU"
	@echo "make test-gpu   tests that need one or two GPUs"
	@echo "make sanitize   compute-sanitizer on small walks, where it is installed, on a GPU (ARGS=... for its options)"
	@echo "make lint       ruff and mypy"
	@echo "make bench      the speed table, on GPUs (ARGS=... for its options)"

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test,text,plot]'
	touch $@

serve: $(READY)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/torchrun --nproc-per-node $(NPROC) launch/serve_walk.py $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest --ignore tests/gpu --numprocesses auto --dist loadfile $(ARGS)

test-gpu: $(READY)
	$(BIN)/python -m pytest tests/gpu $(ARGS)

sanitize: $(READY)
	$(BIN)/python experiments/sanitize.py $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/tp-walk bench $(ARGS)

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
