# The engine and its tests go into .venv, the linters into .venv-lint; `make` alone lists the targets.
#   make serve ARGS="--port 9000"     make test ARGS="-k bench"     make serve PYTHON=python3.12

PYTHON    ?= python3
VENV      ?= .venv
LINT_VENV ?= .venv-lint
# More extras for `make serve` and `make install`, as in EXTRAS=train,bench.
EXTRAS    ?=
# Which JAX for NVIDIA cards: auto asks nvidia-smi, none leaves it out, cuda12 and cuda13 decide.
CUDA      ?= auto
ARGS      ?=
# The suite runs on the CPU, whose numbers it expects and where workers share memory; `make gpu-check` takes the card.
ON_CPU  := JAX_PLATFORMS="$${JAX_PLATFORMS:-cpu}"
# XLA compiles small programs in half the time so, and `make test` runs the same tests on what it makes of them else.
QUICKLY := XLA_FLAGS="$$XLA_FLAGS --xla_backend_optimization_level=0"
# The benchmark's other engine, in a venv of its own.
TORCH        ?= torch==2.13.0
TRANSFORMERS ?= transformers>=5
PEERS_VENV   ?= .venv-peers

PY      := $(VENV)/bin/python
LINT_PY := $(LINT_VENV)/bin/python
PIP     := -m pip --disable-pip-version-check
# The extras that $(VENV) has, and `base`.
STAMP   := $(VENV)/.installed
comma := ,
space := $(subst ,, )

.DEFAULT_GOAL := help
.PHONY: help install serve test test-fast lint format gpu-check gpu-run bench-peers clean FORCE

help:
	@echo "make serve        start the server on http://127.0.0.1:8000 (ARGS=\"--port 9000\")"
	@echo "make test         the whole test suite, on the CPU (ARGS=\"-k bench\")"
	@echo "make test-fast    the tests that need neither the real model nor much time"
	@echo "make install      what serving needs, into .venv (EXTRAS=train,bench adds more)"
	@echo "make lint         ruff, import rules and types"
	@echo "make format       let ruff rewrite the code"
	@echo "make gpu-check    the fast tests and an offline benchmark on an NVIDIA GPU"
	@echo "make bench-peers  jaxspec beside transformers on torch, alternated in one run"
	@echo "make clean        remove what was built and installed here"
	@echo "With an NVIDIA card its JAX is installed too; CUDA=none leaves it out, CUDA=cuda12 or cuda13 decides."

# Which extras $(VENV) is to have. Only the goals that install look at the machine.
ifneq ($(filter install serve test test-fast bench-peers,$(MAKECMDGOALS)),)
ifeq ($(filter auto none cuda12 cuda13,$(CUDA)),)
$(error CUDA is auto, none, cuda12 or cuda13, not "$(CUDA)")
endif
HAVE  := $(shell cat $(STAMP) 2> /dev/null)
NAMED := $(subst $(comma), ,$(EXTRAS))
GPU   := $(filter cuda12 cuda13,$(NAMED) $(CUDA))
ifneq ($(filter install serve,$(MAKECMDGOALS)),)
ifeq ($(GPU)$(CUDA),auto)
GPU   := $(shell sh .ci/cuda_extra.sh)
endif
endif
# The CPU kernels need a C compiler. make has a CC of its own, so only one that the user set counts.
OWN_CC := $(if $(filter environment command,$(firstword $(origin CC))),$(firstword $(CC)))
ZIG    := $(if $(shell for c in $(OWN_CC) cc clang gcc; do command -v $$c && break; done; true),,zig)
TESTS  := $(if $(filter test test-fast,$(MAKECMDGOALS)),test)
WANTED := base $(NAMED) $(GPU) $(ZIG) $(TESTS)
# JAX loads one CUDA plugin. A card that nvidia-smi does not show just now takes nothing away.
ifneq ($(GPU)$(filter none,$(CUDA)),)
DROPPED := $(filter-out $(GPU),$(filter cuda12 cuda13,$(HAVE)))
endif
ALL := $(sort $(filter-out $(DROPPED),$(HAVE)) $(WANTED))
LIST := $(subst $(space),$(comma),$(filter-out base,$(ALL)))
ifneq ($(filter-out $(HAVE),$(ALL))$(DROPPED),)
$(STAMP): FORCE
endif
endif

install: $(STAMP)

serve: $(STAMP)
	@$(PY) -m jaxspec.serve --config configs/default.yaml $(ARGS)

test: $(STAMP)
	$(ON_CPU) $(PY) -m pytest -n 2 $(ARGS)

test-fast: $(STAMP)
	$(ON_CPU) $(QUICKLY) $(PY) -m pytest -n 2 -m "not slow" $(ARGS)

lint: $(LINT_VENV)/.installed
	$(LINT_PY) -m ruff check .
	$(LINT_PY) -m ruff format --check .
	$(LINT_VENV)/bin/lint-imports
	$(LINT_PY) -m pyright --pythonpath $(LINT_PY)

format: $(LINT_VENV)/.installed
	$(LINT_PY) -m ruff check --fix .
	$(LINT_PY) -m ruff format .

# Nothing is installed where a Python here has all it takes.
gpu-check:
	@for python in $(wildcard $(PY)) $(PYTHON); do \
	    if $$python .ci/gpu_ready.py; then exec $(MAKE) --no-print-directory gpu-run GPU_PYTHON="$$python"; fi; \
	done; \
	if ! { command -v nvidia-smi > /dev/null && nvidia-smi -L; }; then \
	    echo "gpu-check: no NVIDIA GPU found on this machine"; exit 1; \
	fi; \
	$(MAKE) --no-print-directory install EXTRAS="$(EXTRAS),test" && $(PY) .ci/gpu_ready.py && \
	$(MAKE) --no-print-directory gpu-run GPU_PYTHON=$(PY)

# From the source tree: jaxspec/sched and jaxspec/models are links, so PYTHONPATH is all it takes.
gpu-run: export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
gpu-run:
	$(GPU_PYTHON) -m pytest -m "not slow" $(ARGS)
	$(GPU_PYTHON) -m jaxspec.bench offline

bench-peers: $(STAMP) $(PEERS_VENV)/.installed
	@$(PY) -m jaxspec.bench peers --peer-python $(PEERS_VENV)/bin/python $(ARGS)

clean:
	rm -rf $(VENV) $(LINT_VENV) $(PEERS_VENV) build dist build.log *.egg-info

%/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "jaxspec needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; try make PYTHON=python3.12")'
	$(PYTHON) -m venv $* || { rm -f $@; exit 1; }

$(STAMP): pyproject.toml | $(PY)
	@echo "Installing jaxspec$(LIST:%=[%]) into $(VENV) (once; a few minutes on a slow line)"
	$(if $(DROPPED),$(PY) $(PIP) uninstall --yes $(DROPPED:%=jax-%-plugin) $(DROPPED:%=jax-%-pjrt))
	$(PY) $(PIP) install --editable ".$(LIST:%=[%])"
	@echo $(ALL) > $@

$(LINT_VENV)/.installed: pyproject.toml | $(LINT_PY)
	$(LINT_PY) $(PIP) install --quiet --editable ".[lint,test]"
	@touch $@

$(PEERS_VENV)/.installed: Makefile | $(PEERS_VENV)/bin/python
	$(PEERS_VENV)/bin/python $(PIP) install "$(TORCH)" "$(TRANSFORMERS)" gguf accelerate
	@touch $@
