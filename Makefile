# Every command works from a clean clone: what it needs is installed into .venv first. Nothing has to be activated.
#
#   make demo      plan for 32 GPUs, then plan, train and compare a tiny model on this machine
#   make test      the quick tests, and the launcher and one layout of each engine for real
#   make test-cluster  the other layouts and runs of several processes
#   make long      the slower variants, every combination of method, precision and recomputation, and 60 draws (SEED=9)
#   make environments  Axolotl and LLaMA-Factory, each in .venvs/ of its own, for tests of make long (4.4 GB)
#   make check     lint, format, types, import contracts
#   make format    reformat the code  make docs    rewrite what is generated in docs/ and README.md
#   make site      docs/ and README.md as a site in site/, with the page that answers in a browser
#   make bench     timings, for information           make accuracy  predictions against published measurements
#   make layouts   the layouts of make test-cluster again, and the table of docs/accuracy.md made of them
#   make predictions   the planner's side of these tables again, where only the planner changed
#   make combinations  every combination of make long again, and the tables of docs/accuracy.md made of them
#   make trace     planner beside traces, no GPU    make calibration  fit the published measurements again (ten minutes)
#   make fuzz      5,000 wrong inputs and odd files by chance; SEED=1 for the same ones again (3 minutes)
#   make same      3,000 questions to the planner, their figures and words as when the hashes were stored (4 minutes)
#   make mutants   60 single changes of formulas by chance, and those that no quick test notices; SEED=1 for others (10 minutes)
#   make kernels   fit presets/kernel_times to tables of measured kernels (a minute)
#   make kernels-judge  how far off such fits are on kernels and GPUs left out, beside a Gaussian process (ten minutes)
#   make install   only the installation

# The first Python of 3.11 or later. Another one: make PYTHON=/path/to/python install
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for name in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$name" -c '$(NEW_ENOUGH)' 2>/dev/null && { echo "$$name"; break; }; done)

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed.stamp

# Several ranks share few cores: more threads a process only get in each other's way.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help install environments test test-cluster long combinations predictions check format demo bench docs site page-files accuracy layouts calibration measure-gpu trace fuzz same mutants kernels kernels-judge

help:
	@sed -n '3,/^$$/s/^# *//p' Makefile

install: $(INSTALLED)

# torch comes first and on its own: DeepSpeed's build looks for it.
$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or later found. Try make PYTHON=/path/to/python $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV) || { echo "error: python -m venv failed. On Debian: apt-get install python3-venv" >&2; rm -rf $(VENV); exit 1; }
	$(BIN)/python -m pip install --quiet $$(grep '^torch==' constraints.txt)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[run,trl,tui,dev,docs]'
	$(BIN)/python -m compileall -q planner executor tui
	@touch $@

# Tools whose pins collide with ours, for tests of make long that have them parse what the planner writes and train it.
environments: .venvs/axolotl/installed.stamp .venvs/llamafactory/installed.stamp

.venvs/%/installed.stamp: tests/environments/%.txt scripts/environment.sh constraints.txt
	@scripts/environment.sh $* "$(PYTHON)"

# Quick tests share the cores; those that start several processes run one after the other, or they would time each
# other out. Runs that several tests look at are made once (tests/cluster/conftest.py).
test: install
	@scripts/cluster-packages.sh
	@$(MAKE) --no-print-directory page-files || echo "tests of the page in a browser's Python are skipped"
	$(BIN)/python -m pytest -q -n 2 -m 'not cluster and not long'
	$(BIN)/python -m pytest -q -m smoke tests/cluster

test-cluster: install
	@scripts/cluster-packages.sh
	$(BIN)/python -m pytest -q -m 'not smoke and not long' tests/cluster

# What CI only samples, an hour: also every combination that is launched (tests/cluster/combinations.py) and 60 draws of
# more than that. Another SEED draws others.
SEED ?= 9
long: install
	@scripts/cluster-packages.sh
	@$(MAKE) --no-print-directory -k environments || echo "note: tests of what could not be installed are skipped" >&2
	SEED=$(SEED) $(BIN)/python -m pytest -q -m long

check: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

demo: install
	@PATH="$(CURDIR)/$(BIN):$$PATH" scripts/demo.sh

