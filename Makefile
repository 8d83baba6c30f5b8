# One environment for everything: created by the first target that needs it, updated when pyproject.toml changes.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
# A Mac and a CUDA machine bring their own MLX back end; everything else runs on the CPU one.
EXTRA  ?= $(shell $(PYTHON) -c "import platform, shutil; print('' if platform.system() == 'Darwin' else 'cuda' if shutil.which('nvidia-smi') else 'cpu')")
comma  := ,

.PHONY: demo test test-slow bench lint format clean

demo: $(VENV)/.demo-installed
	$(BIN)/turbospark-mlx pull smollm2-135m
	$(BIN)/turbospark-mlx generate smollm2-135m "Why is the sky blue?" --max-tokens 120

test: $(VENV)/.test-installed
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile

test-slow: $(VENV)/.test-installed
	$(BIN)/python -m pytest -m slow

bench: $(VENV)/.test-installed
	$(BIN)/python benchmarks/decode.py

lint: $(VENV)/.test-installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: $(VENV)/.test-installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build *.egg-info

$(VENV)/bin/python:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'turbospark-mlx needs Python 3.11 or newer; this is ' + sys.version.split()[0] + '. Try: make PYTHON=python3.12 demo')"
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo-installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".$(if $(EXTRA),[$(EXTRA)])"
	@touch $@

$(VENV)/.test-installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[$(if $(EXTRA),$(EXTRA)$(comma))test]"
	@touch $@ $(VENV)/.demo-installed
