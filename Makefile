# Each target sets up all it needs: on a fresh machine only make and Python 3.11 or later must be there.

PYTHON ?= python3
# A release of PyTorch other than that of constraints.txt is tested in an environment of its own: make test TORCH=2.11.0
TORCH :=
VENV := .venv$(TORCH:%=-torch-%)
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Libraries of models look for each other when they are imported: they are kept from the tests.
MODELS := .venv-models
MODELS_STAMP := $(MODELS)/.installed
# What pip installs without constraints.txt, as it does for users: made again each time, for one Python or another.
# Models of `make bench-executor`.
CPU_MODELS := cpu-gpt2,cpu-vit,cpu-unet,cpu-resnet50,cpu-resnet50-wide,cpu-mobilenet_v2,cpu-mobilenet_v2-wide
LATEST := .venv-latest-$(notdir $(PYTHON))

.PHONY: help test test-latest test-slow demo lint format docs docs-serve figures results results-gpu results-offload bench-solve bench-compiled bench-offload bench-options bench-placement bench-addresses bench-reserved bench-arena-models bench-arena-training bench-resident bench-compression bench-eager bench-executor bench-host bench-sharded bench-first-step bench-operators try-models try-entries gpu clean
.DEFAULT_GOAL := help

help: ## say what there is to make
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Interpreters that tests start need the bytecode of the sources, also where the environment says to write none.
test: $(if $(TORCH),$(STAMP),lint) ## style, types, layers and tests, with the slowest tests and the seconds of each folder; tests alone with another PyTorch (TORCH=2.11.0)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal --durations 50

test-latest: ## tests with the newest releases that pyproject.toml allows, in a fresh environment (PYTHON=python3.12, ARGS=tests/graphs)
	$(check_python)
	$(PYTHON) -m venv --clear $(LATEST)
	$(LATEST)/bin/python -m pip install --quiet --editable '.[dev]'
	$(LATEST)/bin/python -m pip list
	OMP_NUM_THREADS=1 $(LATEST)/bin/python -m pytest -n auto --dist worksteal $(ARGS)

test-slow: $(STAMP) ## tests that are marked slow, which run every week (ARGS=tests/solvers)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m 'slow and not gpu' $(ARGS)

lint: docs ## style, types, layers and the documentation site only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## format the sources, and mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP) ## the documentation site, into build/site; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

docs-serve: $(STAMP) ## the site at http://127.0.0.1:8000, made again whenever a page changes
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

figures: $(STAMP) ## the figures of the documentation, into docs/figures
	$(BIN)/python docs/figures/draw.py

demo: $(STAMP) ## plan and run a small GPT at several budgets
	$(BIN)/python examples/demo.py

bench-solve: $(STAMP) ## solve public and zoo instances, into results/solve (ARGS='--suites zoo --fresh')
	$(BIN)/python -m benchmarks solve $(ARGS)

bench-compiled: $(STAMP) ## plans over Inductor's kernels beside torch.compile and its memory budget, into results/compiled (ARGS='--models gpt2 --fresh')
	$(BIN)/python -m benchmarks compiled $(ARGS)

bench-executor: $(STAMP) ## what the executor itself costs, against eager and torch.compile(mode="lite"), into results/executor
	$(BIN)/python -m benchmarks host --models $(CPU_MODELS) --out results/executor $(ARGS)

bench-host: $(STAMP) ## what the host takes for a step whose kernels take nothing: eager, torch.compile, plans in C++ and in Python, into results/host
	$(BIN)/python -m benchmarks host $(ARGS)

bench-eager: $(STAMP) ## the eager runtime: its cost with nothing to evict, and time at budgets, into results/eager
	$(BIN)/python -m benchmarks eager $(ARGS)

bench-sharded: $(STAMP) ## plans of FSDP2's units beside FSDP2 with and without checkpoints, at its peaks, on two processes, into results/sharded
	$(BIN)/python -m benchmarks sharded $(ARGS)

bench-first-step: $(STAMP) ## from planner.compile to the end of the first step with memory capped, on ten models, into results/first_step (ARGS='--models gpt2 --fresh')
	$(BIN)/python -m benchmarks first_step $(ARGS)

bench-offload: $(STAMP) ## recomputing, offloading and both at once, and what they fit into 80 GB, on the roofline of an H200, into results/offload
	$(BIN)/python -m benchmarks offload $(ARGS)
	$(BIN)/python -m benchmarks offload_sizes

