# make demo | test | test-releases | test-models | gpu-test | certify | mutants | asan | tsan | docs
# make build | wheel | lint | format
# make clean
# ARGS is passed on, e.g. make demo ARGS="--device cpu", make test ARGS="-k layouts -x".
# PYTHON=... names the python to use, as it is. TORCH=2.15 takes an environment of its own with that
# torch; `make wheel TORCH="2.11 2.15"` makes a wheel for several.

ARGS ?=
TORCH ?=
CXX_FILES = $(shell find csrc tests examples benchmarks -regex '.*\.\(h\|cpp\|cu\|cuh\)' 2>/dev/null)
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c

# Without PYTHON: the python3 at hand if it already has all we need, so that nothing is installed on
# a machine that is ready (or has no network); otherwise an environment of our own.
READY = import sys, importlib.util as u, importlib.metadata as m; sys.exit(not ( \
  all(map(u.find_spec, "torch setuptools numpy sklearn matplotlib tqdm pytest".split())) \
  and tuple(map(int, m.version("torch").split(".")[:2])) >= (2, 11)))
ifneq ($(filter wheel,$(MAKECMDGOALS)),)
TORCHS := $(TORCH)
else ifneq ($(TORCH),)
VENV := .venv-$(TORCH)
REQUIRED = 'torch==$(TORCH).*'
endif
VENV ?= .venv
ifeq ($(VENV),.venv)
PYTHON := $(or $(PYTHON),$(shell python3 -c '$(READY)' 2>/dev/null && echo python3))
endif
ifeq ($(PYTHON),)
PYTHON := $(VENV)/bin/python
ENVIRONMENT := $(VENV)/ready
ALONE := $(VENV)/torch-ready
MODELS := $(VENV)/models-ready
DOCS := $(VENV)/docs-ready
WHEEL := $(VENV)/wheel-ready
HOPPER := $(VENV)/hopper-ready
endif

.PHONY: demo test test-releases test-models gpu-test certify mutants asan tsan docs build wheel
.PHONY: library environment lint format clean

demo:
	@$(MAKE) --no-print-directory -j2 build
	$(PYTHON) -m examples.demo $(ARGS)

# Tests start Python hundreds of times, which is to compile torch's modules once.
ifneq ($(PYTHONDONTWRITEBYTECODE),)
export PYTHONPYCACHEPREFIX := $(CURDIR)/build/bytecode
export PYTHONDONTWRITEBYTECODE :=
endif

# One process for each core, where pytest-xdist is there; each with one thread, as two would wait for
# each other's.
PYTEST = OMP_NUM_THREADS=1 $(PYTHON) -m pytest \
  $$($(PYTHON) -c 'import xdist' 2>/dev/null && printf '%s' '-n auto --dist loadfile')
test: build environment
	$(PYTEST) $(ARGS)

# What is built on torch's private parts, which differ between its releases: the newest one is held to
# these at every change (.ci/run), every one in the workflow. They need no other package than torch.
RELEASES = integration/test_torch_internals.py autograd/test_engine.py autograd/test_checkpoint.py \
  autograd/test_accumulation.py distributed/test_parallel.py distributed/test_strategies.py \
  graph/test_compile.py graph/test_fusion_inductor.py autograd/test_stacks.py \
  autograd/test_systems.py memory nn ops/test_opcheck.py
test-releases: build
	$(PYTEST) $(RELEASES:%=tests/%) $(ARGS)

# Hours on one core; an interrupted run goes on where it was. ARGS="--only timm/vit" takes a part.
test-models: build $(MODELS)
	$(PYTHON) tests/fuse/model_zoo.py --resume $(ARGS)

# Needs a GPU; leaves tests/gpu_record.json as evidence of the run.
gpu-test: build
	$(PYTHON) tests/support/gpu_record.py $(ARGS)

# All parts, or PARTS="fuzz faults"; each leaves a record in tests/certify/records, and goes on where
# it was interrupted. ARGS="--seed 2 --count 1000" says what is tried.
PARTS ?=
certify: build
	$(PYTHON) tests/certify $(PARTS) $(ARGS)

# Faults, planted one at a time in a copy of the sources: do the tests notice them? Hours on one
# core; ARGS="backward ONNX" takes those of whose name or file a word is part.
mutants: build
	$(PYTHON) tests/support/mutants.py $(ARGS)

# The C++ tests under the compiler's sanitizers: addresses, and races of threads.
asan: build
	$(PYTHON) tests/support/sanitized.py address $(ARGS)

tsan: build
	$(PYTHON) tests/support/sanitized.py thread $(ARGS)

# Warnings are errors; the front page is build/docs/docs/index.html.
docs: build $(DOCS)
	$(PYTHON) -m sphinx -q -W --keep-going -c docs . build/docs $(ARGS)

# Where GPUs are to be built for and there is no nvcc, setup.py is an error. In an environment of our
# own it is installed; elsewhere the CPU is better than nothing, and the doctor says what is missing.
define GET_NVCC
packages=$$($(PYTHON) -c 'import setup; print(setup.missing_nvcc())') || exit; \
if [ -n "$$packages" ] && [ -n "$(ENVIRONMENT)" ]; then \
  flock $(VENV) $(PIP) "$$packages"; \
