# Every target creates the virtual environment it needs, with the versions pinned in constraints.txt.
# Variables: PYTHON (the interpreter to create it with) and VENV (its folder).

PYTHON ?= $(shell python3.11 --version >/dev/null 2>&1 && echo python3.11 || echo python3)
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.layerleap-is-installed
# Two test processes with one thread each. Tests of one module run in one process and share fixtures.
WORKERS ?= --numprocesses 2 --dist loadfile
# The reproductions of papers: the folders of papers/layerleap_papers, with hyphens.
PAPERS := jump-to-conclusions beyond-the-top1 embedding-space topk-attention \
  icl-and-gradient-descent stitching
# What the target of a paper keeps of a run; `make PAPER MODELS="..."` runs it on other models.
KEPT := claims.csv findings.txt

.DEFAULT_GOAL := help
.PHONY: help setup demo papers $(PAPERS) results-table test check bench readme-times results picture clean

help: ## List the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/  make \1|\2/' \
	  | awk -F'|' '{ printf "%-32s %s\n", $$1, $$2 }'

setup: $(STAMP) ## Create the virtual environment and install layerleap in it, editable

demo: $(STAMP) ## Fit shortcuts for a bundled model on real text; the report is in build/demo
	$(BIN)/layerleap study shortcuts smollm2 --force --text wikipedia --other news \
	  --fit-texts 3500 --read-texts 700 --sections exits --out build/demo

papers: $(PAPERS) ## Reproduce all papers at full size (several hours); results in papers/layerleap_papers/*/results

# $(call run,RESULT,STUDY AND OPTIONS): run a study and keep what came out in its paper's folder. Exit code 3
# means that a section could not run; the findings say why.
define run
	$(BIN)/layerleap study $(2) --force --out build/papers/$@/$(1) || [ $$? -eq 3 ]
	mkdir -p papers/layerleap_papers/$(subst -,_,$@)/results/$(1)
	cp $(KEPT:%=build/papers/$@/$(1)/%) papers/layerleap_papers/$(subst -,_,$@)/results/$(1)/
	$(BIN)/python papers/table.py

endef

jump-to-conclusions: MODELS ?= smollm2 rxnfp
jump-to-conclusions: KEPT += scores.csv exits_saved.csv summary.png
jump-to-conclusions: $(STAMP) ## Linear shortcuts between layers, on text and on reactions (an hour)
	$(foreach model,$(MODELS),$(call run,$(model),shortcuts $(model)))

# Without espeak-ng, whisper-tiny only has the bundled recording.
beyond-the-top1: MODELS ?= smollm2 dinov2-mnist vit-mnist whisper-tiny
beyond-the-top1: $(STAMP) ## Do ranks saturate in order? On text, images and speech (an hour)
	$(foreach model,$(MODELS),$(call run,$(model),saturation $(model)))

embedding-space: MODELS ?= smollm2 rxnfp
embedding-space: $(STAMP) ## Do parameters read in the vocabulary mean anything? (half an hour)
	$(foreach model,$(MODELS),$(call run,$(model),embedding $(model)))

topk-attention: MODELS ?= smollm2 rxnfp flan-t5-small
topk-attention: SECTIONS = attention,heads,ffn,budget$(if $(filter $(model),$(firstword $(MODELS))),$(TRAINED))
topk-attention: TRAINED := ,relu,training,memory
topk-attention: $(STAMP) ## How few keys and neurons are enough? The first model also trains (an hour)
	$(foreach model,$(MODELS),$(call run,$(model),sparsity $(model) --sections $(SECTIONS)))

icl-and-gradient-descent: MODELS ?= smollm2
icl-and-gradient-descent: ANSWER := --tokens answer
icl-and-gradient-descent: ALL := --tokens all --lenses logit
icl-and-gradient-descent: $(STAMP) ## In-context learning beside training, on answers and on all tokens (an hour)
	$(foreach model,$(MODELS),$(call run,$(model),icl $(model) $(ANSWER)))
	$(foreach model,$(MODELS),$(call run,$(model)-all-tokens,icl $(model) $(ALL)))

stitching: $(STAMP) ## Join two models by their vocabulary (the small models are trained on first use)
	$(call run,small-lm,stitching small-lm --other small-lm-2)
	$(call run,smollm2,stitching smollm2 --other small-lm)

results-table: ## Write the table of the papers' results into the pages that show it
	$(PYTHON) papers/table.py

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

results: demo ## Update the figures and numbers shown in the README and docs (half an hour)
	mkdir -p build/compare docs/results/smollm2 docs/results/compare
	cp $(addprefix build/demo/,summary.png scores.csv findings.txt) docs/results/smollm2/
	$(BIN)/layerleap align small-lm small-lm-2 --html build/compare/align.html > build/compare/align.txt
	$(BIN)/layerleap align smollm2 smollm2-reviews > build/compare/align-tuned.txt
	$(BIN)/layerleap diff smollm2 smollm2-reviews --html build/compare/diff.html > build/compare/diff.txt
	cp build/compare/*.txt docs/results/compare/
	for file in bench.json coverage.csv ridge.csv patchscope.csv patchscope.png; do \
	  if [ -f build/$$file ]; then cp build/$$file docs/results/; fi; \
	done

picture: $(STAMP)  # the README's picture of the debugger, and those of the verbs' pages; needs Chromium
	$(BIN)/python tests/browser/picture.py
	$(BIN)/python tests/browser/verb_pictures.py

clean: ## Remove build/, caches and .venv
	rm -rf build dist .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info papers/*.egg-info
	find src papers tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml papers/pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[dev]" -e papers
	@touch $@
