#!/bin/sh
# Prints one list of what this machine lacks for Kontrast, and how to get it. Exit 1 when something is missing.
#     scripts/prerequisites.sh [PYTHON]
python=${1:-python3.11}
missing=""
add() { missing="$missing\n  - $1"; }

[ "$(uname -s)" = Linux ] && [ "$(uname -m)" = x86_64 ] || add "Linux on x86-64 (here: $(uname -sm); on macOS and Windows use a Linux VM, container or WSL2)"
if ! command -v "$python" > /dev/null 2>&1; then
    add "Python 3.11 ($python; name another with make PYTHON=...)"
elif ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2> /dev/null; then
    add "Python 3.11 ($python is $("$python" -V 2>&1))"
else
    header=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
    [ -e "$header" ] || add "the headers of Python 3.11 ($header)"
    "$python" -c 'import ensurepip, venv' 2> /dev/null || add "Python's venv module"
fi
command -v make > /dev/null 2>&1 || add "make"
command -v g++ > /dev/null 2>&1 || add "g++"

if [ -n "$missing" ]; then
    printf 'This machine lacks:%b\n' "$missing" >&2
    echo 'Debian, Ubuntu:  sudo apt-get install python3.11 python3.11-dev python3.11-venv make g++' >&2
    echo 'Fedora:          sudo dnf install python3.11 python3.11-devel make gcc-c++' >&2
    exit 1
fi
