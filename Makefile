# `make` lists what there is to make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SWEEP ?= scenarios/sweeps/lab.toml
THOROUGH ?= 1
LAB := out/$(basename $(notdir $(SWEEP)))
# On all cores, which pip does not, and only what runs. Some packages ship files that this Python cannot compile
COMPILE = $(BIN)/python -m compileall -qq -j 0 -x '/tests/|/transformers/models/$(1)' $(VENV)/lib || true
# Nearly half of what is installed, of which the demonstration imports next to nothing
UNUSED_BY_DEMO = |/(scipy|sklearn|joblib|narwhals|fontTools|pygments|pip|setuptools|torchgen)/|/torch/(_inductor|testing|onnx)/

.PHONY: help demo demo-full gpu study lab test test-slow benchmark lint clean
.DELETE_ON_ERROR:
.SECONDARY:
.NOTPARALLEL:

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

demo: $(VENV)/.demo ## set up, calibrate this machine, run ten plans for real, predict, compare: out/demo/
	@$(BIN)/gsreal validate scenarios/sweeps/demo.toml --device cpu --out out/demo

demo-full: $(VENV)/.demo ## the same with seventeen plans and more steps: out/demo-full/
	@$(BIN)/gsreal validate scenarios/sweeps/demo-full.toml --device cpu --out out/demo-full

gpu: $(VENV)/.demo ## the same on the GPUs of this machine, in ten minutes: out/gpu/, out/gpu-bf16/, out/gpu-llama/
	@$(BIN)/gsreal validate --device cuda --seconds 240 --out out/gpu
	@$(BIN)/gsreal validate scenarios/sweeps/validate-gpu-bf16.toml --device cuda --seconds 220 --out out/gpu-bf16
	@$(BIN)/gsreal validate scenarios/sweeps/validate-gpu-llama.toml --device cuda --only 'one--*' --seconds 140 --out out/gpu-llama

study: $(VENV)/.demo ## what thresholds cost in quality and gain in bytes and time, with controls: out/study/
	@$(BIN)/python -m analysis convergence scenarios/studies/gpt-byte.toml --out out/study/gpt-byte
	@$(BIN)/python -m analysis convergence scenarios/studies/resnet-digits.toml --out out/study/resnet-digits

# Predicted anew, by what the simulator is today: a matter of minutes. What is measured stays; what failed is tried again
# by the next call, and the others are compared nevertheless
lab: $(VENV)/.demo ## predict and measure the lab's matrix, or SWEEP=FILE; as root; goes on where it ended: out/lab/
	@$(BIN)/gssim sweep $(SWEEP) --out $(LAB)/results --again > /dev/null
	@$(BIN)/gsreal lab --sweep $(SWEEP) --out $(LAB)/results > /dev/null; code=$$?; [ $$code -le 1 ] || exit $$code; \
	$(BIN)/python -m analysis compare $(LAB)/results --out $(LAB) && \
	$(BIN)/python -m analysis report $(LAB)/results --out $(LAB)/report.html && exit $$code

# With bytecode kept, whatever the environment says: hundreds of processes would each compile the packages anew
test: $(VENV)/.test ## all tests but the slow ones, two files at a time
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow and not gpu"

test-slow: $(VENV)/.test ## the slow tests, and properties on more examples: a night; THOROUGH= for fewer of these
	PYTHONDONTWRITEBYTECODE= GSSIM_THOROUGH=$(THOROUGH) $(BIN)/python -m pytest -n 2 --dist loadfile \
	  --no-loadscope-reorder -m "slow or hypothesis"

benchmark: $(VENV)/.test ## how fast the simulator is on this machine
	$(BIN)/python -m pytest tests/benchmarks -o python_files='bench_*.py' --benchmark-columns=median,min,max,rounds

lint: $(VENV)/.test ## style, types, order of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

clean: ## remove what make made
	rm -rf $(VENV) out build *.egg-info

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV)" >&2
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[real,analysis]'
	@$(call COMPILE,$(UNUSED_BY_DEMO))
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV)" >&2
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[real,models,data,analysis,distributed,dev]'
	@$(COMPILE)
	@touch $@
