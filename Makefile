# make demo, make test: everything on a fresh machine that has Python 3.11 or newer and make.
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Tests run in JOBS processes; torch's own threads would only fight them for the cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS)

# A GPU image brings its own torch, and often no network: without a .venv, test-gpu and bench use
# its Python as it is. Elsewhere they make the .venv like every other target.
OWN_TORCH :=
ifneq (,$(filter test-gpu bench,$(MAKECMDGOALS)))
ifeq (,$(wildcard $(STAMP)))
OWN_TORCH := $(shell $(PYTHON) -c 'from importlib.util import find_spec as f; print("yes" if f("torch") and f("attrs") else "")' 2>/dev/null)
endif
endif
ifeq ($(OWN_TORCH),yes)
ANY_PYTHON := PYTHONPATH=src $(PYTHON)
ANY_STAMP :=
else
ANY_PYTHON := $(BIN)/python
ANY_STAMP := $(STAMP)
endif

.PHONY: demo test test-torch test-interpreter test-gpu lint format bench fuzz clean

demo: $(STAMP)  ## install, then replay the default synthetic trace
	$(BIN)/kv-canary replay

test: test-torch test-interpreter  ## the gate

test-torch: $(STAMP)
	$(PYTEST) -m "not interpreter"

# Its own process: triton reads TRITON_INTERPRET once, when it is imported.
test-interpreter: $(STAMP)
	TRITON_INTERPRET=1 $(PYTEST) -m interpreter tests

# Without a device every test would skip and pytest call that a success, so ask first.
test-gpu: $(ANY_STAMP)  ## the tests marked gpu, on this machine's GPU
	@$(ANY_PYTHON) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("make test-gpu: torch %s sees no CUDA device" % torch.__version__)'
	$(ANY_PYTHON) -m pytest -q -m gpu tests

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(ANY_STAMP)
	$(ANY_PYTHON) -m bench

fuzz: $(STAMP)  ## the property tests again, with many more and fresh examples
	HYPOTHESIS_PROFILE=fuzz $(PYTEST) -m "hypothesis and not interpreter" tests
	HYPOTHESIS_PROFILE=fuzz TRITON_INTERPRET=1 $(PYTEST) -m "hypothesis and interpreter" tests

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The install is complete when the stamp is there, and is made again when what it reads changes.
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "make: no $(PYTHON) here; Python 3.11 or newer is needed (make PYTHON=/path/to/python3)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("make: Python 3.11 or newer is needed, $(PYTHON) is %d.%d (make PYTHON=/path/to/python3)" % sys.version_info[:2])'
	@echo "Installing into $(VENV); the first time this downloads torch."
	@$(PYTHON) -m venv $(VENV)
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -q -c constraints.txt -e ".[dev]"
	@touch $@
