# make serve: everything from a fresh clone to a running service. Each step is done once: stamps
# in the virtual environment say what is installed, and a second run needs no network.

PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14 python; do \
	command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	2>/dev/null && { echo $$p; break; }; done)
MODEL ?= $(DEFAULT_MODEL)
PORT ?= 8000
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
DEFAULT_MODEL := models/smollm2
MODEL_READY := $(DEFAULT_MODEL)/distserve-source.json
SETUP := $(VENV)/.installed-setup
TEST := $(VENV)/.installed-test

TORCH_PINNED := torch==2.13.0
TORCH_ACCEPTED := torch>=2.11
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

# Where `make install` puts the service; see systemd/README.md.
PREFIX ?= /opt/distserve
DESTDIR ?=
INSTALL = PREFIX='$(PREFIX)' DESTDIR='$(DESTDIR)' sh systemd/install.sh

say = @echo "==> $(1)"

.DEFAULT_GOAL := help
.PHONY: help serve test test-slow soak lint bench-engine bench-token-path bench-load bench-simulator bench-plan bench-pipeline cuda-build \
	install uninstall clean distclean

help:
	@echo "make serve         install, fetch the default model, serve it on 127.0.0.1:$(PORT)"
	@echo "make test          lint, then every test"
	@echo "make test-slow     the tests that make test leaves out: deaths across nodes, real prompts in tp 3"
	@echo "make soak          real processes under random attacks for an hour, or SOAK_S seconds; a table"
	@echo "make lint          ruff, mypy --strict, the house rules"
	@echo "make bench-engine  measure the engine on this machine, and transformers beside it"
	@echo "make bench-token-path  measure the daemon alone, with workers that cost nothing"
	@echo "make bench-load    measure the daemon under more load than it has room for"
	@echo "make bench-simulator  measure the simulator, and set it beside the paper's curves"
	@echo "make bench-plan    measure the placement search"
	@echo "make bench-pipeline  measure instances of several workers on a core each"
	@echo "make cuda-build    compile FlashInfer's modules ahead, where a CUDA compiler is"
	@echo "make install       as root: install the systemd service (PREFIX=$(PREFIX), DESTDIR=)"
	@echo "make uninstall     as root: take it off again; PURGE=1: with its configuration and models"
	@echo "make clean         remove caches and build leftovers"
	@echo "make distclean     the same, and the virtual environment and the models"
	@echo
	@echo "Variables: PYTHON (now: $(or $(PYTHON),none found)), MODEL=DIR, PORT=N,"
	@echo "           ARGS='more arguments', e.g. make serve ARGS='--prefill 2 --decode 1'"

