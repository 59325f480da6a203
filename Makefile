# Every target shares one environment, .venv, which is made on first use and again when setup.cfg changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test interop faults soak lint types format bench clean

# NETWORK: insecure, x509 or org
NETWORK ?= insecure
demo: $(READY)
	$(BIN)/python -m provisioner demo --network $(NETWORK)

test: lint types
	$(BIN)/python -m pytest -n 4 $(PYTEST_ARGS)

# Against the real Choria broker and servers, which are built with Go: the first time takes minutes.
interop: $(READY)
	$(BIN)/python -m pytest tests/interop $(PYTEST_ARGS)

# Everything that may go wrong, at full scale; `make test` has the same at a small one.
faults: $(READY)
	$(BIN)/python -m pytest tests/faults --full $(PYTEST_ARGS)

# MINUTES: how long servers arrive; SOAK_ARGS: --seed N --rate N --daemons 1|2
MINUTES ?= 60
OUT ?= build/soak
soak: $(READY)
	$(BIN)/python -m bench.soak --minutes $(MINUTES) --out $(OUT) $(SOAK_ARGS)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)
	$(BIN)/python bench/bench_connector.py
	$(BIN)/python bench/bench_helper.py
	$(BIN)/python bench/bench_flow.py

$(READY): setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[demo,test]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
