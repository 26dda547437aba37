# Each target makes the environment it needs; the second time that costs nothing.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
NEWEST := .venv-newest

.PHONY: demo test lint gpu-test test-newest-transformers clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)            ## a tiny V4 on transformers' cache and on this one, then V4-Flash's bill
	$(BIN)/dsv4 demo

lint: $(STAMP)            ## ruff and mypy --strict
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

test: lint                ## lint, then every test that needs no GPU, in parallel
	$(BIN)/pytest -n 2 --dist worksteal

# A GPU machine has its own torch and triton, made for its driver: nothing is installed there.
# Test files run beside each other, for most of their time goes into compiling kernels.
GPU_TEST_JOBS ?= 8
gpu-test:                 ## GPU tests, then benchmarks; results under benchmarks/results/
	ls tests/gpu/test_*.py | PYTHONPATH=. xargs -P $(GPU_TEST_JOBS) -I {} $(PYTHON) -m pytest -m gpu {}
	PYTHONPATH=. $(PYTHON) -m benchmarks.run $(if $(COMMIT),--commit $(COMMIT))

# torch, triton and numpy stay as pinned: it is transformers that moves.
test-newest-transformers: ## the integration's tests on the newest transformers, in .venv-newest
	$(PYTHON) -m venv $(NEWEST)
	grep -E '^(torch|triton|numpy)==' constraints.txt > $(NEWEST)/constraints.txt
	$(NEWEST)/bin/pip install --quiet --disable-pip-version-check -U -c $(NEWEST)/constraints.txt \
		-e '.[dev]' transformers
	$(NEWEST)/bin/pytest -n 2 --dist worksteal tests/integrations

clean:
	rm -rf $(VENV) $(NEWEST) .pytest_cache .mypy_cache .ruff_cache
