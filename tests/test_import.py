import ast
import json
import re
import sys
import tomllib

from snippets import ROOT, run_python

import hookline.config
import hookline.engine
import hookline.hooks

HEAVY = {
    *("tensorboard", "sklearn", "matplotlib", "torchmetrics", "torchvision", "sympy", "torch.utils.tensorboard"),
    *("torch.distributed.checkpoint", "torch.distributed.tensor", "torch.distributed.elastic"),
}
CODE = """
import json, sys
from importlib.util import find_spec
top = [name for name in ("engine", "hooks", "config", "tools", "tests", "configs") if find_spec(name)]
import hookline.config
early = list(sys.modules)
import hookline.engine, hookline.hooks
print(json.dumps([top, early, list(sys.modules)]))
"""


def test_imports_are_light_and_take_no_other_names_at_top_level(tmp_path):
    done = run_python(["-c", CODE], tmp_path)
    assert done.returncode == 0, done.stderr
    top, early, loaded = json.loads(done.stdout)
    assert top == []
    assert "torch" not in early  # the config needs none
    assert "hookline.hooks" in loaded
    assert HEAVY.isdisjoint(loaded)


def test_packages_that_are_imported_with_hookline_are_declared():
    imported = set()
    for folder in ("config", "hooks", "engine"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.Import):
                    imported |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    imported.add(node.module.partition(".")[0])
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    declared = {re.match("[A-Za-z]+", name)[0].lower().removeprefix("py") for name in required}  # yaml is of PyYAML
    assert imported - set(sys.stdlib_module_names) - {"hookline"} <= declared


def test_every_public_name_exists():
    for package in (hookline.config, hookline.engine, hookline.hooks):
        for name in package.__all__:
            assert getattr(package, name) is not None, name
