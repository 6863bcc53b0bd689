PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

.PHONY: test lint slow demo docs release clean

# Compiled programs are kept: a second run of the tests then spends little time compiling.
test slow: export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.jax_cache
test slow: export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0.2
# These programs take longer to compile than to run. The slow tests run them as users do, optimized.
test: export JAX_DISABLE_MOST_OPTIMIZATIONS ?= 1

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist loadfile

slow: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist loadfile -m slow

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# Builds the site into site/; `.venv/bin/mkdocs serve` shows it while you write.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Builds dist/ and tries it in new environments without network.
release: $(VENV)/.dev
	rm -rf dist
	$(BIN)/python .ci/check_release.py

# The demo needs much less than the tests, so it does not wait for their packages.
demo: $(VENV)/.train
	$(BIN)/python examples/demo.py

$(VENV)/.dev $(VENV)/.docs $(VENV)/.train: $(VENV)/.%: pyproject.toml | $(BIN)/python
	$(PIP) install -e '.[$*]'
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) .jax_cache .pytest_cache .ruff_cache .hypothesis build dist site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
