# Every habit of this repository is one command. `make help` lists them.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# uv and pip read SSL_CERT_FILE and their own configuration; no index is named here.
UV_INSTALL := $(VENV)/bin/uv pip install --quiet --python $(PY) -c constraints.txt
SOURCES := pyproject.toml constraints.txt

.PHONY: help
help: ## List the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/bin/uv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: $(PYTHON) is older than 3.11; name another one: make PYTHON=python3.11 ..." >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) \
	  || { echo "error: $(PYTHON) can't make virtual environments; on Debian: apt-get install python3-venv" >&2; exit 2; }
	@$(VENV)/bin/pip install --quiet --disable-pip-version-check uv

$(VENV)/.trainer: $(SOURCES) | $(VENV)/bin/uv
	@echo "installing the trainer into $(VENV) ..."
	@$(UV_INSTALL) -e '.[trainer,demo]'
	@touch $@

$(VENV)/.dev: $(SOURCES) | $(VENV)/bin/uv
	@echo "installing everything into $(VENV) ..."
	@$(UV_INSTALL) -e '.[operator,trainer,trackers,demo]' --group dev
	@touch $@ $(VENV)/.trainer

.PHONY: quickstart
quickstart: $(VENV)/.trainer ## Train a LoRA on a tiny SDXL model and real photographs, here and now
	@rm -rf runs/quickstart
	@$(VENV)/bin/kubelora demo runs/quickstart/demo --layout small
	@$(VENV)/bin/kubelora train examples/quickstart/job.yaml \
	  --mount quickstart-model=runs/quickstart/demo/model \
	  --mount quickstart-data=runs/quickstart/demo/photos \
	  --mount quickstart-output=runs/quickstart

.PHONY: dev
dev: $(VENV)/.dev ## Install all that development needs into .venv

.PHONY: test
test: dev ## Run every tier that this machine can run
	@$(PY) -m tests.tiers $(TIERS)

.PHONY: numerics
numerics: dev ## The fault benchmark: every fault, and each healthy configuration once
	@OMP_NUM_THREADS=1 $(PY) -m tests.numerics

.PHONY: numerics-full
numerics-full: dev ## 5 seeds of each fault, 20 of each healthy configuration; continues where it stopped
	@OMP_NUM_THREADS=1 $(PY) -m tests.numerics --seeds 20 --fault-seeds 5 --record build/numerics.jsonl \
	  --report docs/numerics-results.md

$(VENV)/.examples: $(SOURCES) | $(VENV)/.trainer
	@$(UV_INSTALL) -e '.[trainer,demo,examples]'
	@touch $@

.PHONY: six-days
six-days: $(VENV)/.examples ## The story this exists for, on a tiny model: six runs, pictures, a table
	@OMP_NUM_THREADS=1 $(PY) examples/six-days/retell.py

.PHONY: cluster-up
cluster-up: $(VENV)/.trainer ## Start a real one-node Kubernetes here (root, Go); prints the KUBECONFIG to export
	@$(PY) -m tests.cluster.harness up

.PHONY: cluster-images
cluster-images: $(VENV)/.trainer ## Build the operator's and the trainer's image and hand them to that cluster
	@$(PY) -m tests.cluster.harness images

.PHONY: cluster-down
cluster-down: $(VENV)/.trainer ## Stop that cluster and remove everything it left
	@$(PY) -m tests.cluster.harness down

.PHONY: bench-trainer
bench-trainer: $(VENV)/.trainer ## What a step, the memory and the start cost, compared with a reference loop
	@$(PY) -m benchmarks.trainer

.PHONY: bench-telemetry
bench-telemetry: $(VENV)/.trainer ## What telemetry costs of an optimizer step
	@$(PY) -m benchmarks.telemetry_overhead

.PHONY: bench-gpu
bench-gpu: $(VENV)/.trainer ## Images a second and memory on a GPU, with SDXL's real UNet
	@$(PY) -m benchmarks.gpu

.PHONY: bench-operator
bench-operator: dev ## 200 and 1,000 jobs at once, a settled state and a restart, on a control plane of its own
	@$(PY) -m benchmarks.operator_scale

.PHONY: lint
lint: dev ## Style, types and walls between the rooms
	@$(PY) -m tests.tiers lint

.PHONY: format
format: dev ## Format the code
	@$(VENV)/bin/ruff check --fix --quiet . ; $(VENV)/bin/ruff format .

.PHONY: monitoring
monitoring: dev ## Gates on alerts and dashboards, and what they cover, in one line
	@$(PY) -m pytest -q tests/chart/test_monitoring.py tests/chart/test_grafana.py tests/chart/test_generated_files.py
	@$(PY) -m charts.monitoring

.PHONY: generate
generate: dev ## Write generated files again: the CRD, the alert rules, docs/findings.md
	@$(PY) crds/generate.py
	@$(PY) -m charts.generate

.PHONY: clean
clean: ## Remove what builds and runs left (the virtual environment stays)
	@rm -rf build dist runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