elif [ -n "$$packages" ]; then \
  echo "no fitting nvcc (pip install '$$packages'): what follows is built for the CPU only"; \
  export TORCH_FUSED_LINEAR_CUDA=0; fi
endef

# All that tests need, where it is not there; .ci/run has it downloaded while it builds.
environment: $(ENVIRONMENT) $(MODELS) $(DOCS) $(HOPPER)

build: library $(ENVIRONMENT)

# Needs no more than torch, so that with -j2 the rest is installed meanwhile.
library: $(ALONE)
	@$(GET_NVCC); $(PYTHON) setup.py -q build_ext --inplace

# For the torch at hand, or all of TORCH; torch's and CUDA's libraries stay outside.
OUTSIDE = libtorch*.so libc10*.so libcudart.so.* libcublas*.so.* libcudnn*.so.* libgomp.so.1
SCRIPTS = $(shell $(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
empty :=
folders = $(subst $(empty) $(empty),:,$(foreach t,$(TORCHS),$(CURDIR)/build/torch/$(t)/torch))
wheel: export TORCH_FUSED_LINEAR_HOPPER ?= 1
wheel: export TORCH_FUSED_LINEAR_LABEL = 1
wheel: export TORCH_FUSED_LINEAR_TORCH ?= $(folders)
wheel: $(ENVIRONMENT) $(WHEEL) $(HOPPER) $(TORCHS:%=build/torch/%/torch/version.py)
	rm -rf dist/raw build/lib.*
	$(GET_NVCC); PATH="$(SCRIPTS):$$PATH" \
	  $(PYTHON) -m build --wheel --no-isolation --outdir dist/raw
	PATH="$(SCRIPTS):$$PATH" $(PYTHON) -m auditwheel repair --wheel-dir dist \
	  $(foreach name,$(OUTSIDE),--exclude '$(name)') dist/raw/*.whl
	rm -rf dist/raw

# To compile and link against; never imported, so that nothing it depends on is needed.
build/torch/%/torch/version.py: | $(ENVIRONMENT)
	$(PIP) --no-deps --target build/torch/$* 'torch==$*.*'

lint: .venv/lint-ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/clang-format --dry-run -Werror $(CXX_FILES)
	.venv/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	.venv/bin/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff

format: .venv/lint-ready
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .
	.venv/bin/clang-format -i $(CXX_FILES)

clean:
	rm -rf build dist *.egg-info torch_fused_linear/lib torch_fused_linear/include
	rm -rf .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

# pip says what it downloads; unpacking it takes as long again.
PIP_INSTALL = -m pip --disable-pip-version-check install --no-compile
PIP = $(PYTHON) $(PIP_INSTALL)
LINES = sed -un 's/^ *Downloading /  /p; /^ERROR/,$$p'

$(sort .venv/bin/python $(VENV)/bin/python):
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed")'
	python3 -m venv $(@:/bin/python=)

PINNED = $(or $(REQUIRED),$(shell grep '^torch==' requirements.txt))
$(VENV)/torch-ready: requirements.txt | $(VENV)/bin/python
	@echo 'installing torch, and what build, tests and demo need: 5 GB, of which pip downloads 3'
	$(VENV)/bin/python $(PIP_INSTALL) --no-deps $(PINNED) \
	  $$(grep '^setuptools==' requirements.txt) | $(LINES)
	@touch $@

# The compiler, which runs beside it, goes first.
$(VENV)/ready: requirements.txt | $(VENV)/torch-ready
	flock $(VENV) nice $(VENV)/bin/python $(PIP_INSTALL) \
	  -r <(echo $(PINNED); grep -v '^torch==' requirements.txt) | $(LINES)
	@touch $@

# The newest that fit another torch than the pinned one.
$(VENV)/models-ready: requirements-models.txt | $(VENV)/ready
	$(VENV)/bin/python $(PIP_INSTALL) \
	  -r <(grep -v $(if $(REQUIRED),'^torchvision==','^$$') requirements-models.txt) | $(LINES)
	@touch $@

$(VENV)/docs-ready: requirements-docs.txt | $(VENV)/ready
	$(VENV)/bin/python $(PIP_INSTALL) -r requirements-docs.txt | $(LINES)
	@touch $@

$(VENV)/wheel-ready: requirements-wheel.txt | $(VENV)/ready
	$(VENV)/bin/python $(PIP_INSTALL) -r requirements-wheel.txt | $(LINES)
	@touch $@

$(VENV)/hopper-ready: requirements-hopper.txt | $(VENV)/ready
	$(VENV)/bin/python $(PIP_INSTALL) --no-deps -r requirements-hopper.txt | $(LINES)
	@touch $@

.venv/lint-ready: requirements-lint.txt | .venv/bin/python
	.venv/bin/python $(PIP_INSTALL) -r requirements-lint.txt | $(LINES)
	@touch $@
