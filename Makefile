# `make` lists the targets. The first target you run creates .venv with venv and pip. It installs the exact versions of
# requirements.lock, and of requirements-cuda.lock if nvidia-smi finds a GPU. It installs again only when a lock changes.
# PyTorch and Hugging Face's libraries, which the parity tests compare with, have their own environment, .venv-parity.

PYTHON ?= python3
BIN := .venv/bin
CHECK_PYTHON = $(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info < (3, 14) else "error: Python 3.11 to 3.13 is needed, $(PYTHON) is " + sys.version.split()[0] + "; make PYTHON=python3.12 ... chooses another")'

.DEFAULT_GOAL := help
.PHONY: help repro test test-parity test-gpu gradcheck crash-test bench chat figures lint git moved

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

repro: git .venv/ready  ## run the pipeline, raw text to chat model; stages that are up to date are skipped
	$(BIN)/dvc repro

test: .venv/ready  ## run the tests except the slow ones
	$(BIN)/python -m pytest -q -m "not slow"

test-parity: .venv-parity/ready  ## compare model, training and tokenizer with PyTorch, transformers, tokenizers and tiktoken
	.venv-parity/bin/python -m pytest -q tests/parity

test-gpu: .venv/ready  ## compare every CUDA kernel and the whole engine with the CPU in float64; needs a GPU
	$(BIN)/python -m pytest -q -m gpu

gradcheck: .venv/ready  ## compare every gradient with central differences in float64
	$(BIN)/python -m tests.gradient_check

bench: git .venv/ready .venv-parity/ready  ## measure the engine, training (also PyTorch's) and the tokenizer (also other libraries')
	$(BIN)/dvc repro --quiet download
	$(BIN)/python -m tests.bench.engine train
	$(BIN)/python -m tests.bench.engine decode --steps 100
	$(BIN)/python -m tests.bench.engine ops
	.venv-parity/bin/python -m tests.bench.training
	.venv-parity/bin/python -m tests.bench.tokenizers

crash-test: .venv/ready  ## kill a small pipeline 100 times, and ranks 40 times, at random and compare the files with undisturbed runs
	$(BIN)/python -m tests.chaos
	$(BIN)/python -m tests.rank_chaos

chat: .venv/ready  ## chat with the model of the last run
	$(BIN)/python -m stages.chat

figures: .venv/ready  ## regenerate the figures of README and docs, and docs/ops.md
	$(BIN)/python -m docs.figures
	$(BIN)/python -m docs.ops

lint: .venv/ready  ## check style, types, and that params.yaml is the composition of conf/
	$(BIN)/ruff check .
	$(BIN)/mypy stages kernels tests docs
	$(BIN)/python -m stages.params --check

git:
	@test -e .git || { echo "error: DVC needs a git repository, and this folder is none; run: git init && git add . && git commit -m start" >&2; exit 1; }

moved:
	@if [ -e .venv/ready ]; then $(BIN)/python .ci/venv_moved.py; fi

.venv/ready: requirements.lock requirements-cuda.lock .ci/venv_start.py | moved
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	if nvidia-smi > /dev/null 2>&1; then $(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-cuda.lock; fi
	site=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	    cp .ci/venv_start.py "$$site/nanoeuler_start.py" && echo 'import nanoeuler_start' > "$$site/nanoeuler_path.pth"
	touch $@

.venv-parity/ready: requirements-parity.lock
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv .venv-parity
	.venv-parity/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-parity.lock
	touch $@
