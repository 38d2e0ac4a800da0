#!/usr/bin/env bash
# Sets up .venv where that is needed and runs the demo; arguments go to `tvm-axe demo` (--json).
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
prepare_venv
exec "$python" -m tvm_axe demo "$@"
