# One command each. `make demo` and `make test` need Python 3.10+ and nothing else.
PYTHON ?= .venv/bin/python
BIN = $(dir $(PYTHON))
# Set to nothing by those who bring an environment of their own.
FOR_DEMO ?= .venv/.for-demo
FOR_TEST ?= .venv/.for-test

.DEFAULT_GOAL = help
.PHONY: help demo test test-matrix soak lint bench docs pictures clean

help:
	@echo "make demo   an order travels through the example project, and ends"
	@echo "make test   lint, then every test on SQLite and on PostgreSQL"
	@echo "make test-matrix  the same on Python 3.10, 3.12, 3.13 and Django 5.2, 6.0, 6.1"
	@echo "make soak   long runs under faults, on PostgreSQL; an hour of chaos among them,"
	@echo "            or TXMSG_SOAK_SECONDS of it"
	@echo "make lint   ruff, mypy, import-linter"
	@echo "make bench  the benchmarks, and one table of their ratios"
	@echo "make docs   the documentation as a site, in build/site, and what it shows is run"
	@echo "make pictures  the documentation's pictures, from the running example"
	@echo "make clean  remove the environment and every cache"

demo: $(FOR_DEMO)
	$(PYTHON) example_project/demo.py

test: lint
	@$(PYTHON) scripts/side_by_side.py \
		"$(PYTHON) -m tests.on_postgresql -m 'database and not soak'" \
		"$(PYTHON) -m pytest --ignore=tests/spark" \
		"$(PYTHON) scripts/matrix.py --newest" \
		"$(PYTHON) -m pytest tests/spark"

test-matrix: $(FOR_TEST)
	$(PYTHON) scripts/matrix.py

soak: $(FOR_TEST)
	$(PYTHON) -m tests.on_postgresql -m soak

lint: $(FOR_TEST)
	$(BIN)ruff check .
	$(BIN)ruff format --check .
	$(BIN)mypy
	$(BIN)lint-imports

bench: $(FOR_TEST)
	$(PYTHON) -m benchmarks

docs: $(FOR_TEST)
	$(PYTHON) -m sphinx -W --keep-going -q -b html docs build/site
	$(PYTHON) -m pytest -q tests/docs
	@echo "build/site/index.html"

pictures: $(FOR_TEST)
	$(PYTHON) -m tests.docs.pictures

clean:
	rm -rf .venv .matrix build dist htmlcov *.egg-info .coverage .hypothesis \
		.import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps: a second run installs nothing, a changed list of dependencies does.
.venv/.for-demo: pyproject.toml scripts/install.sh
	scripts/install.sh demo
	@touch $@

.venv/.for-test: pyproject.toml scripts/install.sh
	scripts/install.sh test
	@touch $@ .venv/.for-demo
