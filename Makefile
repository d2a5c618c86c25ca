# `make demo` and `make test` are the two commands; `make help` lists the rest.
# Each makes the virtual environment that it needs, once, and again when pyproject.toml or constraints.txt change.

PYTHON ?= python3
VENV ?= .venv
# What pytest runs; such as: make test TESTS="tests/unit -k budget"
TESTS ?=

PY := $(VENV)/bin/python
# For what calls programs of the environment by their bare names.
IN_VENV := PATH="$(abspath $(VENV))/bin:$$PATH"
RELEASED_CONTRACT := proto/released.binpb
# What is imported is compiled then; compiling all of torch beforehand takes as long as installing it.
PIP_INSTALL := $(PY) -m pip install --disable-pip-version-check --progress-bar off --no-compile -c constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Two installs into one environment at once would break it.
.NOTPARALLEL:
.PHONY: help demo test venv venv-all model services proto proto-release dashboard reference store-password \
        check check-generated check-proto lint check-types check-layers check-docker format clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

demo: model ## Install, fetch the model, start everything on this machine, answer one prompt under a budget, stop
	$(PY) examples/demo.py

# Files in their order: those with few but long tests would otherwise come last, when only one core is busy.
test: services venv model ## Install what the tests need and run all of them
	$(IN_VENV) python -m pytest -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder --durations=15 --durations-min=5 $(TESTS)

# --- Environment ------------------------------------------------------------------------------------------------------

venv: $(VENV)/.dev.stamp ## Virtual environment with everything, development tools included
venv-all: $(VENV)/.all.stamp ## Virtual environment with everything that runs, without the development tools

model: venv-all ## Fetch and convert the model of the demo and the tests, once
	$(PY) scripts/fetch_model.py

services: ## Install the Debian packages that the tests start themselves, if their binaries are missing
	scripts/install_test_services.sh

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "error: $(PYTHON) is older than 3.11; name a newer one: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.all.stamp: pyproject.toml constraints.txt | $(PY)
	$(PIP_INSTALL) -e '.[all]'
	@touch $@

$(VENV)/.dev.stamp: pyproject.toml constraints.txt | $(PY)
	$(PIP_INSTALL) -e '.[dev]'
	@touch $(VENV)/.all.stamp $@

# --- Generated files --------------------------------------------------------------------------------------------------

proto: venv ## Regenerate scissorhands/v1 from proto/
	$(IN_VENV) scripts/generate_proto.sh

store-password: docker/secrets/store_password ## Make a password for the store of the compose file, once

# The containers' users must be able to read the file; who may enter the folder decides who else can.
docker/secrets/store_password:
	install --directory --mode=700 $(@D)
	$(PYTHON) -c 'import secrets; print(secrets.token_hex(24))' >$@
	chmod 444 $@

proto-release: venv ## Make the contract the one that later changes must not break; docs/compatibility.md
	$(VENV)/bin/buf build proto --exclude-source-info --output $(RELEASED_CONTRACT)

dashboard: venv ## Regenerate the Grafana dashboards
	$(PY) scripts/generate_dashboard.py

reference: venv ## Regenerate the reference pages under docs/
	$(PY) scripts/generate_reference.py

# --- Checks -----------------------------------------------------------------------------------------------------------

check: check-generated check-proto lint check-types check-layers check-docker ## All checks that run no test

check-generated: venv ## Generated code, dashboards and reference are current
	$(IN_VENV) scripts/generate_proto.sh --check
	$(PY) scripts/generate_dashboard.py --check
	$(PY) scripts/generate_reference.py --check

check-proto: venv ## The contract's style, and that it breaks nothing of the last release's
	$(VENV)/bin/buf lint proto
	$(VENV)/bin/buf breaking proto --against $(RELEASED_CONTRACT)

lint: venv ## Style and formatting of the code
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

check-types: venv ## Types
	$(VENV)/bin/mypy
	MYPYPATH=scripts $(VENV)/bin/mypy $(wildcard scripts/*.py scripts/*/*.py examples/*.py benchmarks/*.py benchmarks/*/*.py)

check-layers: venv ## Which package may import which
	$(VENV)/bin/lint-imports

check-docker: venv ## Dockerfiles and compose file
	$(VENV)/bin/hadolint docker/*.Dockerfile
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.compose-spec docker/compose.yaml

format: venv ## Format the code and fix what can be fixed by itself
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean: ## Remove the virtual environment, caches and build outputs; the model stays
	rm -rf $(VENV) dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
