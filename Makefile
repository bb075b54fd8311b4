# Each target sets up what it needs, in .venv, with only Python, pip and make on the machine.
PYTHON ?= python3
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: demo test check bench docs

# Torch comes first and pinned: an unpinned one may bring gigabytes of CUDA packages.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@

demo: .venv/ready
	$(BIN)/python examples/demo.py

# One process per core, with one thread each: most tests wait for Python, not for matrix products. The one that is done
# first takes tests from the other.
test: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n auto --dist worksteal

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python docs/links.py

bench: .venv/ready
	$(BIN)/outpace bench --dtype float32 --device cpu -m auto -m suffix -m recycling:nodes=8 -m ngram \
		--limit 2 --max-tokens 64 --rounds 2 --output build/bench --update docs/results/cpu.md#cpu

# The documentation as a site, in build/site; a broken link fails.
docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.venv/docs: .venv/ready
	$(BIN)/pip install -q -c constraints.txt -e '.[docs]'
	touch $@
