# Each target does its own set-up: `make demo` and `make test` need Python 3.11 with pip and venv, nothing else.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: help demo test lint types unit wheel test-py312 resolve lock clean

PYTHON ?= $(shell for p in python3.11 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && exit; done; echo python3.11)
PYTHON312 ?= python3.12
# The tests need about 2 GB a worker; CI has two cores. worksteal: each worker begins with a run of neighbouring tests, so
# that most modules' engines are compiled once.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 4 ? n : 4)))
SPREAD := -n $(WORKERS) --dist worksteal
PYTEST_ARGS ?=

# $(call timed,name,command): the command, and how long it took, whether it passed or not.
timed = @start=$$(date +%s); status=0; ( $(2) ) || status=$$?; \
	echo "== $(1): $$(($$(date +%s) - start)) s$$( ((status == 0)) || echo " (failed)")"; exit $$status

# $(call install,venv,python,constraints,requirement): the stamp is written last, so that a broken install is redone.
install = rm -f $@ && $(2) -m venv $(1) && $(1)/bin/python -m pip install -qq --disable-pip-version-check \
	--constraint constraints/$(3).txt --editable '$(4)' && touch $@
comma := ,
LOCK := pyproject.toml --upgrade --quiet --only-binary :all: --python-platform x86_64-unknown-linux-gnu \
	--python .venv/bin/python --no-python-downloads \
	--no-annotate --custom-compile-command "make lock"

help:
	@echo "make demo        serve the model in configs/tiny, prefill and decode apart, and stream a completion"
	@echo "make test        ruff, mypy, pytest (PYTEST_ARGS='-k name' narrows the last)"
	@echo "make test-py312  the core tests under the newest JAX, on Python 3.12 (PYTHON312=path)"
	@echo "make resolve     check that every extra resolves to wheels on x86-64 and aarch64"
	@echo "make lock        write constraints/ anew with the newest versions"
	@echo "make wheel       build the wheel into dist/"

demo: .venv/.run
	@.venv/bin/python -m qwenjax_serving.demo

test: .venv/.dev
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory types
	@$(MAKE) --no-print-directory unit

lint: .venv/.dev
	$(call timed,ruff,.venv/bin/ruff check . && .venv/bin/ruff format --check .)

types: .venv/.dev
	$(call timed,mypy,.venv/bin/mypy)

unit: .venv/.dev
	$(call timed,pytest,.venv/bin/python -m pytest $(SPREAD) --durations=15 $(PYTEST_ARGS))

# What a release of JAX can break: operations, mesh, model, loading, engine, training. The rest of the tests runs on
# Python 3.11 alone, since CI has 20 minutes.
CORE := $(addprefix tests/ffi/test_,$(addsuffix .py,activations attention collectives expert_parallel \
	grouped_gemm_reference linear norm routing weights)) \
	$(addprefix tests/qwenjax/,$(addsuffix .py,engine/test_engine sampling/test_sample \
	train/test_loop test_load test_mesh test_model test_mtp test_orbax))

test-py312: .venv-py312/.core
	$(call timed,pytest on Python 3.12,.venv-py312/bin/python -c \
		'import flax; import jax; print(f"JAX {jax.__version__}; Flax {flax.__version__}")' \
		&& .venv-py312/bin/python -m pytest $(SPREAD) $(PYTEST_ARGS) $(CORE))

# Two stamps in one environment: the demo must not wait for torch, and the tests' install covers the demo's. NIXL asks
# for torch, which it only looks at where something else has imported it.
nixl = .venv/bin/python -m pip install -qq --disable-pip-version-check --no-deps \
	--constraint constraints/py311.txt nixl nixl-cu12
.venv/.run: pyproject.toml constraints/py311.txt
	$(call timed,install,$(call install,.venv,$(PYTHON),py311,.[serve]) && $(nixl))

.venv/.dev: pyproject.toml constraints/py311.txt
	$(call timed,install,$(call install,.venv,$(PYTHON),py311,.[dev]) && touch .venv/.run)

.venv-py312/.core: pyproject.toml constraints/py312.txt
	$(call timed,install on Python 3.12,$(call install,.venv-py312,$(PYTHON312),py312,.[serve$(comma)test-core]))

resolve: .venv/.dev
	$(call timed,resolve,.venv/bin/python constraints/resolve.py)

lock: .venv/.dev
	.venv/bin/uv pip compile $(LOCK) --python-version 3.11 --extra dev -o constraints/py311.txt
	.venv/bin/uv pip compile $(LOCK) --python-version 3.12 --extra serve --extra test-core -o constraints/py312.txt

wheel: .venv/.dev
	@.venv/bin/python -m hatchling build -t wheel

clean:
	rm -rf .venv .venv-py312 .mypy_cache .pytest_cache .ruff_cache .hypothesis dist build
