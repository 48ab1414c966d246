# Everything a fresh clone needs is python3 >= 3.11 and make; `make help` lists the targets.

VENV ?= .venv
# The first python3 that is new enough makes the environment. `make gpu` uses $(PYTHON) as it is.
PYTHON ?= python3
BASE_PYTHON = $(shell for p in $(PYTHON) python3.13 python3.12 python3.11; do \
    "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
PY = $(VENV)/bin/python
BLOCKDIFF = $(VENV)/bin/blockdiff
INSTALLED = $(VENV)/.installed

PUZZLES = data/sudoku4
RUN = runs/quickstart
# The processes that train the quickstart: two, or one on one core. Two have to be able to connect to each other.
PROCESSES ?= $(shell test "$$(getconf _NPROCESSORS_ONLN)" -gt 1 && echo 2 || echo 1)
# The processes that run the tests: one more than cores, for tests wait now and then. More than four would take much memory.
WORKERS ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN); test $$cores -lt 4 && echo $$((cores + 1)) || echo 4)

.DEFAULT_GOAL := help
.PHONY: help install browser quickstart test portable messages lowest lint types gpu benchmarks ray docs release clean

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(INSTALLED): pyproject.toml setup.py constraints.txt
	@test -n "$(BASE_PYTHON)" || { echo "blockdiff needs Python 3.11 or newer: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(BASE_PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

install: $(INSTALLED) ## make the environment in .venv and install blockdiff into it

browser: ## install the browser that tests pages, from the packages of the distribution (Debian, Ubuntu; needs root)
	apt-get update && apt-get install --yes --no-install-recommends chromium chromium-driver

quickstart: $(INSTALLED) ## make sudoku data, train a small model, evaluate it, draw how it solves one
	rm -rf $(RUN)
	$(BLOCKDIFF) data sudoku --output $(PUZZLES) --overwrite
ifeq ($(PROCESSES),1)
	$(BLOCKDIFF) train recipes/quickstart.yaml --output $(RUN)
else
	@echo "training in $(PROCESSES) processes; where they cannot connect to one another: make quickstart PROCESSES=1"
	OMP_NUM_THREADS=1 $(PY) -m torch.distributed.run --standalone --nproc_per_node $(PROCESSES) -m blockdiff train recipes/quickstart.yaml --output $(RUN)
endif
	@sed -n 5p $(PUZZLES)/test.jsonl > $(RUN)/puzzle.jsonl
	$(BLOCKDIFF) sample $(RUN)/model --prompts $(RUN)/puzzle.jsonl --trace $(RUN)/denoising.html
	$(BLOCKDIFF) eval $(RUN)/model --task sudoku --data $(PUZZLES)/test.jsonl --output $(RUN)/eval.json
	@echo "pictures: $(RUN)/curves.png (training) and $(RUN)/denoising.html (one puzzle, step by step)"

test: $(INSTALLED) ## run the tests (PYTEST_ARGS="-m quick" for a first answer, "-k name" for some of them)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

portable: $(INSTALLED) ## the tests of training outcomes and of rounding under other processors' arithmetic (PYTEST_ARGS)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PY) -m tests.support.portable $(PYTEST_ARGS)

messages: $(INSTALLED) ## write all messages of errors and warnings to tests/messages.txt
	$(PY) -m tests.support.messages > tests/messages.txt

lowest: ## the tests at the lowest versions that pyproject.toml allows, in build/lowest (PYTEST_ARGS; UV_OVERRIDE=FILE keeps versions, as of torch)
	$(BASE_PYTHON) -m venv build/lowest
	build/lowest/bin/python -m pip install --quiet --disable-pip-version-check uv
	VIRTUAL_ENV=build/lowest build/lowest/bin/uv pip install --quiet --resolution lowest-direct -e '.[dev]'
	OMP_NUM_THREADS=1 build/lowest/bin/python -m pytest -q -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

lint: $(INSTALLED) ## ruff: its rules, and the form of every file (`.venv/bin/ruff format` gives it)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(INSTALLED) ## mypy
	$(PY) -m mypy blockdiff cli recipes benchmarks

docs: $(INSTALLED) ## the API reference from the docstrings, in build/docs
	$(PY) docs/reference.py build/docs
	@echo "reference: build/docs/index.html"

gpu: ## GPU tests and all benchmarks, from the checkout: needs torch, triton, transformers, safetensors, pytest; QUICK=1 takes 9 minutes; CHECKPOINT=MODEL checks one, too
	PYTHONPATH=. $(PYTHON) -m benchmarks.gpu $(if $(QUICK),--quick,$(if $(CHECKPOINT),--checkpoint $(CHECKPOINT))) $(BENCHMARK_ARGS)

benchmarks: $(INSTALLED) ## the benchmarks on this machine (BENCHMARK_ARGS="--only denoise" for some of them)
	$(PY) -m benchmarks $(BENCHMARK_ARGS)

ray: $(INSTALLED) ## install Ray Serve too, and kill one of two replicas under load (not a part of the tests)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[serve,ray]' 'openai>=2.0'
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.replica_kills

# Wheel and sdist are built by setuptools itself. The version stands in blockdiff/__init__.py and nowhere else.
release: $(INSTALLED) ## wheel and sdist in dist/, once the newest section of CHANGELOG.md is that of the version
	@version=$$($(PY) -c 'import blockdiff; print(blockdiff.__version__)'); newest=$$(grep -m 1 '^## ' CHANGELOG.md); \
	case "$$newest" in "## $$version - 2"*) ;; *) \
		echo "CHANGELOG.md begins with '$$newest', not with '## $$version - DATE': name its section, or raise __version__" >&2; \
		exit 1;; esac
	rm -rf dist build/lib build/bdist.*
	$(PY) -c 'from setuptools.build_meta import build_sdist, build_wheel; build_sdist("dist"); build_wheel("dist")' > /dev/null
	@ls dist

clean: ## remove what was built and trained, and the environment
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache data runs
