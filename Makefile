# Each target sets up what it needs in .venv (pinned by constraints.txt) and skips what is there. `make` alone lists them.
PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin

# knobs of `make reproduce`
PAPERS  ?=
PROFILE ?= smoke
SEEDS   ?= 0
OUT     ?= runs
OPTIONS  = $(if $(JOBS),--jobs $(JOBS)) $(if $(THREADS),--threads $(THREADS)) $(if $(TIMEOUT),--timeout $(TIMEOUT)) \
           $(if $(MEMORY),--memory $(MEMORY)) $(if $(DEVICE),--device $(DEVICE)) $(if $(MODEL),--model $(MODEL)) \
           $(if $(SCHEDULER),--scheduler $(SCHEDULER))
FLAGS    = $(if $(FORCE),--force) $(if $(DRY_RUN),--dry-run) $(if $(COMMIT),--commit)

# knobs of the others
WORKERS  = $(or $(JOBS),$(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n > 8 ? 8 : n))))
ARGS    ?=
DOCS    ?= _docs
given    = $(filter command environment,$(firstword $(origin $(1))))

.PHONY: help reproduce test docs lab run prepare check bench
.DEFAULT_GOAL := help

help:
	@echo "make reproduce   every reproduction at profile smoke, a table of verdicts and an HTML report"
	@echo "                 PAPERS='odr logprob_audit' PROFILE=cpu SEEDS=0,1,2 JOBS=2 OUT=runs, also THREADS TIMEOUT"
	@echo "                 MEMORY DEVICE MODEL SCHEDULER FORCE=1 DRY_RUN=1 COMMIT=1 (as in icl26 reproduce --help)"
	@echo "make test        every test, in parallel (JOBS=2, ARGS='-k odr')"
	@echo "make docs        the documentation site, in _docs/ (DOCS=folder)"
	@echo "make lab         JupyterLab on nbs/"
	@echo "make run NB=…    execute notebooks in place and clean them (PROFILE=cpu is what the site shows of a reproduction)"
	@echo "make prepare     before a commit: export, run what changed, clean, README"
	@echo "make check       are package, notebooks and README in step?"
	@echo "make bench       benchmarks, as ratios"

# -- set-up: .venv/ready-all for running, .venv/ready-dev for everything -------------------------------------------------
# A torch that is there already is kept: then its pin is dropped, and a virtual environment made beside one sees it.

define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or later is needed; name one: make PYTHON=python3.12"; exit 2; }
	@has_torch() { "$$1" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' 2>/dev/null; }; \
	if [ ! -x $(BIN)/python ]; then \
	  if has_torch $(PYTHON); then $(PYTHON) -m venv --system-site-packages $(VENV); else $(PYTHON) -m venv $(VENV); fi || exit 1; \
	fi; \
	if has_torch $(BIN)/python && [ ! -e $(VENV)/pinned-torch ]; then grep -v '^torch==' constraints.txt; \
	else touch $(VENV)/pinned-torch; cat constraints.txt; fi > $(VENV)/constraints.txt; \
	echo "installing into $(VENV) (some minutes the first time; log: $(VENV)/install.log)"; \
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c $(VENV)/constraints.txt -e '.[$(1)]' \
	  > $(VENV)/install.log 2>&1 || { tail -n 30 $(VENV)/install.log; echo "the installation failed; the whole log: $(VENV)/install.log"; exit 1; }
endef

SOURCES := settings.ini setup.py constraints.txt

$(VENV)/ready-dev: $(SOURCES)
	$(call install,all$(comma)dev$(comma)docs)
	@touch $(VENV)/ready-all $@

$(VENV)/ready-all: $(SOURCES)
	$(call install,all)
	@touch $@

comma := ,

# -- targets --------------------------------------------------------------------------------------------------------------

reproduce: $(VENV)/ready-all
	@$(BIN)/icl26 reproduce $(PAPERS) --profile $(PROFILE) --seeds $(SEEDS) --out $(OUT) $(OPTIONS) $(FLAGS)

test: $(VENV)/ready-dev
	@$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

docs: $(VENV)/ready-dev
	@$(BIN)/icl26 docs --out $(DOCS) --jobs $(WORKERS)

lab: $(VENV)/ready-dev
	@cd nbs && ../$(BIN)/jupyter lab

run: $(VENV)/ready-dev
	@$(if $(NB),,echo "say which: make run NB=decision/odr/01_mle"; exit 2;) $(BIN)/python -m icl26.dev run $(NB) $(if $(call given,PROFILE),--profile $(PROFILE))

prepare: $(VENV)/ready-dev
	@$(BIN)/python -m icl26.dev prepare

check: $(VENV)/ready-dev
	@$(BIN)/python -m icl26.dev check && echo "notebooks, package and README are in step"

bench: $(VENV)/ready-dev
	@$(BIN)/python -m pytest benchmarks -s -p no:xdist --benchmark-columns=min,median,rounds $(ARGS)
