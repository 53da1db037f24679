# Each target makes the virtual environment when it is missing. PYTHON: the interpreter to make it with.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Demo settings: MODEL=tiny (default) or MODEL=smollm2; SEED=0.
MODEL ?= tiny
SEED ?= 0

.PHONY: demo test check soak bench clean

demo: $(VENV)/.installed
	FOREBAY="$(BIN)/forebay" PIP="$(BIN)/python -m pip" sh scripts/demo.sh $(MODEL) $(SEED)

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 -m "not soak"

# The long versions of the randomised and kill tests.
soak: $(VENV)/.installed
	FOREBAY_SOAK=1 $(BIN)/python -m pytest

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/engine_batching.py

# torch comes first and by its pin: resolved later, pip would choose the CUDA build (several GB).
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