serve: $(SETUP) $(if $(filter $(DEFAULT_MODEL),$(MODEL)),$(MODEL_READY))
	$(call say,Serving $(MODEL) on http://127.0.0.1:$(PORT) (Ctrl-C ends it))
	@exec $(BIN)/distserve serve --model $(MODEL) --host 127.0.0.1 --port $(PORT) $(ARGS)

test: lint $(MODEL_READY)
	$(call say,Running the tests)
	@$(BIN)/python -P -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

test-slow: $(TEST) $(MODEL_READY)
	$(call say,Running the slow tests)
	@$(BIN)/python -P -m pytest -m slow $(ARGS)

soak: $(TEST)
	$(call say,Attacking the service for $${SOAK_S:-3600} seconds)
	@$(BIN)/python -m tests.chaos.soak $(ARGS)

lint: $(TEST)
	$(call say,Checking style and types)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy --strict
	$(call say,Checking the house rules)
	@$(BIN)/python -P -m pytest -q tests/test_house_rules.py

bench-engine: $(TEST) $(MODEL_READY)
	$(call say,Measuring the engine with $(MODEL))
	@$(BIN)/python -m tests.benchmarks.engine --model $(MODEL) $(ARGS)

bench-token-path: $(TEST)
	$(call say,Measuring the daemon's token path)
	@$(BIN)/python -m tests.benchmarks.token_path

bench-load: $(TEST)
	$(call say,Measuring the daemon under load)
	@$(BIN)/python -m tests.benchmarks.load

bench-simulator: $(TEST)
	$(call say,Measuring the simulator)
	@$(BIN)/python -m tests.benchmarks.simulator $(ARGS)

bench-plan: $(TEST)
	$(call say,Measuring the placement search)
	@$(BIN)/python -m tests.benchmarks.placement_search $(ARGS)

bench-pipeline: $(TEST) $(MODEL_READY)
	$(call say,Measuring instances of several workers with $(MODEL))
	@$(BIN)/python -m tests.benchmarks.pipeline --model $(MODEL) $(ARGS)

cuda-build: $(SETUP)
	$(call say,Compiling FlashInfer's modules)
	@$(PIP) install --quiet -c constraints.txt --no-build-isolation -e '.[setup,cuda]'
	@$(BIN)/python -P -m gpu_workers cuda-build $(ARGS)

# In make, since an environment must be there before any command of ours could run.
install:
	@$(INSTALL) check '$(PYTHON)'
	@umask 022 && $(MAKE) --no-print-directory VENV='$(DESTDIR)$(PREFIX)/venv' \
		'$(DESTDIR)$(PREFIX)/venv/.torch'
	@$(INSTALL) install

uninstall:
	@$(INSTALL) uninstall

$(MODEL_READY): | $(SETUP)
	$(call say,Fetching the default model (once; 93 MB, about a minute))
	@$(BIN)/distserve models fetch smollm2 --dir $(dir $(DEFAULT_MODEL))

$(SETUP): pyproject.toml constraints.txt | $(VENV)/.torch
	$(call say,Installing distserved and what it needs)
	@$(PIP) install --quiet -c constraints.txt setuptools
	@$(PIP) install -c constraints.txt --no-build-isolation -e '.[setup]'
	@touch $@

$(TEST): pyproject.toml constraints.txt | $(SETUP)
	$(call say,Installing what the tests need)
	@$(PIP) install -c constraints.txt --no-build-isolation -e '.[setup,test]'
	@touch $@

# The pinned torch, else any accepted one; nothing at all where one is installed already. Where
# there is no GPU and PyTorch's own index answers, its CPU build is taken: the one on PyPI for
# Linux brings gigabytes of CUDA along.
$(VENV)/.torch: | $(BIN)/python
	@if $(BIN)/python -c "$$HAS_TORCH" 2>/dev/null; then \
		echo "==> PyTorch is there already"; \
	else \
		echo "==> Installing PyTorch (200 MB or more; a few minutes)"; \
		index=; \
		if ! test -e /dev/nvidiactl && $(BIN)/python -c "$$CPU_INDEX_ANSWERS" 2>/dev/null; then \
			index="--extra-index-url $(TORCH_CPU_INDEX)"; \
		fi; \
		$(PIP) install -c constraints.txt $$index '$(TORCH_PINNED)' \
			|| $(PIP) install -c constraints.txt $$index '$(TORCH_ACCEPTED)'; \
	fi
	@touch $@

define HAS_TORCH
import importlib.metadata as m, re
assert tuple(map(int, re.findall(r"\d+", m.version("torch"))[:2])) >= (2, 11)
endef
export HAS_TORCH

define CPU_INDEX_ANSWERS
import urllib.request
urllib.request.urlopen("$(TORCH_CPU_INDEX)/torch/", timeout=5).close()
endef
export CPU_INDEX_ANSWERS

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed and none was found." \
		"Install it, or say where it is: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is too old: Python 3.11 or newer is needed"; exit 1; }
	$(call say,Making the virtual environment in $(VENV) with $(PYTHON))
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "$(PYTHON) cannot make one (Debian, Ubuntu: apt install python3-venv)"; exit 1; }

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find daemon gpu_workers ipc planner tests -name __pycache__ -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) models
