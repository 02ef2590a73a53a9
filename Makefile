# The two commands are `make demo` and `make test`; each does its own set-up in .venv.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest

# One OpenMP thread: with a neighbour on the cores, two are several times slower than one.
export OMP_NUM_THREADS ?= 1
export RAY_USAGE_STATS_ENABLED ?= 0
export VLLM_NO_USAGE_STATS ?= 1
export DO_NOT_TRACK ?= 1
export HF_HUB_DISABLE_TELEMETRY ?= 1

.PHONY: help demo test test-slow redteam bench lint docs install install-gpu prerequisites clean

help:
	@echo "make demo         train a small policy end to end on this machine's CPU (at most 10 minutes)"
	@echo "make test         the tests that CI runs"
	@echo "make test-slow    soak, chaos and size tests, every defence turned off in turn"
	@echo "make redteam      every CPU red-team case (needs KONTRAST_SHARED)"
	@echo "make bench        benchmarks that print tables"
	@echo "make lint         ruff, mypy, import-linter, generated documents"
	@echo "make docs         writes docs/cli.md, docs/config.md and docs/labels.md"
	@echo "make install-gpu  installs the GPU stack into .venv"

prerequisites:
	@scripts/prerequisites.sh $(PYTHON)

$(STAMP): requirements/cpu.txt pyproject.toml scripts/install_cpu.sh | prerequisites
	scripts/install_cpu.sh $(VENV) $(PYTHON)
	@touch $@

install: $(STAMP)

install-gpu: prerequisites
	scripts/install_gpu.sh $(VENV) $(PYTHON)
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/kontrast train demo

test: $(STAMP)
	$(PYTEST) -m "not slow and not gpu and not multi_gpu and not redteam"

test-slow: $(STAMP)
	$(PYTEST) -m "slow"

redteam: $(STAMP)
	$(PYTEST) -m "redteam"

bench: $(STAMP)
	for file in tests/bench/*.py; do $(BIN)/python $$file || exit 1; done

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/generate_docs.py --check

docs: $(STAMP)
	$(BIN)/python scripts/generate_docs.py

clean:
	rm -rf $(VENV) build dist *.egg-info
