# `make` lists what there is to make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := out/demo
SCENARIO := scenarios/demo.toml
SWEEP ?= scenarios/sweeps/lab.toml
LAB := out/$(basename $(notdir $(SWEEP)))

# name of each row of the demo, and what it overrides in the scenario
ROWS := single checkpointing accumulation ddp zero1 zero2 fsdp pipeline tensor \
	gs gs-3e-4 gs-3e-3 gs-silent gs-uneven gs-z3 gs-wgrad gs-tp
# a shared machine drifts by minutes: layers are measured before, between and after the real runs
RUNS := single.run checkpointing.run accumulation.run ddp.run zero1.run again-1 \
	zero2.run fsdp.run pipeline.run tensor.run gs.run again-2 \
	gs-3e-4.run gs-3e-3.run gs-silent.run gs-uneven.run gs-z3.run gs-wgrad.run gs-tp.run again-3
CALIBRATE = $(BIN)/gsreal calibrate scenarios/models/gpt-byte-1m.toml --ranks 2 --batch-sizes 4,8,16 \
	--sequence-length 128 --out $(DEMO)/cluster.toml
SET_single := --set plan.method=single
SET_checkpointing := --set plan.method=single --set plan.recompute=full
SET_accumulation := --set plan.method=single --set plan.micro_batches=4
SET_ddp := --set plan.method=ddp
SET_zero1 := --set plan.method=zero1
SET_zero2 := --set plan.method=zero2
SET_fsdp := --set plan.method=fsdp
SET_pipeline := --set plan.method=pipeline --set plan.micro_batches=4
SET_tensor := --set plan.method=tensor
SET_gs := --set plan.method=gs
SET_gs-3e-4 := --set plan.push.threshold=3e-4
SET_gs-3e-3 := --set plan.push.threshold=3e-3
# the control: every shard learns from its owner's samples alone
SET_gs-silent := --set plan.push.threshold=inf
SET_gs-uneven := --set plan.shares.shards=[0.7,0.3] --set plan.shares.batch=[0.625,0.375]
SET_gs-z3 := --set plan.method=gs_z3
SET_gs-wgrad := --set plan.method=gs_wgrad
SET_gs-tp := --set plan.method=gs_tp --set plan.shares.shards=[0.75,0.25]
FILES := --set run.steps=30 --set cluster=$(DEMO)/cluster.toml --set workload.gradients=$(DEMO)/gradients.json

.PHONY: help demo study lab test test-slow benchmark lint clean
.DELETE_ON_ERROR:
.SECONDARY:
.NOTPARALLEL:

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

demo: $(DEMO)/comparison.csv ## set up, calibrate this machine, simulate, run for real, compare: out/demo/
	@$(BIN)/python -m analysis compare $(DEMO)/results --out $(DEMO)
	@$(BIN)/python -m analysis report $(DEMO)/results --out $(DEMO)/report.html

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

test: $(VENV)/.test ## all tests but the slow ones, two files at a time
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not gpu"

test-slow: $(VENV)/.test ## the slow real runs
	$(BIN)/python -m pytest -m slow

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
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[real,analysis]'
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV)" >&2
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[real,models,data,analysis,distributed,dev]'
	@touch $@

$(DEMO)/cluster.toml: | $(VENV)/.demo
	$(CALIBRATE)

$(DEMO)/gradients.json: | $(VENV)/.demo
	$(BIN)/gsreal gradients $(SCENARIO) --courses 2 --set run.steps=30 --set cluster=$(DEMO)/cluster.toml --out $@

$(DEMO)/again-%: | $(DEMO)/cluster.toml
	$(CALIBRATE) --again
	@touch $@

$(DEMO)/%.run: $(SCENARIO) | $(DEMO)/cluster.toml $(DEMO)/gradients.json
	@echo "demo: running $* for real" >&2
	@$(BIN)/gsreal run $(SCENARIO) --set name=$* $(SET_$*) $(FILES) --out $(DEMO)/results > /dev/null
	@touch $@

$(DEMO)/%.predicted: $(SCENARIO) $(RUNS:%=$(DEMO)/%)
	@echo "demo: predicting $*" >&2
	@$(BIN)/gssim run $(SCENARIO) --set name=$* $(SET_$*) $(FILES) --out $(DEMO)/results > /dev/null
	@touch $@

$(DEMO)/comparison.csv: $(RUNS:%=$(DEMO)/%) $(ROWS:%=$(DEMO)/%.predicted)
	@$(BIN)/python -m analysis compare $(DEMO)/results --out $(DEMO) > /dev/null
