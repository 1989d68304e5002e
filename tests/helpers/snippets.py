"""Runs the snippets of README.md, CONTRIBUTING.md and docs/: see :class:`Page`."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from forker import forker
from shell_python import forked_python

ROOT = Path(__file__).resolve().parents[2]

# Blocks in these languages are not run: output, sessions at a prompt, other formats, programs for other libraries (py).
RUN = {"python", "bash", "yaml"}
SAMPLES = {"text", "console", "json", "py"}
SETUP = re.compile(r"(\.venv/bin/)?(python3? -m )?(venv|pip|pytest|ruff)( |$)|\. |\./tools/check")
# Trainings are cut to this many iterations; each later one on a page gets as many more, so that a resume trains.
SHORT = 30


@dataclass(frozen=True)
class Snippet:
    """A fenced block of a page.

    Attributes:
        line: number of the first line of content, from 1.
        language: the word after the fence.
        text: the content.
        file: the name in a first line such as ``# my_hook.py``, if any: the block is the content of that file.
    """

    line: int
    language: str
    text: str
    file: str | None


@dataclass(frozen=True)
class Ran:
    """How many snippets of a page were run, and their output."""

    count: int
    output: str


class Page:
    """A Markdown page whose snippets are run, in order, in a folder of their own with tools/ and configs/ beside them.

    - python: all in one namespace. One that names a file is written there before anything runs. Then it runs by itself,
      or by a bash snippet of the page if it has a ``__main__`` part.
    - yaml: must hold known config keys. One that names a file is written there.
    - bash: each command is run, Python in forked processes, and may fail if it ends in "# fails"; trainings are cut to
      a few iterations. Commands that set up or check the repository (pip, pytest, ruff, ...) are left out.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.snippets = _parse(path)
        unknown = [s for s in self.snippets if s.language not in RUN | SAMPLES]
        if unknown:
            lines = ", ".join(f"{path.name}:{s.line} ({s.language or 'no language'})" for s in unknown)
            raise ValueError(f"say of each block what it is, one of {sorted(RUN | SAMPLES)}: {lines}")

    @property
    def runnable(self) -> list[Snippet]:
        """The snippets to run."""
        return [s for s in self.snippets if s.language in RUN]

    def run(self, folder: Path) -> Ran:
        """Run them in an empty folder, and assert that none failed."""
        for name in ("tools", "configs"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        for snippet in self.runnable:
            if snippet.file:
                (folder / snippet.file).parent.mkdir(parents=True, exist_ok=True)
                (folder / snippet.file).write_text(snippet.text)
        jobs = [job for snippet in self.runnable for job in self._jobs(snippet)]
        (folder / ".driver.py").write_text(_DRIVER)
        with forked_python(folder) as python:
            (folder / ".jobs.json").write_text(json.dumps(jobs).replace(shlex.quote(sys.executable), python))
            log = folder / ".output"  # all processes append to it
            process = forker.start([".driver.py"], folder, _environment(sys.executable), log=log)
            if not process.ended_within(500):
                process.kill()
            code, output = process.wait(), log.read_text()
        assert code == 0, f"{self.path.name}: exit code {code}\n{output[-6000:]}"
        ran = {int(line) for line in re.findall(r"^ran the snippet of line (\d+)$", output, re.MULTILINE)}
        return Ran(len(ran), output)

    def _jobs(self, snippet: Snippet) -> list[list[object]]:
        """Return the driver's jobs for a snippet, each as [kind, line, text]."""
        line, text = snippet.line, snippet.text
        if snippet.language == "yaml":
            return [["yaml", line, snippet.file or text]]
        if snippet.language == "python":
            if snippet.file is None:
                return [["python", line, text]]
            if "__main__" not in text:
                return [["bash", line, f"{shlex.quote(sys.executable)} {shlex.quote(snippet.file)}"]]
            assert any(f"python {snippet.file}" in s.text for s in self.runnable if s.language == "bash"), (
                f"{self.path.name}:{line}: no bash snippet runs {snippet.file}"
            )
            return [["bash", line, ""]]
        text = re.sub(r" +# fails$", " || true", text, flags=re.MULTILINE)
        commands = [self._short(command) for command in shell_commands(text) if not SETUP.match(command)]
        return [["bash", line, "\n".join(commands)]]

    _trainings = 0

    def _short(self, command: str) -> str:
        command = re.sub(r"^hookline (?=\w)", "python -m hookline ", command)
        command = re.sub(r"(^|\s)(\.venv/bin/)?python3?(?=\s)", rf"\1{shlex.quote(sys.executable)}", command, count=1)
        command = re.sub(r"^hookline(?=\s)", f"{shlex.quote(sys.executable)} -m hookline", command)
        training = "train" in command and "--config-file" in command and "lazyconfig" not in command
        command, fails, _ = command.partition(" || true")
        if training and not re.search(r"--(eval-only|dry-run|predict|help)\b", command):
            self._trainings += 1
            command += f" SOLVER.MAX_ITER {SHORT * self._trainings}"
        return command + fails


def shell_commands(text: str) -> list[str]:
    """Return the commands of a shell snippet, split at line ends and ``&&``, without comments."""
    lines = text.replace("\\\n", " ").splitlines()
    commands = [part.strip() for line in lines for part in re.split(r"&&", re.sub(r"(^|\s)#.*", "", line))]
    return [re.sub(r"\s+", " ", command) for command in commands if command]


def run_python(arguments: list[str], folder: Path, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, on one thread, without PYTHON* and PYTEST* variables."""
    environment = _environment(python)
    return subprocess.run(
        [python, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=500, check=False
    )


def _environment(python: str) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    return environment | {"OMP_NUM_THREADS": "1", "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"}


def _parse(path: Path) -> list[Snippet]:
    snippets, start, fence, language = [], 0, "", ""
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        match = re.match(r"\s*(`{3,}|~{3,})\s*(\S*)\s*$", line)
        if not fence and match:
            start, fence, language = number + 1, match[1], match[2]
        elif fence and match and match[1].startswith(fence) and not match[2]:
            content = lines[start - 1 : number - 1]
            indent = min((len(text) - len(text.lstrip()) for text in content if text.strip()), default=0)
            text = "\n".join(text[indent:] for text in content) + "\n"
            named = re.match(r"# ([\w./-]+\.(?:py|yaml))\s*\n", text)
            snippets.append(Snippet(start, language, text, named[1] if named else None))
            fence = ""
    if fence:
        raise ValueError(f"{path.name}:{start}: the block has no end")
    return snippets


# Runs in the page's folder, in a separate process.
_DRIVER = r"""
import json, os, subprocess, sys

from hookline.config import CfgNode, get_cfg

sys.path.insert(0, os.getcwd())
namespace = {"__name__": "__snippets__"}
for kind, line, text in json.load(open(".jobs.json")):
    print(f"--- the snippet of line {line}", flush=True)
    if kind == "python":
        exec(compile("\n" * (line - 1) + text, "<the page>", "exec"), namespace)
    elif kind == "bash":
        done = subprocess.run(["bash", "-eux", "-c", text])
        if done.returncode:
            sys.exit(f"the command of line {line} ends with {done.returncode}: {text}")
    elif kind == "yaml":
        path = text
        if "\n" in text:
            path = f".snippet_{line}.yaml"
            open(path, "w").write(text)
        get_cfg().merge_from_file(path)
    sys.stdout.flush()
    print(f"ran the snippet of line {line}", flush=True)
"""
