# make demo | test | test-models | gpu-test | certify | mutants | asan | tsan | docs | build | wheel
# make lint | format
# make clean
# ARGS is passed on, e.g. make demo ARGS="--device cpu", make test ARGS="-k layouts -x".
# PYTHON=... names the python to use, as it is.

ARGS ?=
CXX_FILES = $(shell find csrc tests examples benchmarks -regex '.*\.\(h\|cpp\|cu\|cuh\)' 2>/dev/null)

# Without PYTHON: the python3 at hand if it already has all we need, so that nothing is installed on
# a machine that is ready (or has no network); otherwise an environment of our own, in .venv.
READY = import sys, importlib.util as u, importlib.metadata as m; sys.exit(not ( \
  all(map(u.find_spec, "torch setuptools numpy sklearn matplotlib tqdm pytest hypothesis".split())) \
  and tuple(map(int, m.version("torch").split(".")[:2])) >= (2, 11)))
PYTHON := $(or $(PYTHON),$(shell python3 -c '$(READY)' 2>/dev/null && echo python3))
ifeq ($(PYTHON),)
PYTHON := .venv/bin/python
ENVIRONMENT := .venv/ready
MODELS := .venv/models-ready
DOCS := .venv/docs-ready
WHEEL := .venv/wheel-ready
HOPPER := .venv/hopper-ready
endif

.PHONY: demo test test-models gpu-test certify mutants asan tsan docs build wheel lint format clean

demo: build
	$(PYTHON) -m examples.demo $(ARGS)

# One process for each core, where pytest-xdist is there; each with one thread, as two would wait for
# each other's.
test: build $(MODELS) $(DOCS) $(HOPPER)
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest \
	  $$($(PYTHON) -c 'import xdist' 2>/dev/null && printf '%s' '-n auto --dist loadfile') $(ARGS)

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
# core; ARGS="hand-over ONNX" takes those of whose name or file a word is part.
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

# Where torch runs on GPUs and there is no nvcc, setup.py is an error; here the CPU is better than
# nothing, and the doctor says what is missing.
build: $(ENVIRONMENT)
	@if [ -z "$$TORCH_FUSED_LINEAR_CUDA" ] && \
	  $(PYTHON) -c 'import setup, sys; sys.exit(not setup.lacks_nvcc())'; then \
	  echo 'no fitting nvcc: what follows is built for the CPU only'; \
	  export TORCH_FUSED_LINEAR_CUDA=0; fi; \
	$(PYTHON) setup.py -q build_ext --inplace

# For the torch at hand, which its version names; torch's and CUDA's libraries stay outside.
OUTSIDE = libtorch*.so libc10*.so libcudart.so.* libcublas*.so.* libcudnn*.so.* libgomp.so.1
SCRIPTS = $(shell $(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
wheel: export TORCH_FUSED_LINEAR_HOPPER ?= 1
wheel: $(ENVIRONMENT) $(WHEEL) $(HOPPER)
	rm -rf dist/raw build/lib.*
	PATH="$(SCRIPTS):$$PATH" TORCH_FUSED_LINEAR_LABEL=1 \
	  $(PYTHON) -m build --wheel --no-isolation --outdir dist/raw
	PATH="$(SCRIPTS):$$PATH" $(PYTHON) -m auditwheel repair --wheel-dir dist \
	  $(foreach name,$(OUTSIDE),--exclude '$(name)') dist/raw/*.whl
	rm -rf dist/raw

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
	rm -rf build dist *.egg-info torch_fused_linear/_C* torch_fused_linear/_direct* torch_fused_linear/include
	rm -rf .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

PIP = .venv/bin/python -m pip --disable-pip-version-check install --quiet

.venv/bin/python:
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed")'
	python3 -m venv .venv

.venv/ready: requirements.txt requirements-nvcc.txt | .venv/bin/python
	$(PIP) -r requirements.txt
	@if .venv/bin/python -c 'import setup, sys; sys.exit(not setup.lacks_nvcc())'; then \
	  echo '$(PIP) -r requirements-nvcc.txt'; $(PIP) -r requirements-nvcc.txt; fi
	@touch $@

.venv/models-ready: requirements-models.txt | .venv/ready
	$(PIP) -r requirements-models.txt
	@touch $@

.venv/docs-ready: requirements-docs.txt | .venv/ready
	$(PIP) -r requirements-docs.txt
	@touch $@

.venv/wheel-ready: requirements-wheel.txt | .venv/ready
	$(PIP) -r requirements-wheel.txt
	@touch $@

.venv/hopper-ready: requirements-hopper.txt | .venv/ready
	$(PIP) --no-deps -r requirements-hopper.txt
	@touch $@

.venv/lint-ready: requirements-lint.txt | .venv/bin/python
	$(PIP) -r requirements-lint.txt
	@touch $@
