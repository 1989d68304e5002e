"""Runs the commands of docs/start.md as a new user would, and writes their output into the page.

    python docs/transcript.py [--python python3.11]

Builds the wheel, and runs all ``console`` blocks of the page in one shell, in a temporary folder outside of the
repository. ``python`` blocks that name a file are written when their turn comes. Takes some minutes and 2 GB, since pip
installs torch; needs package indexes, PyTorch's for CPUs among them.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "start.md"
BLOCK = re.compile(r"^```(console|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MEASURED = re.compile(r"(?<=<!-- measured -->\n).*?(?=\n<!-- end -->)", re.DOTALL)
# Longer output is cut to its first and last lines.
FIRST, LAST = 3, 9
MARK = "@@@"


def main() -> None:
    """Run the page and rewrite it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="makes the virtual environment")
    arguments = parser.parse_args()
    page = PAGE.read_text()
    with tempfile.TemporaryDirectory() as folder:
        build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, str(ROOT)]
        subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
        (Path(folder) / "bin").mkdir()
        (Path(folder) / "bin/python3").symlink_to(shutil.which(arguments.python) or arguments.python)
        done = subprocess.run(
            ["bash", "-c", script(page)], cwd=folder, env=environment(folder), text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        text = done.stdout.replace(folder, "~")
    outputs = text.split(MARK)[1:]
    failed = [output for output in outputs if output.split()[1] != "0"]
    if failed or len(outputs) != len(commands(page)):
        sys.exit(f"a command failed:\n{(failed or [text])[0]}")
    pairs = iter(zip(commands(page), outputs, strict=True))

    def block(match: re.Match[str]) -> str:
        if match[1] != "console":
            return match[0]
        number = len(commands(match[0]))
        parts = [f"$ {command}\n{shorten(output.partition(chr(10))[2])}" for command, output in islice(pairs, number)]
        return f"```console\n{''.join(parts)}```"

    PAGE.write_text(MEASURED.sub(times(commands(page), outputs), BLOCK.sub(block, page)))


def environment(folder: str) -> dict[str, str]:
    """Return the variables of a new user."""
    names = ("HOME", "LANG", "PATH", "SSL_CERT_FILE", *(name for name in os.environ if name.startswith("PIP_")))
    kept = {name: os.environ[name] for name in names if name in os.environ}
    return {**kept, "PATH": f"{folder}/bin:{kept['PATH']}", "COLUMNS": "100", "NO_COLOR": "1"}


def commands(page: str) -> list[str]:
    """Return the commands of the page, without the outputs."""
    blocks = (text for language, text in BLOCK.findall(page) if language == "console")
    return [line[2:] for text in blocks for line in text.splitlines() if line.startswith("$ ")]


def script(page: str) -> str:
    """Return a shell script that runs the page, and puts a mark, the seconds and the exit code before each output."""
    lines = []
    for language, text in BLOCK.findall(page):
        if language == "python" and (named := re.match(r"# ([\w./]+\.py)\n", text)):
            lines.append(f"cat > {named[1]} <<'{MARK}'\n{text}{MARK}")
        for command in (line[2:] for line in text.splitlines() if language == "console" and line.startswith("$ ")):
            run = (
                f'{command} > "$out" 2>&1; code=$?; printf "{MARK}%s %s\\n" $(($(date +%s) - start)) $code; cat "$out"'
            )
            lines.append(f"start=$(date +%s); out=$(mktemp); {run}")
    return "\n".join(lines)


def shorten(output: str) -> str:
    """Return the first and last lines of an output."""
    lines = [line for line in output.splitlines() if not line.startswith("WARNING: Location")]
    if len(lines) > FIRST + LAST + 1:
        lines[FIRST:-LAST] = ["..."]
    return "".join(f"{line}\n" for line in lines)


def times(commands: list[str], outputs: list[str]) -> str:
    """Return a sentence about how long the page took."""
    seconds = [int(output.split()[0]) for output in outputs]
    pip = sum(one for one, command in zip(seconds, commands, strict=True) if "pip install" in command)
    total = f"{sum(seconds) // 60} min {sum(seconds) % 60} s"
    load = f"with a load average of {os.getloadavg()[1]:.0f}"
    return f"Measured on {datetime.now(UTC):%d %B %Y}, two cores {load}: {total}, of which `pip install` took {pip} s."


if __name__ == "__main__":
    main()
