#!/usr/bin/env bash
# Runs the tests of config, hooks and engine with the oldest and the newest supported Python and torch.
#
#   tools/check_versions.sh                  # all pairs below
#   tools/check_versions.sh python3.11 2.6.0 # one pair
#
# Each pair gets a fresh virtual environment in a temporary folder: about 6 GB, since PyPI's torch for Linux includes
# CUDA, and 15 minutes on two cores. CONTRIBUTING.md says when it last ran.
set -uo pipefail
cd "$(dirname "$0")/.."

pairs=("python3.11 2.6.0" "python3.14 2.15.0")
if [ $# -gt 0 ]; then pairs=("$*"); fi
# Packages of the extras that have wheels for every Python here; the tests of the others are skipped.
packages=(matplotlib numpy omegaconf pandas pillow pytest pytest-timeout pytest-xdist safetensors
    scikit-learn torchdata torchmetrics)
# Not tested here are compiled models, and which packages an import loads: .ci/run does that, with its torch.
tests=(tests/config tests/hooks tests/engine tests/configs tests/test_import.py -k "not compile and not light")

code=0
for pair in "${pairs[@]}"; do
    read -r python torch <<<"$pair"
    venv=$(mktemp -d)/venv
    "$python" -m venv "$venv" &&
        "$venv/bin/pip" install --quiet --no-cache-dir "torch==$torch" "${packages[@]}" -e . &&
        "$venv/bin/python" -m pytest --quiet "${tests[@]}" || code=1
    echo "$(date -u +%F) $("$venv/bin/python" --version), torch $torch: exit code $code"
    rm -rf "$(dirname "$venv")"
done
exit $code
