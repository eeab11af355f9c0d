# The two commands of the README are `make run` and `make test`.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed
export TORCH_DEVICE_BACKEND_AUTOLOAD := 0

TPU := .venv-tpu
XLA := .venv-xla

.PHONY: run test test-slow test-tpu test-xla mutants lint install clean benchmark browser device-check

install: $(READY)

# torch goes in first: a later package that asks for "torch" would bring a CUDA build of several GB.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt setuptools
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $(READY)

run: $(READY)
	$(BIN)/python -m kdk_bench.llama
	$(BIN)/kdk check --quick rms_norm add_rms_norm silu_and_mul rope

test: lint
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow"

test-slow: $(READY)
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m slow

# TorchTPU as far as a machine without a TPU goes. Its package lies beside the environment: torch would load it at every import.
$(TPU)/.installed: $(READY)
	$(BIN)/python -m pip install -q --no-deps --target $(TPU) torch_tpu==0.2.0
	$(BIN)/python -m pip install -q --target $(TPU) absl-py portpicker frozendict immutabledict pyzmq
	touch $@

test-tpu: $(TPU)/.installed
	set -e; for chip in v5e v6e tpu7x; do \
		CHIP=$$chip OMP_NUM_THREADS=1 PYTHONPATH=$(TPU) $(BIN)/python -m pytest tests/tpu; done

# PyTorch/XLA wants torch 2.9, which has no CPU build on PyPI: an environment of its own, of 6 GB. torch_xla's package holds an
# old torchax that wants flax too: a newer one goes in over it.
$(XLA)/.installed: pyproject.toml constraints-xla.txt
	$(PYTHON) -m venv $(XLA)
	$(XLA)/bin/python -m pip install -q --no-deps --no-compile -r constraints-xla.txt
	$(XLA)/bin/python -m pip install -q --no-deps --no-compile torchax==0.0.7
	$(XLA)/bin/python -m pip install -q --no-deps --no-build-isolation -e .
	touch $@

test-xla: $(XLA)/.installed
	PJRT_DEVICE=CPU JAX_PLATFORMS=cpu OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(XLA)/bin/python -m pytest tests/xla

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

# Debian's Chromium, in which the slow tests open the HTML reports. As root.
browser:
	apt-get install -y -qq chromium

# Faults planted in every kernel by a program: how many the quick tier finds.
mutants: $(READY)
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m kdk_bench.mutation

# On a machine with a GPU, a TPU or a Trainium, five minutes at most: with PYTHON as it is there, whose torch knows the device.
# Nothing is installed. DRY=1: a handful of cases on the simulators, anywhere.
device-check:
	TORCH_DEVICE_BACKEND_AUTOLOAD=$(if $(DRY),0,1) PYTHONPATH=bindings:kernels:bench:$(PYTHONPATH) \
	    $(PYTHON) -m kdk_bench.device_check $(if $(DRY),--dry-run) --out device-check

benchmark: $(READY)
	$(BIN)/python benchmarks/overhead.py

clean:
	rm -rf $(VENV) $(TPU) $(XLA) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
