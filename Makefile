# One virtual environment for every target, made once in .venv.
# `make demo PYTHON=python3.12` picks another interpreter for it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test test-gpu lint format

help:
	@echo "make demo      configs for Qwen3.5-122B-A10B on an RTX PRO 6000, predicted, no GPU needed"
	@echo "make test      lint, and every test that needs no GPU"
	@echo "make test-gpu  the tests that need a GPU"
	@echo "make lint      ruff, mypy, import-linter"
	@echo "make format    ruff, writing"

demo: $(VENV)/.installed
	$(BIN)/moetune tune Qwen/Qwen3.5-122B-A10B --tp 4 --server sglang \
		--gpu "NVIDIA RTX PRO 6000 Blackwell Server Edition" --out demo-configs

test: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not gpu"

test-gpu: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m gpu

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "moetune needs Python 3.10 or newer, and $(PYTHON) is not." \
			"Name another, as in: make $(or $(MAKECMDGOALS),demo) PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# Editable: a change of the sources needs no new installation, a change of pyproject.toml does.
$(VENV)/.installed: pyproject.toml | $(VENV)/.made
	$(PIP) install --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/.made
	$(PIP) install --editable '.[test,serving-test,lint]'
	@touch $(VENV)/.installed $@
