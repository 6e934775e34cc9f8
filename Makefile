# Everything happens in a virtual environment, which is made on first use. Each stamp is a set of packages.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
STAMPS := $(VENV)/stamps

.PHONY: demo test test-core test-all lint docs wheel release figures bench clean

demo: $(STAMPS)/cli,plot  ## the paper's experiments: figures, claims and a report
	$(BIN)/tailavg reproduce --output build/reproduction

# threads of JAX and torch share memory that was freed
export MALLOC_ARENA_MAX := 2
PYTEST := $(BIN)/python -m pytest
ON_ALL_CORES := --numprocesses auto --maxprocesses 4 --dist loadscope --no-loadscope-reorder --durations-csv=build/durations.csv

test: $(STAMPS)/test
	$(PYTEST) $(ON_ALL_CORES)

test-core: $(STAMPS)/test-core  ## with NumPy, pytest and hypothesis only
	$(PYTEST) tests/core tests/numpy src/tailavg/core src/tailavg/numpy

test-all: $(STAMPS)/test  ## and what takes too long for every day: every opcode, hundreds of kills
	TAILAVG_TEST_ALL=1 $(PYTEST) $(ON_ALL_CORES)

lint: $(STAMPS)/lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

docs: $(STAMPS)/docs
	$(BIN)/mkdocs build --strict --quiet

wheel: $(STAMPS)/release  ## build the wheel, and try its core in empty environments
	$(BIN)/python .ci/release.py

# and each extra; on which Pythons, as versions or paths. Those of torch are not among them: they are large
PYTHONS ?= 3.11 3.13
EXTRAS ?= cli cli,plot cli,tensorboard fast pandas polars river spark jax optax keras,jax
release: $(STAMPS)/release
	$(BIN)/python .ci/release.py --pythons $(PYTHONS) --extras $(EXTRAS)

figures: $(STAMPS)/test  ## draw the figures of the documentation anew
	PYTHONPATH=examples $(BIN)/python docs/figures.py

bench: $(STAMPS)/bench
	$(PIP) --no-deps timm  # without torchvision, which its averages do not need
	$(BIN)/python benchmarks/core.py
	$(BIN)/python benchmarks/frames.py
	$(BIN)/python benchmarks/stream.py
	$(BIN)/python benchmarks/plot.py
	$(BIN)/python benchmarks/spark.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/parameters.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/pytrees.py
	$(BIN)/python benchmarks/checkpoints.py

clean:
	rm -rf $(VENV) build dist site

$(STAMPS):
	$(PYTHON) -m venv $(VENV)
	mkdir -p $(STAMPS)

$(STAMPS)/%: pyproject.toml constraints.txt | $(STAMPS)
	$(PIP) --editable ".[$*]"
	touch $@
