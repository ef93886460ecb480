# Every target creates the virtual environment it needs, with the versions pinned in constraints.txt.
# Variables: PYTHON (the interpreter to create it with) and VENV (its folder).

PYTHON ?= $(shell python3.11 --version >/dev/null 2>&1 && echo python3.11 || echo python3)
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.layerleap-is-installed
# Two test processes with one thread each. Tests of one module run in one process and share fixtures.
WORKERS ?= --numprocesses 2 --dist loadfile
# Models for `make saturation`. Without espeak-ng, whisper-tiny only has the bundled recording.
SATURATION ?= smollm2 dinov2-mnist vit-mnist whisper-tiny
# Models for `make embedding`.
EMBEDDING ?= smollm2 rxnfp
# Models for `make sparsity`; the first one also trains.
SPARSITY ?= smollm2 rxnfp flan-t5-small
# Models and tasks for `make icl`.
ICL ?= smollm2
TASKS ?= opposites,kinds,reviews

.DEFAULT_GOAL := help
.PHONY: help setup demo paper saturation embedding compare sparsity icl test check bench readme-times results picture clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' \
	  | awk -F'|' '{ printf "%-18s %s\n", $$1, $$2 }'

setup: $(STAMP) ## Create the virtual environment and install layerleap in it, editable

demo: $(STAMP) ## Fit shortcuts for a bundled model on real text; the report is in build/demo
	$(BIN)/layerleap study shortcuts smollm2 --force --text wikipedia --other news \
	  --fit-texts 3500 --read-texts 700 --sections exits --out build/demo

paper: $(STAMP) ## Reproduce "Jump to Conclusions" on the bundled model (most of an hour); results in build/paper
	$(BIN)/layerleap study shortcuts smollm2 --force --out build/paper
	mkdir -p papers/layerleap_papers/jump_to_conclusions/results/smollm2
	cp build/paper/claims.csv build/paper/exits_saved.csv build/paper/findings.txt papers/layerleap_papers/jump_to_conclusions/results/smollm2/

saturation: $(STAMP) ## Reproduce "Looking Beyond the Top-1" on text, images and speech (an hour); results in build/saturation
	for model in $(SATURATION); do \
	  $(BIN)/layerleap study saturation $$model --force --out build/saturation/$$model || [ $$? -eq 3 ] || exit 1; \
	  mkdir -p papers/layerleap_papers/beyond_the_top1/results/$$model; \
	  cp build/saturation/$$model/claims.csv build/saturation/$$model/findings.txt \
	    papers/layerleap_papers/beyond_the_top1/results/$$model/ || exit 1; \
	done

embedding: $(STAMP) ## Measure what "Analyzing Transformers in Embedding Space" claims (half an hour); results in build/embedding
	for model in $(EMBEDDING); do \
	  $(BIN)/layerleap study embedding $$model --force --out build/embedding/$$model || [ $$? -eq 3 ] || exit 1; \
	  mkdir -p papers/layerleap_papers/embedding_space/results/$$model; \
	  cp build/embedding/$$model/claims.csv build/embedding/$$model/findings.txt \
	    papers/layerleap_papers/embedding_space/results/$$model/ || exit 1; \
	done

compare: $(STAMP) ## Align, compare and stitch models with one vocabulary (trained on first use); results in build/compare
	mkdir -p build/compare docs/results/compare
	$(BIN)/layerleap align small-lm small-lm-2 --html build/compare/align.html > build/compare/align.txt
	$(BIN)/layerleap align smollm2 smollm2-reviews > build/compare/align-tuned.txt
	$(BIN)/layerleap diff smollm2 smollm2-reviews --html build/compare/diff.html > build/compare/diff.txt
	for pair in small-lm:small-lm-2 smollm2:small-lm; do \
	  out=stitching-$${pair%%:*}; \
	  $(BIN)/layerleap study stitching $${pair%%:*} --other $${pair##*:} --force --out build/compare/$$out \
	    || [ $$? -eq 3 ] || exit 1; \
	  mkdir -p docs/results/compare/$$out; \
	  cp build/compare/$$out/claims.csv build/compare/$$out/findings.txt docs/results/compare/$$out/ || exit 1; \
	done
	cp build/compare/*.txt docs/results/compare/

sparsity: $(STAMP) ## Measure how few keys and neurons models need, and train with few (an hour); results in build/sparsity
	for model in $(SPARSITY); do \
	  sections=attention,heads,ffn,budget; \
	  [ $$model = $(firstword $(SPARSITY)) ] && sections=$$sections,relu,training,memory; \
	  $(BIN)/layerleap study sparsity $$model --sections $$sections --force --out build/sparsity/$$model || [ $$? -eq 3 ] || exit 1; \
	  mkdir -p papers/layerleap_papers/topk_attention/results/$$model; \
	  cp build/sparsity/$$model/claims.csv build/sparsity/$$model/findings.txt \
	    papers/layerleap_papers/topk_attention/results/$$model/ || exit 1; \
	done

icl: $(STAMP) ## Compare in-context learning with gradient descent, on answers and on all tokens (an hour); results in build/icl
	for model in $(ICL); do for tokens in answer all; do \
	  out=$$model; lenses=logit,linear,tuned; \
	  [ $$tokens = all ] && out=$$model-all-tokens && lenses=logit; \
	  $(BIN)/layerleap study icl $$model --task $(TASKS) --tokens $$tokens --lenses $$lenses --force --out build/icl/$$out \
	    || [ $$? -eq 3 ] || exit 1; \
	  mkdir -p papers/layerleap_papers/icl_and_gradient_descent/results/$$out; \
	  cp build/icl/$$out/claims.csv build/icl/$$out/findings.txt papers/layerleap_papers/icl_and_gradient_descent/results/$$out/ || exit 1; \
	done; done

test: $(STAMP) ## Run all tests, including those on real models
	$(BIN)/python -m pytest $(WORKERS)

check: $(STAMP) ## Check format, lint and types, and run all tests; must pass before a commit
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest $(WORKERS)

bench: $(STAMP) ## Run all benchmarks; the results are in build/bench.json
	$(BIN)/python benchmarks/run.py

readme-times: $(STAMP) ## Run every command of the README once and note how long it takes (half an hour)
	$(BIN)/python benchmarks/readme_times.py
	cp build/readme-times.csv docs/results/

results: demo ## Update the figures and numbers shown in the README (ten minutes)
	$(BIN)/layerleap study shortcuts rxnfp --force --out build/rxnfp
	for model in smollm2 rxnfp; do \
	  from=build/rxnfp; [ $$model = smollm2 ] && from=build/demo; \
	  mkdir -p docs/results/$$model && cp $$from/summary.png $$from/scores.csv \
	    $$from/findings.txt docs/results/$$model/ || exit 1; \
	done
	for file in bench.json coverage.csv; do \
	  if [ -f build/$$file ]; then cp build/$$file docs/results/; fi; \
	done

picture: $(STAMP)  # the README's picture of the debugger; needs Chromium
	$(BIN)/python tests/browser/picture.py

clean: ## Remove build/, caches and .venv
	rm -rf build dist .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info papers/*.egg-info
	find src papers tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml papers/pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[dev]" -e papers
	@touch $@
