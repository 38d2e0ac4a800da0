#!/usr/bin/env bash
# Builds the documentation as a site into docs/_build/html, running the tours; warnings are errors. Arguments go to sphinx.
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
prepare_venv docs
"$python" -m sphinx -W --keep-going -q -b html "$@" docs docs/_build/html
echo "$root/docs/_build/html/index.html"
