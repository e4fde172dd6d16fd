# Every target sets up what it needs. Stamps under .venv keep a second call from installing again.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
OLD_TRITON := .venv-tritonclient-2.50

.PHONY: demo test check lint format pytest protos docs bench clean

demo: $(VENV)/.serve ## export, check, serve and call a small model: the newcomer's first minute
	$(BIN)/rsrv demo

test: check pytest ## everything that CI runs

check: $(VENV)/.dev ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

pytest: $(VENV)/.dev $(OLD_TRITON)/.ready
	RSRV_REQUIRE_CONTRACT_ENVS=1 $(BIN)/pytest

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: $(VENV)/.dev ## regenerate rsrv/protos from protos/
	$(BIN)/python protos/generate.py

docs: $(VENV)/.dev ## regenerate the generated parts of docs/
	$(BIN)/python docs/generate.py

bench: $(VENV)/.dev ## side-by-side measurements; BENCH="--short" for the short form
	$(BIN)/python -m benchmarks $(BENCH)

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache

$(VENV)/.python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rsrv needs Python 3.11 or newer; set PYTHON=…")'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.serve: $(VENV)/.python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[serve]'
	touch $@

$(VENV)/.dev: $(VENV)/.python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@ $(VENV)/.serve

# The oldest tritonclient that we promise to answer, in an environment of its own.
$(OLD_TRITON)/.ready:
	$(PYTHON) -m venv $(OLD_TRITON)
	$(OLD_TRITON)/bin/python -m pip install --quiet --disable-pip-version-check 'tritonclient==2.50.0' 'grpcio' 'protobuf<6' 'numpy' 'python-rapidjson' 'packaging'
	touch $@