bench-options: $(STAMP) ## what options gain, each alone and together, and what inexact ones cost in accuracy, into results/options (ARGS='--models gpt2-medium --seconds 30')
	$(BIN)/python -m benchmarks options $(ARGS)

bench-placement: $(STAMP) ## ops on two devices: either alone, XEngine's serial optimum, side by side, into results/placement
	$(BIN)/python -m benchmarks placement $(ARGS)

bench-addresses: $(STAMP) ## addresses of buffers in one arena, of public instances and of plans, beside best fit, into results/addresses (ARGS='--models public')
	$(BIN)/python -m benchmarks addresses $(ARGS)

bench-reserved: $(STAMP) ## what PyTorch reserves on CUDA for plans of models, beside planned addresses, into results/reserved (ARGS='--models unet')
	$(BIN)/python -m benchmarks reserved $(ARGS)

bench-resident: $(STAMP) ## the resident memory of training by plans, with and without an arena, beside budget and interpreter, into results/resident
	$(BIN)/python -m benchmarks resident $(ARGS)

bench-arena-training: $(STAMP) ## training in an arena and without, with several optimizers: bytes, bits, times, into results/arena_training (ARGS='--models vit')
	$(BIN)/python -m benchmarks arena_training $(ARGS)

bench-arena-models: $(STAMP) $(MODELS_STAMP) ## the models of try-models in an arena and without, into results/arena_models (ARGS='--models transformers/gpt2')
	$(MODELS)/bin/python -m benchmarks try_models --ways "in an arena" --out results/arena_models $(ARGS)

bench-compression: $(STAMP) ## 300 steps with all that can be kept compressed in 8 and 4 bits, beside exact ones, into results/compression (ARGS='--models gpt2 --steps 100')
	$(BIN)/python -m benchmarks compression $(ARGS)

try-models: $(STAMP) $(MODELS_STAMP) ## over 80 models of many libraries and 500 random ones by plans, into results/models (ARGS=--fresh)
	$(MODELS)/bin/python -m benchmarks try_models $(ARGS)
	$(BIN)/python -m pytest -m slow tests/planner/train/compile/test_random_models.py

try-entries: $(STAMP) $(MODELS_STAMP) ## these models by planner.compile, checkpoint, rematerialize and as a backend, into results/entries (ARGS='--models peft/oft-llama --ways compile,backend')
	$(MODELS)/bin/python -m benchmarks try_models --ways compile,checkpoint,backend,rematerialize --out results/entries $(ARGS)

bench-operators: $(STAMP) $(MODELS_STAMP) ## the operators of PyTorch's tests, forward and backward in four types, to the last bit, into results/operators
	$(MODELS)/bin/python -m benchmarks operators $(ARGS)

results: bench-solve ## all under results/ but results/compiled, in about an hour (ARGS=--fresh to do all anew)
	$(BIN)/python -m benchmarks compare $(ARGS)
	$(BIN)/python -m benchmarks host --models $(CPU_MODELS) --out results/executor $(ARGS)
	$(BIN)/python -m benchmarks first_step $(ARGS)
	$(BIN)/python examples/demo.py

results-offload: $(STAMP) ## compare methods that save on the host, with a PyTorch whose hooks reach SAC's tensors (TORCH=2.14.1)
	$(BIN)/python -m benchmarks compare --suites cpu-offload $(ARGS)

results-gpu: $(STAMP) ## on a CUDA device, compare methods on four models, and plan over Triton's kernels
	$(BIN)/python -m benchmarks compare --suites cuda $(ARGS)
	$(BIN)/python -m benchmarks compiled --device cuda --out results/compiled/cuda $(ARGS)

gpu: ## tests and results that need a GPU, in the Python at hand, into $(OUT) or results/gpu (ARGS='--steps tests'); nothing is installed
	$(PYTHON) -m benchmarks gpu.steps $(if $(OUT),--out $(OUT)) $(ARGS)

clean: ## remove .venv and everything generated
	rm -rf .venv .venv-torch-* .venv-latest-* $(MODELS) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

define check_python
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or later is needed; $(PYTHON) is older: make PYTHON=python3.12 ..." >&2; exit 1; }
endef

# Its environment, with what is in brackets installed. The stamp is written last, so that an interrupted installation is done again.
define install
	$(check_python)
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	sed '$(TORCH:%=s/^torch==.*/torch==%/; /^setuptools==/d)' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet --constraint $(@D)/constraints.txt --editable '.[$(1)]'
	touch $@
endef

$(STAMP): pyproject.toml constraints.txt
	$(call install,dev)

$(MODELS_STAMP): pyproject.toml constraints.txt
	$(call install,models)
