#!/usr/bin/env bash
# Makes .venvs/NAME of tests/environments/NAME.txt: a tool whose pins collide with constraints.txt. The tool itself, the
# first line, comes without what it asks for, of which the file has what is imported here.
#
#     scripts/environment.sh NAME PYTHON
set -euo pipefail
cd "$(dirname "$0")/.."

name=$1 python=$2
file=tests/environments/$name.txt venv=.venvs/$name
tool=$(grep -m1 "^$name==" "$file")
rm -rf "$venv"
"$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip "$@" --quiet --disable-pip-version-check; }
pip install "$(grep '^torch==' constraints.txt)"
pip install -r <(grep -v "^$name==" "$file")
pip install --no-deps --ignore-requires-python "$tool"

if [[ $name == llamafactory ]]; then
    pip install --no-deps -e .
    # It imports torchaudio, whose compiled part is built for CUDA and cannot be loaded beside a torch that is not.
    # Training on text calls nothing of it.
    pip install --no-deps torchaudio
    "$venv/bin/python" -c 'import torchaudio' 2>/dev/null || rm -f "$venv"/lib/python*/site-packages/torchaudio/lib/*.so
    "$venv/bin/python" -c 'import torchaudio'
fi
touch "$venv/installed.stamp"
