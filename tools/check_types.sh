#!/usr/bin/env bash
# mypy over the package under its installed name: through a folder of links, since the tree keeps it in top-level folders.
set -euo pipefail
cd "$(dirname "$0")/.."
links=$(mktemp -d)
trap 'rm -rf "$links"' EXIT
mkdir "$links/hookline"
for name in src/hookline/* config hooks engine; do
    ln -s "$PWD/$name" "$links/hookline/"
done
MYPYPATH="$links" mypy --config-file pyproject.toml -p hookline
