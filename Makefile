# make serve     start the whole system on this machine, on loopback, until Ctrl-C
# make test      style, types and the short tests
# make test-all  every test, the long ones too
# make load      one minute of load against a running server, then a table per tier
# make clean     remove what building and testing leave behind (not .venv, not the model cache)

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin

# Arguments for `make serve`, e.g. make serve ARGS="--port 9000".
ARGS ?=
# The server and the load of `make load`.
HOST ?= http://127.0.0.1:8000
USERS ?= 12
SPAWN_RATE ?= 4
RUN_TIME ?= 1m
LOAD_ARGS ?=

.PHONY: serve test test-all load clean
.DELETE_ON_ERROR:

# `exec`: the shell becomes Python, so that Ctrl-C reaches the one process that shuts everything down.
serve: $(VENV)/.installed
	@exec $(BIN)/python -m cluster serve $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest -m "not long"

test-all: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest

load: $(VENV)/.installed-loadtest
	@exec $(BIN)/locust -f loadtest/locustfile.py --headless --host $(HOST) --users $(USERS) \
		--spawn-rate $(SPAWN_RATE) --run-time $(RUN_TIME) --stop-timeout 30 --only-summary $(LOAD_ARGS)

# A stamp is older than its inputs after an edit of pyproject.toml or constraints.txt: pip then runs again.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing the pinned dependencies into $(VENV) (minutes the first time)"
	$(BIN)/python -m pip install -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-loadtest: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing the pinned dependencies for load tests into $(VENV)"
	$(BIN)/python -m pip install -c constraints.txt -e '.[loadtest]'
	@touch $(VENV)/.installed $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing the pinned dependencies for development into $(VENV) (minutes the first time)"
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	@touch $(VENV)/.installed $(VENV)/.installed-loadtest $@

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 is needed; set PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' || \
		{ echo "Python 3.11 or 3.12 is needed, $(PYTHON) is another; set PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf build *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
