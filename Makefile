# Each target makes the environment it needs; the second time that costs nothing.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Named after the interpreter: `make demo PYTHON=python3.12` makes the environment anew where another made it.
STAMP  := $(VENV)/.installed$(subst /,-,-$(PYTHON))
NEWEST := .venv-newest
OLDEST := .venv-oldest
# Every minor version that pyproject.toml allows, unpacked apart: .venv-triton-3.6.0 and so on.
TRITONS := 3.6.0 3.7.1 3.8.0 3.9.0

.PHONY: help demo test lint gpu-test test-gpus test-tritons test-oldest test-newest test-newest-transformers \
	test-transformers-own dist docs docs-links clean

help:                     ## what can be made
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 28

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)            ## a tiny trained V4 answers on this cache and on transformers', then V4-Flash's bill
	$(BIN)/dsv4 demo

lint: $(STAMP)            ## ruff and mypy --strict
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

test: lint                ## lint, then every test that needs no GPU, in parallel
	$(BIN)/pytest -n 2 --dist worksteal

dist: $(STAMP)            ## wheel and sdist in dist/, checked as the package index checks them
	rm -rf dist
	$(BIN)/uv build --quiet --out-dir dist
	$(BIN)/uv tool run --quiet twine==6.2.0 check --strict dist/*.whl dist/*.tar.gz

# A warning is an error: a dead link, a page that no menu names, a cell of a notebook that fails.
docs: $(STAMP)            ## the site of docs/, with its notebooks run, in docs/_build/html
	PYTHONPATH=$(CURDIR) $(BIN)/sphinx-build -q -W --keep-going -E -b html docs docs/_build/html

docs-links: $(STAMP)      ## addresses of other sites that docs/ names, asked one by one
	PYTHONPATH=$(CURDIR) $(BIN)/sphinx-build -q -D nb_execution_mode=off -b linkcheck docs docs/_build/links

# A GPU machine has its own torch and triton, made for its driver: nothing is installed there.
# Test files run beside each other, for most of their time goes into compiling kernels.
GPU_TEST_JOBS ?= 8
# Benchmarks run behind failed tests too, and the target fails if either does. A file of which pytest
# collects nothing (its exit code 5) is no failure.
gpu-test:                 ## GPU tests, then benchmarks in any case; results under benchmarks/results/
	@tests=passed; benchmarks=passed; export PYTHONPATH=.; \
	ls tests/gpu/test_*.py | xargs -P $(GPU_TEST_JOBS) -I {} \
		sh -c '$(PYTHON) -m pytest -m gpu "$$1" || test $$? -eq 5' gpu-test {} || tests=FAILED; \
	$(PYTHON) -m benchmarks.run $(if $(COMMIT),--commit $(COMMIT)) || benchmarks=FAILED; \
	echo "GPU tests $$tests, benchmarks $$benchmarks"; \
	test $$tests = passed && test $$benchmarks = passed

# torch, triton and numpy stay as pinned: it is transformers that moves. A test that is skipped there
# is one that says nothing about it, so it has failed.
test-newest-transformers: ## the integration's tests on the newest transformers, in .venv-newest
	$(PYTHON) -m venv $(NEWEST)
	grep -E '^(torch|triton|numpy)==' constraints.txt > $(NEWEST)/constraints.txt
	$(NEWEST)/bin/pip install --quiet --disable-pip-version-check -U -c $(NEWEST)/constraints.txt \
		-e '.[dev]' transformers peft
	$(NEWEST)/bin/pytest -n 2 --dist worksteal --no-skips tests/integrations

# Their source is downloaded, or $TRANSFORMERS_SOURCE has it.
test-transformers-own: $(STAMP) ## transformers' own V4 tests on both caches, nightly
	$(BIN)/pip install --quiet --disable-pip-version-check parameterized
	$(BIN)/python tools/transformers_own_tests.py

# Dynamo's indexer, which reads our events in a test. Its own dependencies are not needed for that.
.venv-dynamo: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $@.part \
		ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1
	mv $@.part $@

test-gpus: $(STAMP)       ## every launch of every kernel compiled for every supported GPU
	$(BIN)/pytest -n 2 -m nightly tests/kernels/test_every_target.py

.venv-triton-%: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $@ triton==$*

# Kernels are compiled with each Triton, and interpreted with the oldest and the newest.
test-tritons: $(TRITONS:%=.venv-triton-%) ## kernels for sm_90 and sm_100 with every Triton that is allowed
	for version in $(TRITONS); do \
		PYTHONPATH=$(CURDIR)/.venv-triton-$$version $(BIN)/pytest -m nightly -k "sm_90 or sm_100" \
			tests/kernels/test_every_target.py || exit 1; \
	done
	for version in $(firstword $(TRITONS)) $(lastword $(TRITONS)); do \
		PYTHONPATH=$(CURDIR)/.venv-triton-$$version $(BIN)/pytest -n 2 --dist worksteal tests/kernels \
			--ignore-glob='*_sm90.py' --ignore-glob='*_every_target.py' || exit 1; \
	done

# torch of another version than the pinned one brings several GB of CUDA packages.
test-oldest:              ## every test on the oldest versions that pyproject.toml allows
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/pip install --quiet --disable-pip-version-check -e '.[dev]' \
		torch==2.11.0 triton==3.6.0 numpy==2.2.0 transformers==5.17.0 typer==0.16.0 rich==13.0.0 safetensors==0.5.0 \
		matplotlib==3.9.0 prometheus-client==0.21.0 xxhash==3.5.0 obstore==0.12.0 pyzmq==27.0.0 msgspec==0.20.0 cryptography==45.0.0
	$(OLDEST)/bin/pytest -n 2 --dist worksteal --ignore-glob='*_sm90.py' --ignore-glob='*_every_target.py'

test-newest:              ## every test on the newest versions that pyproject.toml allows
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/pip install --quiet --disable-pip-version-check -U -e '.[dev]' torch triton numpy transformers
	$(NEWEST)/bin/pytest -n 2 --dist worksteal --ignore-glob='*_sm90.py' --ignore-glob='*_every_target.py'

clean:
	rm -rf dist docs/_build $(VENV) $(NEWEST) $(OLDEST) $(TRITONS:%=.venv-triton-%) .venv-dynamo .venv-dynamo.part .pytest_cache .mypy_cache .ruff_cache
