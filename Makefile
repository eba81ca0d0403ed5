# make install | make demo | make test | make test-slurm | make lint | make types | make constraints
VENV ?= .venv
PYTHON ?= python3
# The CPU build of one version; set TORCH to the build your GPU needs, e.g. TORCH="torch --index-url ..."
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
EXTRAS := dev,order,dashboard,figures,hf,tensorboard

TESTS := -m "not slurm" -q tests
IN_PARALLEL := -n 2 --dist worksteal

.PHONY: install demo demo-smoke test test-twice test-slurm lint types constraints

# Every time, and not with the stamp: the scripts change with the package.
install: $(STAMP)
	$(BIN)/olmo-ext slurm init

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip

# torch first: left to the resolver, its default build brings gigabytes of CUDA to a machine without a GPU.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet -c constraints.txt -e .
	touch $@

$(DEV_STAMP): $(STAMP)
	$(BIN)/pip install --quiet -c constraints.txt -e ".[$(EXTRAS)]"
	touch $@

demo: $(STAMP)
	$(BIN)/olmo-ext demo -o report.html

# The same path with runs of seconds: what CI can afford.
demo-smoke: $(STAMP)
	$(BIN)/olmo-ext demo --smoke --directory build/demo-smoke -o build/demo-smoke/report.html

test: $(DEV_STAMP)
	$(BIN)/python -m pytest $(IN_PARALLEL) $(TESTS)

# The same tests, and those that failed once more, one after the other: what CI runs.
test-twice: $(DEV_STAMP)
	$(BIN)/python scripts/test_twice.py $(TESTS) --first $(IN_PARALLEL)

# Needs Debian's slurm-wlm and munge; starts its own cluster on loopback and stops it.
test-slurm: $(DEV_STAMP)
	$(BIN)/python -m pytest -m slurm -q tests/slurm

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(DEV_STAMP)
	$(BIN)/mypy

constraints: $(DEV_STAMP)
	( echo "# One exact set that installs and works on Python 3.11: pip install -c constraints.txt ."; \
	  echo "# Written by 'make constraints' from the environment that passed the tests."; \
	  $(BIN)/pip freeze --exclude-editable | sed 's/+cpu//' | sort -f ) > constraints.new
	mv constraints.new constraints.txt
