# Each target makes the environment it needs; the second time that costs nothing.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test lint gpu-test clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)            ## plan V4-Flash, then watch requests live and end on this machine
	$(BIN)/dsv4 demo

lint: $(STAMP)            ## ruff and mypy --strict
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

test: lint                ## lint, then every test that needs no GPU, in parallel
	$(BIN)/pytest -n 2 --dist worksteal

# A GPU machine has its own torch and triton, made for its driver: nothing is installed there.
gpu-test:                 ## GPU tests, then benchmarks; results under benchmarks/results/
	PYTHONPATH=. $(PYTHON) -m pytest tests/gpu -m gpu
	PYTHONPATH=. $(PYTHON) -m benchmarks.run $(if $(COMMIT),--commit $(COMMIT))

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
