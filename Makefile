# One command each. `make demo` and `make test` need Python 3.10+ and nothing else.
PYTHON ?= .venv/bin/python
BIN = $(dir $(PYTHON))
# Set to nothing by those who bring an environment of their own (tox).
FOR_DEMO ?= .venv/.for-demo
FOR_TEST ?= .venv/.for-test

.DEFAULT_GOAL = help
.PHONY: help demo test soak lint bench clean

help:
	@echo "make demo   an order travels through the example project, and ends"
	@echo "make test   lint, then every test on SQLite and on PostgreSQL"
	@echo "make soak   long runs under faults, on PostgreSQL"
	@echo "make lint   ruff, mypy, import-linter"
	@echo "make bench  the benchmarks"
	@echo "make clean  remove the environment and every cache"

demo: $(FOR_DEMO)
	$(PYTHON) example_project/demo.py

test: lint
	$(PYTHON) -m pytest
	$(PYTHON) -m tests.on_postgresql -m "database and not soak"

soak: $(FOR_TEST)
	$(PYTHON) -m tests.on_postgresql -m soak

lint: $(FOR_TEST)
	$(BIN)ruff check .
	$(BIN)ruff format --check .
	$(BIN)mypy
	$(BIN)lint-imports

bench: $(FOR_TEST)
	for file in $$(grep -l __main__ benchmarks/*.py); do \
		$(PYTHON) -m benchmarks.$$(basename $$file .py) || exit; \
	done

clean:
	rm -rf .venv .tox build dist htmlcov *.egg-info .coverage .hypothesis \
		.import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps: a second run installs nothing, a changed list of dependencies does.
.venv/.for-demo: pyproject.toml scripts/install.sh
	scripts/install.sh demo
	@touch $@

.venv/.for-test: pyproject.toml scripts/install.sh
	scripts/install.sh test
	@touch $@ .venv/.for-demo
