#!/usr/bin/env bash
# mypy over the package under its installed name: through a folder of links, since the tree keeps it in top-level folders.
# If pyright is installed (pip install pyright), it checks the scripts in tools/ and the README's examples.
set -euo pipefail
cd "$(dirname "$0")/.."
links=$(mktemp -d)
trap 'rm -rf "$links"' EXIT
mkdir "$links/hookline"
for name in src/hookline/* config hooks engine; do
    ln -s "$PWD/$name" "$links/hookline/"
done
MYPYPATH="$links" mypy --config-file pyproject.toml -p hookline
MYPYPATH="$links" mypy --config-file pyproject.toml tests/cli/typed_script.py
if command -v pyright >/dev/null; then
    ln -s "$PWD/tools" "$links/tools"
    mkdir "$links/readme"
    # An example is in the file that its first line names.
    awk -v folder="$links/readme/" '/^```python$/ {n++; getline; file = folder (/^# [a-z_]+\.py$/ ? $2 : "example" n ".py")}
        /^```$/ {file = ""} file {print > file}' README.md
    echo '{"include": ["tools", "readme"], "extraPaths": [".", "tools/benchmarks"]}' >"$links/pyrightconfig.json"
    pyright --pythonpath "$(command -v python)" --project "$links/pyrightconfig.json"
fi
