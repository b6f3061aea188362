# Entry point of a checkout; `make` alone lists the targets.

PYTHON ?= python3
NAME ?=
RUNTIME ?=
ARGS ?=

VENV := .venv
# With PYTHON given, a separate environment is used if .venv has another version of Python.
ifneq ($(origin PYTHON),file)
NAMED := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
ifneq ($(filter-out .venv/bin/python$(NAMED),$(wildcard .venv/bin/python3.*)),)
VENV := .venv-$(NAMED)
endif
endif
# The name is a hash of the lock file and of the files that declare packages and entry points, so the environment is made
# again only if one of them has changed.
DECLARED := requirements.lock pyproject.toml setup.py papers/comparison/pyproject.toml
READY := $(VENV)/ready-$(firstword $(shell cat $(DECLARED) | sha256sum))$(TESTBED_TORCH:%=-%)
TESTBED := $(VENV)/bin/testbed

# Compiled modules are stored, so that the many processes of a test run do not compile them again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help scenario test smoke stress bench corpus papers lint site format images environment lock \
	clean distclean

help: ## list these targets
	@sed -n 's/^\([a-z]*\):.*## /  make \1  /p' $(MAKEFILE_LIST) | awk '{printf "  make %-12s", $$2; $$1=$$2=""; print}'

scenario: $(READY) ## run one: NAME=quickstart or a path; RUNTIME=simulate without containers; ARGS="--set seed=2"
	@test -n "$(NAME)" || { echo "name a scenario: make scenario NAME=quickstart" >&2; exit 2; }
	@$(TESTBED) run "$(NAME)" $(if $(RUNTIME),--runtime $(RUNTIME)) $(ARGS)

test: lint ## lint, then all tests, with real containers; ARGS="-k pattern"; PYTHON=python3.13 for this version
	@$(TESTBED) setup images
	@test "$$(id -u)" -ne 0 || { command -v ip && command -v iptables; } >/dev/null || \
		images/install "tests of links make their own networks" iproute2 iptables
	@PYTEST="$(VENV)/bin/python -m pytest" tests/run $(ARGS)

# On a shared host a link may be outside its tolerance: the verdict reports this, and the expectations hold anyway.
smoke: $(READY) ## the scenarios of scenarios/smoke, each with its expectations
	@failed=; for file in scenarios/smoke/*.yaml; do \
		echo "== $$file"; $(TESTBED) run "$$file" $(if $(RUNTIME),--runtime $(RUNTIME),--accept-links) $(ARGS) || failed="$$failed $$file"; \
	done; test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

stress: $(READY) ## random scenarios under random faults; ARGS="--seconds 600 --jobs 2", ARGS=--containers, --files, --messages, --signals
	@$(VENV)/bin/python -m tools.stress $(ARGS)

bench: $(READY) ## measure the costs of the testbed: start-up, links, memory, simulator
	@rm -f .build/conformance/*.json
	@$(VENV)/bin/python -m tools.bench $(ARGS)
	@$(VENV)/bin/python -m tools.bench.page .build/conformance/userspace.json .build/conformance/netem.json

corpus: $(READY) ## trace and cut 87 public architectures and compare the parts with the whole; needs torchvision and transformers in .venv
	@$(VENV)/bin/python -m tests.corpus.architectures $(ARGS)

papers: $(READY) ## run missing and stale figures of the papers, and write papers/ and docs/papers.md; ARGS="stahl --jobs 2"
	@$(VENV)/bin/python -c 'import testbed_comparison' 2>/dev/null || { \
		echo "$(VENV) lacks the command 'testbed papers': add it with '$(VENV)/bin/python -m pip install --no-deps --no-build-isolation -e papers/comparison'" >&2; exit 3; }
	@$(TESTBED) papers $(ARGS)

lint: $(READY) ## ruff and mypy
	@$(VENV)/bin/ruff check
	@$(VENV)/bin/ruff format --check
	@$(VENV)/bin/mypy --num-workers auto

site: $(READY) ## the documentation as a site, with a page for each method and paper
	@$(VENV)/bin/python docs/website.py .build/site
	@test -x .build/mkdocs/bin/mkdocs || { $(PYTHON) -m venv .build/mkdocs && \
		.build/mkdocs/bin/python -m pip install --quiet --disable-pip-version-check -r docs/website.requirements; }
	@cd .build/site && NO_MKDOCS_2_WARNING=1 ../mkdocs/bin/mkdocs build --quiet --strict
	@echo "read it at http://127.0.0.1:8000 (search needs a server): python3 -m http.server --bind 127.0.0.1 --directory .build/site/site"

format: $(READY) ## format and fix the files with ruff
	@$(VENV)/bin/ruff check --fix
	@$(VENV)/bin/ruff format

images: $(READY) ## build the container images of the present files
	@$(TESTBED) setup images

environment: $(READY) ## make the Python environment in .venv from requirements.lock; PYTHON=python3.13 for this version; TESTBED_TORCH=cuda

$(READY): $(DECLARED)
	@images/environment $(PYTHON) $(VENV) $@

lock: $(READY) ## write requirements.lock from the packages in .venv
	@{ sed -n '/^#/p' requirements.lock; \
	$(VENV)/bin/python -m pip freeze --all --exclude-editable | grep -v -e '^#' -e '^pip==' | sed 's/+cpu$$//' | sort -f; \
	} > .build-lock && mv .build-lock requirements.lock

clean: ## remove your runs, the build folder and caches; environment, images and results stay
	-@test ! -x $(TESTBED) || $(TESTBED) down --all
	rm -rf .build build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*/*' -prune -exec rm -rf {} +

distclean: ## clean, and remove images and environment too
	-@test ! -x $(TESTBED) || { $(TESTBED) down --all && $(TESTBED) setup images --remove; }
	@$(MAKE) --no-print-directory clean
	rm -rf .venv .venv-* *.egg-info
