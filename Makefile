# One command each. `make demo` and `make test` need Python 3.10+ and nothing else.
PYTHON ?= .venv/bin/python
# Set to nothing by those who bring an environment of their own.
FOR_DEMO ?= .venv/.for-demo
# tox, the servers of the tests, and every Python that pyenv has: its shims refuse.
TOX = $(PYTHON) -m tox
FOR_TOX = .venv/.for-tox
PYTHONS = $(wildcard $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions/3.1[0-9]*/bin)
export PATH := $(PATH)$(shell printf %s $(addprefix :,$(PYTHONS)))

.DEFAULT_GOAL = help
.PHONY: help demo test test-matrix soak lint bench docs pictures clean

help:
	@echo "make demo   an order travels through the example project, and ends"
	@echo "make test   lint, and the tests whose turn it is: on SQLite, on PostgreSQL, with Spark"
	@echo "make test-matrix  every test, on every Python, Django, PySpark and server of tox.ini;"
	@echo "            writes README's table of what ran"
	@echo "make soak   long runs under faults, on PostgreSQL; an hour of chaos among them,"
	@echo "            or TXMSG_SOAK_SECONDS of it"
	@echo "make lint   ruff, mypy, import-linter"
	@echo "make bench  the benchmarks, and one table of their ratios"
	@echo "make docs   the documentation as a site, in build/site, and what it shows is run"
	@echo "make pictures  the documentation's pictures, from the running example"
	@echo "make clean  remove the environments and every cache"

demo: $(FOR_DEMO)
	$(PYTHON) example_project/demo.py

# Which of the tests that take turns are run: see tests/conftest.py.
COMMIT = $(shell git rev-parse --short=7 HEAD 2>/dev/null || echo 0)
TURN = $(or $(TXMSG_TEST_TURN),$(shell echo $$((0x$(COMMIT) % 8))))

# Two at once, the longest first: a test waits for half of its time, but with more of them on two cores
# leases end too early. tox shows what an environment printed if it fails, so how each
# ended is said last.
test: $(FOR_TOX)
	@rm -rf build/results
	@export TXMSG_TEST_TURN=$(TURN); \
		$(TOX) run-parallel --parallel 2 -e sqlite,spark43-sample,postgresql,lint; \
		code=$$?; $(PYTHON) scripts/what_ran.py; \
		echo "turn $(TURN) of 0 to 7 (TXMSG_TEST_TURN=all: every test)"; exit $$code

test-matrix: $(FOR_TOX)
	@rm -rf build/results
	@$(TOX) run-parallel --parallel 2; \
		code=$$?; $(PYTHON) scripts/what_ran.py; $(PYTHON) scripts/what_ran.py --write; exit $$code

soak: $(FOR_TOX)
	$(TOX) run -e dev -- python -m tests.on_postgresql -m soak

lint: $(FOR_TOX)
	$(TOX) run -e lint

bench: $(FOR_TOX)
	$(TOX) run -e dev -- python -m benchmarks

docs: $(FOR_TOX) build/mermaid
	$(TOX) run -e docs
	@echo "build/site/index.html"

# What draws the site's diagrams in a browser.
build/mermaid:
	@mkdir -p $@ && cd $@ && npm pack --silent mermaid@11.12.1 && tar -xzf mermaid-*.tgz \
		|| { cd $(CURDIR); rm -rf $@; echo "Without npm the site's diagrams are text."; }

pictures: $(FOR_TOX)
	$(TOX) run -e dev -- python -m tests.docs.pictures

clean:
	rm -rf .venv .tox build dist htmlcov *.egg-info .coverage .hypothesis \
		.import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps: a second run installs nothing, a changed list of dependencies does.
.venv/.for-demo: pyproject.toml scripts/install.sh
	scripts/install.sh demo
	@touch $@

.venv/.for-tox: scripts/install.sh
	scripts/install.sh test
	@touch $@
