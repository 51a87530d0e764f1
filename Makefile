# Everything is installed into .venv; `make` alone lists the targets.
#   make serve ARGS="--port 9000"     make test ARGS="-k bench"     make serve PYTHON=python3.12

PYTHON ?= python3
VENV   ?= .venv
EXTRAS ?= test
CUDA   ?= cuda13
ARGS   ?=
# XLA compiles small programs in half the time so, and `make test` runs the same tests on what it makes of them else.
QUICKLY := XLA_FLAGS="$$XLA_FLAGS --xla_backend_optimization_level=0"
# The benchmark's other engine, in a venv of its own.
TORCH        ?= torch==2.13.0
TRANSFORMERS ?= transformers>=5
PEERS_VENV   ?= .venv-peers

PY  := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
comma := ,
INSTALLED := $(VENV)/.installed-$(subst $(comma),-,$(EXTRAS))

.DEFAULT_GOAL := help
.PHONY: help install serve test test-fast lint format gpu-check bench-peers clean

help:
	@echo "make serve        start the server on http://127.0.0.1:8000 (ARGS=\"--port 9000\")"
	@echo "make test         the whole test suite (ARGS=\"-k bench\")"
	@echo "make test-fast    the tests that need neither the real model nor much time"
	@echo "make lint         ruff, import rules and types, the last two on the built wheel"
	@echo "make format       let ruff rewrite the code"
	@echo "make gpu-check    the fast tests and an offline benchmark on an NVIDIA GPU (CUDA=cuda13 or cuda12)"
	@echo "make bench-peers  jaxspec beside transformers on torch, alternated in one run"
	@echo "make clean        remove what was built and installed here"

install: $(INSTALLED)

serve: $(INSTALLED)
	@$(PY) -m jaxspec.serve --config configs/default.yaml $(ARGS)

test: $(INSTALLED)
	$(PY) -m pytest -n 2 $(ARGS)

test-fast: $(INSTALLED)
	$(QUICKLY) $(PY) -m pytest -n 2 -m "not slow" $(ARGS)

lint: $(VENV)/.installed-lint
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	rm -rf build dist
	$(PY) -m build --wheel --outdir dist . > build.log 2>&1 || { cat build.log; exit 1; }
	$(PIP) install --quiet --no-deps --no-compile --target build/wheel dist/*.whl
	cd build/wheel && $(abspath $(VENV))/bin/lint-imports --config ../../pyproject.toml
	$(PY) -m pyright --pythonpath $(PY)

format: $(VENV)/.installed-lint
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

gpu-check:
	@command -v nvidia-smi > /dev/null && nvidia-smi -L || { echo "gpu-check: no NVIDIA GPU found on this machine"; exit 1; }
	@$(MAKE) --no-print-directory install EXTRAS=test,$(CUDA)
	@$(PY) -c 'import jax; raise SystemExit(None if jax.default_backend() == "gpu" else "gpu-check: JAX sees no GPU; try CUDA=cuda12 for an older driver")'
	$(PY) -m pytest -m "not slow" $(ARGS)
	$(PY) -m jaxspec.bench offline

bench-peers: $(INSTALLED) $(PEERS_VENV)/.installed
	@$(PY) -m jaxspec.bench peers --peer-python $(PEERS_VENV)/bin/python $(ARGS)

clean:
	rm -rf $(VENV) $(PEERS_VENV) build dist build.log jaxspec.egg-info

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "jaxspec needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV) || { rm -f $(PY); exit 1; }

$(INSTALLED): pyproject.toml | $(PY)
	@echo "Installing jaxspec and what it needs into $(VENV) (once; a few minutes on a slow line)"
	$(PIP) install --editable ".[$(EXTRAS)]"
	@touch $@

$(VENV)/.installed-lint: pyproject.toml | $(PY)
	$(PIP) install --quiet --editable ".[test,lint,bench]"
	@touch $@

$(PEERS_VENV)/.installed: Makefile
	$(PYTHON) -m venv $(PEERS_VENV)
	$(PEERS_VENV)/bin/python -m pip --disable-pip-version-check install "$(TORCH)" "$(TRANSFORMERS)" gguf accelerate
	@touch $@
