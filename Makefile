# Every target sets itself up: a virtual environment, and in it what constraints.txt pins.
# Variables: PYTHON (the interpreter to build it with) and VENV (its folder, made if missing).

PYTHON ?= $(shell python3.11 --version >/dev/null 2>&1 && echo python3.11 || echo python3)
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.layerleap-is-installed
# Two tests at a time, of one thread each; a module's tests stay together and share what they make.
WORKERS ?= --numprocesses 2 --dist loadfile
# What `make saturation` studies; without espeak-ng whisper-tiny has one recording to hear.
SATURATION ?= smollm2 dinov2-mnist vit-mnist whisper-tiny

.DEFAULT_GOAL := help
.PHONY: help setup demo paper saturation test check bench results clean

help: ## List the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1|\2/' \
	  | awk -F'|' '{ printf "%-14s %s\n", $$1, $$2 }'

setup: $(STAMP) ## Make the virtual environment and install layerleap in it, editable

demo: $(STAMP) ## Fit shortcuts of a bundled real model on real text; the report is in build/demo
	$(BIN)/layerleap study shortcuts smollm2 --text wikipedia --other news \
	  --fit-texts 4000 --read-texts 800 --sections exits --out build/demo

paper: $(STAMP) ## Everything in "Jump to Conclusions" on the bundled model (most of an hour); in build/paper
	$(BIN)/layerleap study shortcuts smollm2 --out build/paper
	mkdir -p docs/results/paper
	cp build/paper/claims.csv build/paper/exits_saved.csv build/paper/findings.txt docs/results/paper/

saturation: $(STAMP) ## Everything in "Looking Beyond the Top-1", on language, images and speech (an hour); in build/saturation
	for model in $(SATURATION); do \
	  $(BIN)/layerleap study saturation $$model --out build/saturation/$$model || exit 1; \
	  mkdir -p docs/results/saturation/$$model; \
	  cp build/saturation/$$model/claims.csv build/saturation/$$model/findings.txt \
	    docs/results/saturation/$$model/ || exit 1; \
	done

test: $(STAMP) ## Run all tests, those on real models included
	$(BIN)/python -m pytest $(WORKERS)

check: $(STAMP) ## Format, lint, types and all tests: what must pass before a commit
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest $(WORKERS)

bench: $(STAMP) ## Measure every bar; the results are in build/bench.json
	$(BIN)/python benchmarks/run.py

results: demo ## Make the figures and numbers that the README shows (ten minutes)
	$(BIN)/layerleap study shortcuts rxnfp --out build/rxnfp
	for model in smollm2 rxnfp; do \
	  from=build/rxnfp; [ $$model = smollm2 ] && from=build/demo; \
	  mkdir -p docs/results/$$model && cp $$from/summary.png $$from/scores.csv \
	    $$from/findings.txt docs/results/$$model/ || exit 1; \
	done
	if [ -f build/bench.json ]; then cp build/bench.json docs/results/; fi

clean: ## Remove what was made here: build/, caches and .venv
	rm -rf build dist .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@
