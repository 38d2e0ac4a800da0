#!/usr/bin/env bash
# Sets up .venv where that is needed, then lints, checks types and tests; arguments go to pytest (-k name).
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
prepare_venv test
"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy
exec "$python" -m pytest -rs "$@"