bench: install
	@for program in $(wildcard bench/*.py); do echo "# $$program"; $(BIN)/python "$$program" || exit 1; done

# RUNS=--runs also trains what the tutorial trains, where its report has changed.
RUNS ?=
docs: install
	$(BIN)/python scripts/docs.py $(RUNS)
	$(BIN)/python scripts/pictures.py

# What the page that answers in a browser loads (scripts/page.py).
page-files: install
	@test -d web/node_modules/pyodide -a -d web/wheels || $(BIN)/python scripts/page.py fetch

# Any warning is an error. The variable is against a notice of the theme's makers, which says nothing of these pages.
site: install page-files
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html; its search works where a server shows it: $(BIN)/python -m http.server -d site"

# Every layout of tests/cluster/cases.py for real, the records of these runs in tests/recorded, and the tables of
# docs/accuracy.md and docs/how-far-off.md that say how it went.
layouts: install
	$(BIN)/python -m pytest -q tests/cluster/test_equivalence.py tests/cluster/test_prediction.py --layouts docs/accuracy/layouts.json
	$(BIN)/python scripts/docs.py docs/accuracy.md docs/how-far-off.md

# Every combination traced or run, and the tables of docs/accuracy.md; peaks that are too far off stand there, and in the
# exit code.
combinations: install
	@code=0; \
	$(BIN)/python -m pytest -q -m long tests/cluster/test_combinations.py --combinations docs/accuracy/combinations.json || code=$$?; \
	$(BIN)/python scripts/docs.py docs/accuracy.md && exit $$code

# The same tables after a change of the planner alone: what was measured stays, and is predicted anew. Seconds.
predictions: install
	@$(BIN)/python -m pytest -q tests/cluster/test_record.py --combinations docs/accuracy/combinations.json > /dev/null || true
	$(BIN)/python scripts/docs.py docs/accuracy.md

accuracy: install
	$(BIN)/python -m tests.truth.published replay tests/truth/*.jsonl

# Numbers of single kernels on each GPU, and how far off they are on kernels, and on GPUs, that were left out; beside
# them a Gaussian process on the same splits.
kernels: install
	$(BIN)/python -m scripts.kernels fit

kernels-judge: install
	@$(BIN)/python -m scripts.kernels judge --process

# What was measured on one machine of ours says nothing of others': own_*.jsonl stays out. unfitted_*.jsonl are for
# judging alone.
calibration: install
	$(BIN)/python -m tests.truth.published calibrate $(filter-out tests/truth/own_% tests/truth/unfitted_%,$(wildcard tests/truth/*.jsonl)) \
		-o presets/calibrations/published.toml --force > docs/accuracy/fitted.new
	mv docs/accuracy/fitted.new docs/accuracy/fitted.md

# On a machine with GPUs: the tests that need one, then a matrix of real runs and one rank of 64 at full size.
# Interrupted, it goes on where it stopped. A cell that crashed is a row with its reason, and the exit code at the end.
MATRIX ?= small
measure-gpu: install
	$(BIN)/python -m pytest -q tests/gpu
	@code=0; \
	$(BIN)/executor measure --matrix $(MATRIX) -o tests/truth/own_gpu.jsonl || code=$$?; \
	test $$code -lt 128 || exit $$code; \
	$(BIN)/executor measure --matrix $(MATRIX) --fake-world 64 -o tests/truth/own_gpu_fake.jsonl || code=$$?; \
	exit $$code

# The seed is drawn and printed; with it every call is made again. One call of a seed: scripts/fuzz.py --only N.
SEED ?=
CALLS ?= 5000
fuzz: install
	@$(BIN)/python scripts/fuzz.py --calls $(CALLS) $(if $(SEED),--seed $(SEED))

# For a change that means to move code and no figure. ARGUMENTS="--show 12" prints one answer, "--store" keeps new ones.
ARGUMENTS ?=
same: install
	@$(BIN)/python scripts/same.py $(ARGUMENTS)

# Single changes of formulas, bounds, rules and verdicts, each of which a quick test should notice; not in CI.
mutants: install
	@$(BIN)/python scripts/mutants.py $(if $(SEED),--seed $(SEED))

# The planner's memory and collectives beside traces of the real modules on fake tensors, 125M to 70B, without a GPU.
trace: install
	@$(BIN)/python -m scripts.trace_pairs
