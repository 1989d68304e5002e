import ast
import json
import os
import re
import subprocess
import sys

from snippets import ROOT

HEAVY = (
    *("tensorboard", "sklearn", "matplotlib", "torchmetrics", "torchvision", "sympy"),
    *(
        "torch.utils.tensorboard",
        "torch.distributed.checkpoint",
        "torch.distributed.tensor",
        "torch.distributed.elastic",
    ),
)


def python(code, cwd):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_imports_are_light(tmp_path):
    code = "import json, sys, hookline.config; before = 'torch' in sys.modules; import hookline.engine, hookline.hooks"
    loaded = python(f"{code}; print(json.dumps([before, *sorted(sys.modules)]))", tmp_path)
    assert loaded[0] is False  # the config needs no torch
    assert "hookline.hooks" in loaded
    assert set(loaded[1:]).isdisjoint(HEAVY)


def test_nothing_but_hookline_is_installed_at_top_level(tmp_path):
    names = ("engine", "hooks", "config", "tools", "tests", "configs")
    code = f"import json; from importlib.util import find_spec; print(json.dumps([n for n in {names} if find_spec(n)]))"
    assert python(code, tmp_path) == []


def test_packages_that_are_imported_with_hookline_are_declared():
    imported = set()
    for folder in ("config", "hooks", "engine"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.Import):
                    imported |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    imported.add(node.module.partition(".")[0])
    required = (ROOT / "setup.py").read_text().split("install_requires=[")[1].split("]")[0]
    declared = {name.lower().removeprefix("py") for name in re.findall(r'"([A-Za-z]+)', required)}  # yaml is of PyYAML
    assert imported - set(sys.stdlib_module_names) - {"hookline"} <= declared


def test_every_public_name_exists():
    import hookline.config
    import hookline.engine
    import hookline.hooks

    for package in (hookline.config, hookline.engine, hookline.hooks):
        for name in package.__all__:
            assert getattr(package, name) is not None, name
