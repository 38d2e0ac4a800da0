# Sourced by demo.sh and test.sh. Goes to the checkout's root; `prepare_venv` makes or reuses .venv there
# and installs the package into it. What was installed is written down inside .venv, so that nothing is installed twice
# and an edit of setup.cfg or pyproject.toml, or a checkout that has moved, is noticed. All output goes to stderr.

set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
python=.venv/bin/python

# Prints the first Python that is new enough and has venv with pip in it. PYTHON overrides the search.
find_python() {
    local candidate candidates=(python3 python3.14 python3.13 python3.12 python3.11 python3.10 python)
    if [ -n "${PYTHON:-}" ]; then
        candidates=("$PYTHON")
    fi
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys; assert sys.version_info >= (3, 10); import ensurepip, venv' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: no Python >= 3.10 with the venv module (tried ${candidates[*]}); install one, with its venv package" \
        "where that is separate, or name it: PYTHON=/path/to/python3 bash $0" >&2
    return 1
}

# prepare_venv [EXTRA]: the package and what it needs, with those of one of setup.cfg's extras.
prepare_venv() {
    local extra=${1:-} wanted
    local stamp=.venv/installed${extra:+-$extra}
    wanted=$(printf '%s\n' "$root" && cat setup.cfg pyproject.toml)
    if [ -x "$python" ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        return
    fi
    if ! "$python" -m pip --version >/dev/null 2>&1; then
        local base
        base=$(find_python)
        echo "making .venv with $("$base" --version)" >&2
        "$base" -m venv --clear .venv >&2
    fi
    echo "installing the package${extra:+, with the extra '$extra',} into .venv" >&2
    "$python" -m pip install --quiet --disable-pip-version-check --editable ".${extra:+[$extra]}" >&2
    # An extra brings the package itself too.
    printf '%s\n' "$wanted" | tee .venv/installed >"$stamp"
}
