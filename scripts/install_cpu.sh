#!/bin/sh
# Installs the locked CPU stack and Kontrast (editable) into a virtual environment.
#     scripts/install_cpu.sh VENV [PYTHON]
# torch is a step of its own: plain pip where it offers a CPU build, else PyTorch's public CPU index; never a CUDA build.
# Everything else is installed from the full lock without resolving: a resolver would bring torchvision beside vLLM's
# CPU build, and that pair does not import.
set -eu
venv=$1
python=${2:-python3.11}
torch_index=https://download.pytorch.org/whl/cpu
torch_pin=$(grep '^torch==' requirements/cpu.txt)
. scripts/waited.sh

[ -x "$venv/bin/python" ] || waited "making $venv" "$python" -m venv "$venv"
pip="$venv/bin/python -m pip --disable-pip-version-check"

if ! "$venv/bin/python" -c "import importlib.metadata as m, sys; sys.exit(m.version('torch').split('+')[0] != '${torch_pin#torch==}')" 2> /dev/null; then
    report=$(mktemp)
    trap 'rm -f "$report"' EXIT
    offered=none
    if waited "looking for a CPU build of torch" $pip install --quiet --dry-run --no-deps --ignore-installed --report "$report" "$torch_pin" 2> /dev/null; then
        offered=$("$venv/bin/python" -c "import json, sys; print(json.load(open(sys.argv[1]))['install'][0]['metadata']['version'])" "$report")
    fi
    case $offered in
        *+cpu) waited "installing torch" $pip install --quiet --no-deps "$torch_pin" ;;
        *) waited "installing torch" $pip install --quiet --no-deps --index-url "$torch_index" "$torch_pin" ;;
    esac
fi
waited "installing the locked packages (about 1 GB in all)" $pip install --quiet --no-deps -r requirements/cpu.txt
waited "installing Kontrast" $pip install --quiet --no-deps --no-build-isolation --editable .
"$venv/bin/python" -c "import torch; assert torch.version.cuda is None, 'a CUDA build of torch was installed'"
