#!/usr/bin/env bash
# Tests against other versions than those of constraints.txt, each in an environment of its own:
#
#   tests/matrix.sh                                 every case below that this machine can make
#   tests/matrix.sh python3.13 textual==8.2.7       some
#
# Cases: pythonX.Y (an interpreter found in the PATH or by pyenv), lowest (the oldest base dependencies that pyproject.toml
# allows), PACKAGE==VERSION (that one beside the rest of constraints.txt; transformers brings its engine and its tests).
# TRACER_MATRIX_DIR keeps the environments (default: the user's cache folder). What was tried: docs/evidence/versions.md.
set -uo pipefail
cd "$(dirname "$0")/.."
root=$PWD
folder=${TRACER_MATRIX_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/tracer/matrix}
mkdir -p "$folder"

# Nothing that needs an engine: sockets, commands, screens, text, what the hooks need of their own.
quick=(tests/tui tests/cli tests/transport tests/test_text_cleaning.py tests/hooks
       --ignore tests/hooks/test_transformers_serve.py --ignore tests/hooks/test_viewer_trouble.py)

interpreter() {  # the path of pythonX.Y, empty when there is none that starts
    local one
    for one in "$1" "$HOME"/.pyenv/versions/"${1#python}".*/bin/python; do
        "$one" -c "import sys; assert 'python%d.%d' % sys.version_info[:2] == '$1'" 2>/dev/null && { echo "$one"; return; }
    done
}

environment() {  # environment NAME PYTHON CONSTRAINTS REQUIREMENT …
    local name=$1 python=$2 constraints=$3
    shift 3
    [ -x "$folder/$name/bin/python" ] || "$python" -m venv "$folder/$name" || return
    "$folder/$name/bin/pip" install --quiet --disable-pip-version-check -c "$constraints" "$@"
}

tests() {  # tests NAME ARGUMENT …
    local name=$1
    shift
    "$folder/$name/bin/python" -m pytest -q -m "not slow" "$@"
}

without() {  # constraints.txt without the line of a package, in a file of its own
    grep -vi "^$1==" constraints.txt > "$folder/constraints-$1.txt"
    echo "$folder/constraints-$1.txt"
}

try() {  # one case
    local python version package
    case $1 in
    python3.*)
        python=$(interpreter "$1")
        [ -n "$python" ] || { echo "no $1 on this machine"; return 3; }
        environment "$1" "$python" constraints.txt -e "$root[dev]" && tests "$1" "${quick[@]}" ;;
    lowest)
        python - > "$folder/lowest.txt" <<'PYTHON' || return
import re, tomllib
for need in tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]:
    print(re.sub(">=", "==", need))
PYTHON
        environment lowest python3.11 "$folder/lowest.txt" -e "$root[dev]" && tests lowest "${quick[@]}" ;;
    transformers==*)
        environment "$1" python3.11 "$(without transformers)" "$1" -e "$root[transformers,dev]" \
            && "$folder/$1/bin/python" -m pytest -q -n 0 tests/hooks ;;
    *==*)
        package=${1%%==*} version=${1##*==}
        # The pin is what is being tried: it does not hold for the install.
        environment "$1" python3.11 "$(without "$package")" -e "$root[dev]" \
            && "$folder/$1/bin/pip" install --quiet --no-deps "$package==$version" && tests "$1" "${quick[@]}" ;;
    *) echo "no case $1"; return 2 ;;
    esac
}

cases=("$@")
[ ${#cases[@]} -gt 0 ] || cases=(python3.12 python3.13 python3.14 lowest textual==8.2.7 transformers==5.23.0)
bad=0
for one in "${cases[@]}"; do
    echo "== $one"
    try "$one"
    code=$?
    [ $code = 0 ] || [ $code = 3 ] || { echo "== $one: exit $code"; bad=1; }
done
exit $bad
