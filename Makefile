# Shoal: `make demo` and `make test` do all their own set-up; they need Python 3.11 (or newer) and make.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all soak lint types bench bench-overhead bench-api bench-start bench-data bench-recovery bench-layouts bench-gpu docs picture clean

help:            ## what can be made
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | awk -F ':.*## *' '{printf "  make %-16s %s\n", $$1, $$2}'

setup: $(VENV)/.ready   ## a virtual environment with everything in it

$(VENV)/.ready: pyproject.toml constraints.txt deploy/setup.sh
	@PYTHON="$(PYTHON)" VENV="$(VENV)" sh deploy/setup.sh
	@touch $@

demo: setup      ## train, lose a worker to SIGKILL, go on, grow back, compare with an undisturbed run
	@$(BIN)/shoal demo

test: setup      ## the whole test suite
	@$(BIN)/pytest

test-all: setup  ## the whole test suite and every cell of its matrices
	@$(BIN)/pytest -m "not soak"

MINUTES ?= 10
SEED    ?= 1
soak: setup      ## random faults for MINUTES=10 with SEED=1, then parity, goodput and leaks
	@$(BIN)/python bench/soak/main.py --minutes $(MINUTES) --seed $(SEED)

lint: setup types ## ruff, mypy strict, import-linter
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports

types: setup     ## mypy strict
	@$(BIN)/mypy

bench: bench-overhead bench-api bench-start bench-data ## every benchmark

bench-overhead: setup ## Shoal against the same loop under plain torchrun
	@$(BIN)/python bench/overhead.py

bench-api: setup ## requests a second, list latency, memory of the control plane
	@$(BIN)/python bench/api.py

bench-start: setup ## how long shards take to start: forked from their node's server, and as interpreters
	@$(BIN)/python bench/start.py

bench-data: setup ## how fast text is tokenised
	@$(BIN)/python bench/data.py

bench-recovery: setup ## what failures cost: Shoal, Ray Train V2 elastic and torchrun side by side
	@mkdir -p build && $(BIN)/python bench/recovery/main.py --out build/recovery.jsonl

bench-layouts: setup ## changes of layout, and the planner against this machine
	@mkdir -p build && $(BIN)/python bench/layouts/main.py --out build/layouts.json

bench-gpu: setup ## one GPU: MFU, and the engine against a plain loop; says so if there is none
	@$(BIN)/python bench/gpu.py

docs: setup      ## regenerate the generated pages
	@$(BIN)/python tools/docs_pages.py
	@$(BIN)/python tools/openapi.py

picture: setup   ## the README's picture, from a real run of the demo
	@COLUMNS=104 $(BIN)/shoal demo | tee build-demo.txt && $(BIN)/python tools/picture.py build-demo.txt docs/images/demo.svg
	@rm -f build-demo.txt

clean:           ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis build dist
