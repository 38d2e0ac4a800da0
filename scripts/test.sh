#!/usr/bin/env bash
# Sets up .venv where that is needed, then lints, checks types and layers, and tests; arguments go to pytest (-k name).
# The tests run in as many processes as there are cores to run on; -n 0 runs them in one. See tests/conftest.py.
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
prepare_venv test
"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy
"${python%python}lint-imports" --no-cache
exec "$python" -m pytest -rs -n auto "$@"
